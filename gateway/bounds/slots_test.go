package bounds

import (
	"net/netip"
	"testing"
)

func TestSlots(t *testing.T) {
	c := NewSlots(2)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	enter := func(addr netip.Addr, want bool) *Slot {
		t.Helper()
		slot, ok := c.Enter(addr)
		if ok != want {
			t.Fatalf("%s: %v, want %v", addr, ok, want)
		}

		return slot
	}

	one := enter(a, true)
	enter(a, true)
	enter(a, false)
	enter(netip.MustParseAddr("::ffff:192.0.2.1"), false) // the same in another form

	six := enter(b, true)
	enter(netip.MustParseAddr("2001:db8::2"), true)
	enter(netip.MustParseAddr("2001:db8::3"), false) // one customer
	enter(netip.MustParseAddr("2001:db8:0:1::1"), true)

	one.Leave()
	one = enter(a, true)
	enter(a, false)

	six.Leave()
	six.Leave()
	one.Leave() // a slot that is left twice is left once
	one.Leave()
	if len(c.slots) != 1 {
		t.Fatalf("%d addresses are known, of which one has a connection", len(c.slots))
	}

	free := NewSlots(0)
	for range 1000 {
		slot, ok := free.Enter(a)
		if !ok {
			t.Fatal("there is no bound")
		}
		slot.Leave()
	}
}
