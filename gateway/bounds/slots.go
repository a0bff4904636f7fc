package bounds

import (
	"context"
	"net/netip"
	"sync"

	"headcount/gateway/httppolicy"
)

// Slots bound how much of something one address has at a time; an IPv6 /64 counts as one
// address. They keep only the addresses that have something. They are safe for use by
// many goroutines.
type Slots struct {
	max int // of one address; 0: any number

	mu    sync.Mutex
	slots map[netip.Addr]*Slot
}

// Slot counts what one address has.
type Slot struct {
	of   *Slots
	addr netip.Addr
	n    int           // guarded by of.mu
	turn chan struct{} // see ownTurn; guarded by of.mu
}

// NewSlots allows each address max; 0 allows any number.
func NewSlots(max int) *Slots { return &Slots{max: max, slots: map[netip.Addr]*Slot{}} }

// Enter adds one of addr, or returns false if there are too many. At its end the caller must call Leave of the Slot,
// which is nil if there is no bound.
func (s *Slots) Enter(addr netip.Addr) (_ *Slot, ok bool) {
	if s.max == 0 {
		return nil, true
	}
	addr = httppolicy.Customer(addr)

	s.mu.Lock()
	defer s.mu.Unlock()

	slot := s.slots[addr]
	switch {
	case slot == nil:
		slot = &Slot{of: s, addr: addr}
		s.slots[addr] = slot
	case slot.n >= s.max:
		return nil, false
	}
	slot.n++

	return slot, true
}

// Leave removes one. On a nil Slot it does nothing.
func (c *Slot) Leave() {
	if c == nil {
		return
	}

	c.of.mu.Lock()
	defer c.of.mu.Unlock()

	c.n--
	if c.n == 0 {
		delete(c.of.slots, c.addr)
	}
}

// ownTurn returns the turn of the address, which is made when it is first used: connections have none.
func (c *Slot) ownTurn() chan struct{} {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()

	if c.turn == nil {
		c.turn = make(chan struct{}, 1)
	}

	return c.turn
}

// Turn lets only so many work at a time as it has room for; the others wait, in the order in which they came. Of each
// address only one waits beside those of others or works: the rest of the address wait for that one. So an
// address with much work delays no other.
type Turn chan struct{}

// NewTurn returns a Turn that so many have at a time.
func NewTurn(max int) Turn { return make(Turn, max) }

// Wait waits for a turn of one that has entered. A nil Slot is of no address, and waits for no other of its own. The
// caller must call end after the work. The error is that of ctx.
func (t Turn) Wait(ctx context.Context, slot *Slot) (end func(), err error) {
	turns := []chan struct{}{t}
	if slot != nil {
		turns = []chan struct{}{slot.ownTurn(), t}
	}

	taken := 0
	end = func() {
		for _, turn := range turns[:taken] {
			<-turn
		}
	}
	for _, turn := range turns {
		select {
		case turn <- struct{}{}:
			taken++
		case <-ctx.Done():
			end()
			return nil, context.Cause(ctx)
		}
	}

	return end, nil
}
