//go:build !linux || portable

package socket

import (
	"context"
	"net"
)

// descriptor is for calls that do not wait. This build has no such calls: a goroutine
// finishes every write, and each connection has a goroutine that reads.
type descriptor struct{}

var noDescriptor descriptor

func descriptorOf(net.Conn) descriptor { return noDescriptor }

// send sends nothing.
func (descriptor) send([]byte) (int, error) { return 0, nil }

// receive always fails: it is for polled wires, and this build has none.
func (descriptor) receive([]byte) (int, error) { return 0, net.ErrClosed }

func (*Wire) takeOver(net.Conn) {}

func (*Wire) waitsLocked() {}

func (w *Wire) closeLocked() error { return w.conn.Close() }

// Poller does nothing in this build: only Linux has one.
type Poller struct{}

// NewPoller returns nil: wires are started without a poller.
func NewPoller() (*Poller, error) { return nil, nil }

func (*Poller) add(*Wire) bool { return false }

func (*Poller) remove(*Wire) {}

// Run returns at once.
func (*Poller) Run(context.Context) {}

// Conn is never made in this build.
type Conn struct{ net.Conn }

// Send fails.
func (*Conn) Send([]byte) error { return net.ErrClosed }

// Unread makes the next calls of Read return sent first.
func (*Conn) Unread([]byte) {}

// Awaiter learns what a client that Await was called for sends first.
type Awaiter interface {
	Awaited(c *Conn, sent []byte)
	Gone()
}

// Acceptor returns l.
func Acceptor(l net.Listener) (net.Listener, error) { return l, nil }

// Await returns false.
func (*Poller) Await(net.Conn, Awaiter) bool { return false }
