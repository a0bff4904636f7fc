package socket

import (
	"sync"
	"sync/atomic"
)

// maxReads is how many times in a row one client is read while others wait. A client with
// more to read gets a goroutine of its own.
const maxReads = 4

// turn decides which goroutine serves a wire.
type turn struct {
	// turns counts the occasions to serve the wire; 0 means that no goroutine serves it.
	// The goroutine that counts the first occasion has the turn. It gives the turn back
	// when no other occasion was counted meanwhile. So exactly one goroutine serves, and
	// no occasion is lost. The turn that ends the connection is never given back.
	turns atomic.Int32
	hup   atomic.Bool // the client has closed its side, so Read must read to the end
	slot  int32       // in the poller; 0: no poller, a goroutine reads. The goroutine with the turn owns it
	from  *Poller
}

// Input is a buffer for one call of Owner.Look. One goroutine at a time uses it.
type Input [8 << 10]byte

var inputs = sync.Pool{New: func() any { return new(Input) }}

// Start begins to serve the wire, whenever p reports something to read. If p cannot
// poll the wire, a goroutine reads it. The caller must have the turn, and gives it up.
func (w *Wire) Start(p *Poller) {
	polled := p.add(w)
	if !polled && w.tls == nil {
		w.owner.Spawn(w.serve) // the goroutine reads until the connection ends
		return
	}

	if !polled {
		_ = w.Close() // the system has no room in p, and a goroutine cannot read TLS without mu
	}
	w.serve()
}

// Serve serves a wire without poller, in the caller's goroutine, until the connection
// ends. The caller must have the turn.
func (w *Wire) Serve() { w.serve() }

// Polled reports whether a poller reports when there is something to read. Only the
// goroutine with the turn may call it.
func (w *Wire) Polled() bool { return w.slot != 0 }

// hangUp implements entry.
func (w *Wire) hangUp() { w.hup.Store(true) }

// occasion serves the wire. If another goroutine has the turn, it makes that goroutine serve
// the wire once more.
func (w *Wire) occasion() {
	if w.turns.Add(1) == 1 {
		w.serve()
	}
}

// serve calls the owner's Look while there may be more to read. The caller must have
// the turn. serve does not wait, unless the wire is not polled.
func (w *Wire) serve() {
	in := inputs.Get().(*Input)
	defer inputs.Put(in)

	for range maxReads {
		// Before Look: an occasion that is counted during it means another round.
		turns := w.turns.Load()

		more, err := w.owner.Look(in)
		if err != nil {
			_ = w.Close()
			w.from.remove(w)
			w.owner.Ended()
			return // the turn is not given back: nothing serves the wire again
		}

		// With no occasion since, the turn is given back.
		if !more && w.turns.CompareAndSwap(turns, 0) {
			return
		}
	}

	// This client has more to read, and others of the poller must not wait for it.
	w.owner.Spawn(w.serve)
}
