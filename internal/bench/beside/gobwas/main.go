// Gobwas counts with github.com/gobwas/ws over epoll: gobwas ADDRESS INTERVAL.
//
// The example of that library (gobwas/ws-examples) waits for input with mailru/easygo, which keeps a second file
// descriptor for each connection. This program calls epoll itself and keeps one.
package main

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	"github.com/gobwas/ws"

	"beside/work"
)

func main() {
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "gobwas:", err)
		os.Exit(1)
	}
}

func serve(addr, interval string) error {
	every, err := time.ParseDuration(interval)
	if err != nil {
		return err
	}

	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}

	hub := work.NewHub(func(text []byte) []byte { return ws.MustCompileFrame(ws.NewTextFrame(text)) })
	p, err := newPoller(hub)
	if err != nil {
		return err
	}

	go hub.Run(every)
	go p.run()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go p.upgrade(c)
	}
}

// upgrade answers a request. If it is for a WebSocket, the poller has the connection from then on.
func (p *poller) upgrade(c net.Conn) {
	defer c.Close()

	var id string
	_, err := ws.Upgrader{
		OnRequest: func(uri []byte) error {
			u, err := url.ParseRequestURI(string(uri))
			if err != nil {
				return err
			}
			if u.Path != "/-/ws" {
				return p.answer(u.Path)
			}
			id = u.Query().Get("id")
			return nil
		},
		Protocol: func(name []byte) bool { return string(name) == "headcount.v1" },
	}.Upgrade(c)
	if err != nil {
		return // Upgrade has answered
	}

	if err := p.add(c.(*net.TCPConn), id); err != nil {
		fmt.Fprintln(os.Stderr, "gobwas:", err)
	}
}

// answer returns the answer to a GET. The library can send one only as a rejected upgrade, whose status may be 200.
func (p *poller) answer(path string) error {
	return ws.RejectConnectionError(
		ws.RejectionStatus(200),
		ws.RejectionHeader(ws.HandshakeHeaderString("Content-Type: application/json\r\nConnection: close\r\n")),
		ws.RejectionReason(p.hub.Answer(path)),
	)
}
