//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"headcount/client"
	"headcount/internal/testkit"
)

const timeout = 5 * time.Second // of connecting, and of a count

// neighbour is the address of ordinary clients. The limits of the attackers' address do not apply to it.
var neighbour = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}

// connect opens a connection.
func connect(from *net.TCPAddr, addr string, within time.Duration) (net.Conn, error) {
	dialer := net.Dialer{Timeout: within}
	if from != nil {
		dialer.LocalAddr = from
	}

	c, err := dialer.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}

	_ = c.(*net.TCPConn).SetLinger(0) // the port is free at once when the connection is closed

	return c, nil
}

// A socket is a WebSocket of an attack. Writing to its Conn sends bytes that no honest client would send.
type socket struct {
	net.Conn
	client *client.Conn // referenced, because the garbage collector closes the connection of an unreferenced one
}

func dial(addr string) (s socket, err error) {
	s.client, err = client.Dial(context.Background(), client.Config{
		URL: "http://" + addr,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			s.Conn, err = connect(nil, addr, timeout)
			return s.Conn, err
		},
	})
	return s, err
}

func text(format string, args ...any) []byte {
	return testkit.ClientFrame(0x81, fmt.Sprintf(format, args...))
}

// list returns n pages in JSON whose names begin with name.
func list(name string, n int) string {
	pages := make([]string, n)
	for i := range pages {
		pages[i] = fmt.Sprintf("%q", fmt.Sprintf("%s%d", name, i))
	}

	return "[" + strings.Join(pages, ",") + "]"
}
