// Nbio counts with github.com/lesismal/nbio: nbio ADDRESS INTERVAL. It sets the library up as its documentation does.
package main

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/lesismal/nbio/nbhttp"
	"github.com/lesismal/nbio/nbhttp/websocket"

	"beside/work"
)

func main() {
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "nbio:", err)
		os.Exit(1)
	}
}

func serve(addr, interval string) error {
	every, err := time.ParseDuration(interval)
	if err != nil {
		return err
	}

	hub := work.NewHub(textFrame)
	upgrader := newUpgrader(hub)
	mux := http.NewServeMux()
	mux.Handle("/", hub)
	mux.HandleFunc("/-/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			return // Upgrade has answered
		}
		// The hub writes encoded frames to nbio's connection below the WebSocket. That is sound in nbio's non-blocking
		// mode: websocket.Conn writes its own frames in the same way, with one Write each, and the connection has a
		// lock and a queue of its own.
		c.SetSession(hub.Welcome(r.URL.Query().Get("id"), c.Conn))
	})

	engine := nbhttp.NewEngine(nbhttp.Config{
		Network: "tcp", Addrs: []string{addr}, Handler: mux, MaxLoad: 50_000, IOMod: nbhttp.IOModNonBlocking,
	})
	if err := engine.Start(); err != nil {
		return err
	}
	hub.Run(every)

	return nil
}

func newUpgrader(hub *work.Hub) *websocket.Upgrader {
	u := websocket.NewUpgrader()
	u.Subprotocols = []string{"headcount.v1"}
	u.CheckOrigin = func(*http.Request) bool { return true }
	u.KeepaliveTime = 0 // no timer for each connection

	u.OnMessage(func(c *websocket.Conn, _ websocket.MessageType, text []byte) {
		hub.Receive(c.Session().(*work.Client), text)
	})
	u.OnClose(func(c *websocket.Conn, _ error) {
		if client, ok := c.Session().(*work.Client); ok {
			// Asynchronously, because a write of the hub, which holds its lock, may have closed the connection.
			go hub.Gone(client)
		}
	})

	return u
}

// textFrame returns the frame of a text of less than 64 KB. nbio has no function that returns a frame: its WriteMessage
// encodes a message anew for each connection.
func textFrame(text []byte) []byte {
	const final, short = 0x80, 126

	frame := []byte{final | byte(websocket.TextMessage)}
	if len(text) < short {
		frame = append(frame, byte(len(text)))
	} else {
		frame = binary.BigEndian.AppendUint16(append(frame, short), uint16(len(text)))
	}

	return append(frame, text...)
}
