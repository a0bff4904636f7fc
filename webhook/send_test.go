package webhook_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// An answer takes no more than the time of an attempt, whatever follows its head. The client's own limit does not cover
// a connection that an answer turns over to another protocol.
func TestAnswersWithoutAnEnd(t *testing.T) {
	for name, head := range map[string]string{
		"body":     "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 9\r\n\r\n",
		"protocol": "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "page:*=http://r.test/")
				a := &answerer{head: head}
				stop := w.startOver(&http.Transport{DialContext: a.dial})
				defer stop()
				defer a.close() // or else the sender might never end

				w.set("a", 1)
				time.Sleep(time.Minute)
				synctest.Wait()
				if n := len(a.connections); n < 3 {
					t.Errorf("there were %d attempts in a minute, want several", n)
				}
			})
		})
	}
}

// answerer is a receiver that answers with a head, and then neither sends anything nor closes the connection.
type answerer struct {
	head        string
	connections []net.Conn
}

func (a *answerer) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	a.connections = append(a.connections, server)
	go func() { // ends with the connection
		req, err := http.ReadRequest(bufio.NewReader(server))
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		_, _ = io.WriteString(server, a.head)
	}()

	return client, nil
}

func (a *answerer) close() {
	for _, c := range a.connections {
		_ = c.Close()
	}
}
