package faults

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/servertest"
)

// proxy stands in front of a process's cluster address. It forwards TCP unchanged. While it is bad, it drops a share of
// the datagrams, sends a share of the others twice, and delays a share of them.
type proxy struct {
	t      testing.TB
	addr   string
	target string
	share  float64
	bad    atomic.Bool
	link   gate // TCP passes while it is open

	lost, twice, late atomic.Int64
}

// newProxy returns a proxy that forwards everything unchanged until bad is set.
func newProxy(t testing.TB, share float64) *proxy {
	return &proxy{t: t, addr: servertest.FreeAddr(), share: share}
}

// gate holds bytes back while it is shut. The zero gate is open.
type gate struct {
	mu     sync.Mutex
	opened chan struct{} // closed when the gate opens; nil while it is open
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened == nil {
		g.opened = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened != nil {
		close(g.opened)
		g.opened = nil
	}
}

// pass waits until the gate is open.
func (g *gate) pass() {
	g.mu.Lock()
	opened := g.opened
	g.mu.Unlock()
	if opened != nil {
		<-opened
	}
}

// gated is a writer through a gate.
type gated struct {
	io.Writer
	*gate
}

func (w gated) Write(b []byte) (int, error) {
	w.pass()
	return w.Writer.Write(b)
}

// to starts forwarding to target.
func (p *proxy) to(target string) {
	p.target = target
	udp, err := net.ListenPacket("udp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	out, err := net.Dial("udp", target)
	if err != nil {
		p.t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}

	var mu sync.Mutex
	open := []io.Closer{udp, out, tcp}
	p.t.Cleanup(func() {
		p.link.open()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range open {
			_ = c.Close()
		}
	})

	go p.datagrams(udp, out) // ends when udp is closed
	go func() {              // ends when tcp is closed
		for {
			in, err := tcp.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", target)
			if err != nil {
				_ = in.Close()
				continue
			}

			mu.Lock()
			open = append(open, in, to)
			mu.Unlock()

			for _, pair := range [][2]net.Conn{{in, to}, {to, in}} {
				go func() {
					_, _ = io.Copy(gated{pair[0], &p.link}, pair[1])
					p.link.pass() // the end of a connection comes after its data
					_ = pair[0].Close()
				}()
			}
		}
	}()
}

func (p *proxy) datagrams(in net.PacketConn, out net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, _, err := in.ReadFrom(buf)
		if err != nil {
			return
		}

		if !p.bad.Load() {
			_, _ = out.Write(buf[:n]) // if the process is down, the datagram is lost, as without the proxy
			continue
		}

		datagram := append([]byte(nil), buf[:n]...)
		if rand.Float64() < p.share {
			p.lost.Add(1)
			continue
		}

		copies := 1
		if rand.Float64() < p.share {
			p.twice.Add(1)
			copies = 2
		}

		for range copies {
			if rand.Float64() < p.share {
				p.late.Add(1)
				time.AfterFunc(time.Millisecond+rand.N(100*time.Millisecond), func() { _, _ = out.Write(datagram) })
			} else {
				_, _ = out.Write(datagram)
			}
		}
	}
}
