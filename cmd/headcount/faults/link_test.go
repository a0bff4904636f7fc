package faults

import (
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"headcount/internal/servertest"
)

// wire is a TCP link between two data centres. Data that is sent while the link is cut arrives when it is healed, as
// TCP would repeat it. Neither side learns of the cut.
type wire struct {
	addr  string
	delay time.Duration // one way

	mu      sync.Mutex
	target  string
	healed  chan struct{} // closed while the link is there
	loss    float64       // the share of segments that arrive only when TCP repeats them
	conns   map[net.Conn]struct{}
	stopped bool
}

// repetition is the cost of a lost segment: the shortest time after which TCP repeats it, and one more round trip.
func (l *wire) repetition() time.Duration { return 200*time.Millisecond + 2*l.delay }

// newWire returns a link to an address that ends with the test.
func newWire(t testing.TB, target string, delay time.Duration) *wire {
	l := &wire{
		addr: servertest.FreeAddr(), target: target, delay: delay, healed: make(chan struct{}),
		conns: map[net.Conn]struct{}{},
	}
	close(l.healed)
	listener, err := net.Listen("tcp", l.addr)
	if err != nil {
		t.Fatal(err)
	}

	var all sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		l.heal()
		l.mu.Lock()
		l.stopped = true
		for c := range l.conns {
			_ = c.Close()
		}
		l.mu.Unlock()
		all.Wait()
	})

	all.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() { l.carry(in, &all) })
		}
	})

	return l
}

func (l *wire) url() string { return "redis://" + l.addr + "/0" }

// cut holds all data back from now on; heal releases it.
func (l *wire) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.healed:
		l.healed = make(chan struct{})
	default:
	}
}

func (l *wire) heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.healed:
	default:
		close(l.healed)
	}
}

// lead makes the link lead to another address, and ends its connections.
func (l *wire) lead(target string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.target = target
	for c := range l.conns {
		_ = c.Close()
	}
	clear(l.conns)
}

func (l *wire) lose(share float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loss = share
}

// passes waits until the link is open, and returns its loss.
func (l *wire) passes() (loss float64) {
	for {
		l.mu.Lock()
		healed, loss := l.healed, l.loss
		l.mu.Unlock()
		select {
		case <-healed:
			return loss
		default:
			<-healed
		}
	}
}

// keep lets the connection end with the link.
func (l *wire) keep(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		_ = c.Close()
		return false
	}

	l.conns[c] = struct{}{}
	return true
}

func (l *wire) carry(in net.Conn, all *sync.WaitGroup) {
	if !l.keep(in) {
		return
	}

	l.passes()
	time.Sleep(2 * l.delay) // the handshake
	l.mu.Lock()
	target := l.target
	l.mu.Unlock()

	out, err := net.Dial("tcp", target)
	if err != nil {
		_ = in.Close()
		return
	}
	if !l.keep(out) {
		return
	}

	all.Go(func() { l.way(in, out) })
	l.way(out, in)
}

// way carries one direction. Up to 1,024 segments are under way; beyond that the sender waits.
func (l *wire) way(from, to net.Conn) {
	type segment struct {
		at    time.Time
		bytes []byte
	}

	queue := make(chan segment, 1024)
	go func() { // ends with from
		defer close(queue)
		for {
			buf := make([]byte, 16<<10)
			n, err := from.Read(buf)
			if n > 0 {
				queue <- segment{time.Now().Add(l.delay), buf[:n]}
			}
			if err != nil {
				return
			}
		}
	}()

	for s := range queue {
		if rand.Float64() < l.passes() {
			s.at = s.at.Add(l.repetition())
		}

		time.Sleep(time.Until(s.at))
		l.passes()
		if _, err := to.Write(s.bytes); err != nil {
			_ = from.Close()
			for range queue { // until the reader has ended
			}
			break
		}
	}

	l.passes()
	time.Sleep(l.delay)
	_ = to.Close()
}
