package httppolicy

import (
	"net/netip"
	"sync"
)

// AddressSlots bounds the long connections of one address; an IPv6 /64 counts as one
// address. It keeps only the addresses that have connections. It is safe for use by
// many goroutines.
type AddressSlots struct {
	max int // connections of one address; 0: any number

	mu    sync.Mutex
	slots map[netip.Addr]*AddressSlot
}

// AddressSlot counts the connections of one address.
type AddressSlot struct {
	of   *AddressSlots
	addr netip.Addr
	n    int           // guarded by of.mu
	turn chan struct{} // see Turn; guarded by of.mu
}

// NewAddressSlots allows each address max connections; 0 allows any number.
func NewAddressSlots(max int) *AddressSlots {
	return &AddressSlots{max: max, slots: map[netip.Addr]*AddressSlot{}}
}

// Enter adds a connection of addr, or returns false if there are too many. At the end of
// the connection the caller must call Leave of the AddressSlot, which is nil if there is no
// bound.
func (s *AddressSlots) Enter(addr netip.Addr) (_ *AddressSlot, ok bool) {
	if s.max == 0 {
		return nil, true
	}
	addr = limitKey(addr)

	s.mu.Lock()
	defer s.mu.Unlock()

	slot := s.slots[addr]
	switch {
	case slot == nil:
		slot = &AddressSlot{of: s, addr: addr}
		s.slots[addr] = slot
	case slot.n >= s.max:
		return nil, false
	}
	slot.n++

	return slot, true
}

// Turn returns the turn of the address, which one of those that have entered has at a time: from when it sends to the
// channel until it receives from it.
func (c *AddressSlot) Turn() chan struct{} {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()

	if c.turn == nil {
		c.turn = make(chan struct{}, 1)
	}

	return c.turn
}

// Leave removes a connection. On a nil AddressSlot it does nothing.
func (c *AddressSlot) Leave() {
	if c == nil {
		return
	}

	c.of.mu.Lock()
	defer c.of.mu.Unlock()

	c.n--
	// Otherwise every address that ever came would stay.
	if c.n == 0 {
		delete(c.of.slots, c.addr)
	}
}
