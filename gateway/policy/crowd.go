package policy

import (
	"net/netip"
	"sync"
)

// Crowds bounds the long connections of one address; an IPv6 /64 counts as one
// address. It keeps only the addresses that have connections. It is safe for use by
// many goroutines.
type Crowds struct {
	most int // connections of one address; 0: any number

	mu     sync.Mutex
	crowds map[netip.Addr]*Crowd
}

// Crowd counts the connections of one address.
type Crowd struct {
	of   *Crowds
	addr netip.Addr
	n    int // guarded by of.mu
}

// NewCrowds allows each address most connections; 0 allows any number.
func NewCrowds(most int) *Crowds { return &Crowds{most: most, crowds: map[netip.Addr]*Crowd{}} }

// Enter adds a connection of addr, or returns false if there are too many. At its
// end the connection must call Leave of the Crowd, which is nil if there is no bound.
func (c *Crowds) Enter(addr netip.Addr) (_ *Crowd, ok bool) {
	if c.most == 0 {
		return nil, true
	}
	addr = limitKey(addr)
	c.mu.Lock()
	defer c.mu.Unlock()
	crowd := c.crowds[addr]
	switch {
	case crowd == nil:
		crowd = &Crowd{of: c, addr: addr}
		c.crowds[addr] = crowd
	case crowd.n >= c.most:
		return nil, false
	}
	crowd.n++
	return crowd, true
}

// Leave removes a connection. On a nil Crowd it does nothing.
func (c *Crowd) Leave() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.n--; c.n == 0 {
		delete(c.of.crowds, c.addr)
	}
}
