package bounds

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// An address has a bounded number of slots, and so have all addresses together.
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
	enter(netip.MustParseAddr("::ffff:192.0.2.1"), false) // the same address in another form

	six := enter(b, true)
	enter(netip.MustParseAddr("2001:db8::2"), true)
	enter(netip.MustParseAddr("2001:db8::3"), false) // a /64 counts as one address
	enter(netip.MustParseAddr("2001:db8:0:1::1"), true)

	one.Leave()
	one = enter(a, true)
	enter(a, false)

	six.Leave()
	six.Leave()
	one.Leave() // leaving a slot twice frees it once
	one.Leave()
	if len(c.slots) != 1 {
		t.Fatalf("%d addresses are remembered, want 1", len(c.slots))
	}

	free := NewSlots(0)
	for range 1000 {
		slot, ok := free.Enter(a)
		if !ok {
			t.Fatal("without a bound a slot was refused")
		}
		slot.Leave()
	}
}

// Calls of one address wait for each other first, so the first call of another address is next.
func TestTurnsGoRoundTheAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots, turn := NewSlots(5), NewTurn(1)
		var order []string
		work := func(name, addr string) {
			slot, _ := slots.Enter(netip.MustParseAddr(addr))
			go func() {
				defer slot.Leave()
				end, err := turn.Wait(t.Context(), slot)
				if err != nil {
					t.Error(err)
					return
				}

				order = append(order, name) // only the one that has the turn writes
				time.Sleep(time.Second)
				end()
			}()

			synctest.Wait()
		}

		for _, name := range []string{"a1", "a2", "a3"} {
			work(name, "192.0.2.1")
		}

		work("b1", "192.0.2.2")

		time.Sleep(time.Minute)
		synctest.Wait()
		if got := strings.Join(order, " "); got != "a1 b1 a2 a3" {
			t.Errorf("the order is %s, want a1 b1 a2 a3", got)
		}
	})
}

// A call that gives up leaves nothing behind, whichever turn it was waiting for.
func TestTurnsThatAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots, turn := NewSlots(5), NewTurn(1)
		a, _ := slots.Enter(netip.MustParseAddr("192.0.2.1"))
		b, _ := slots.Enter(netip.MustParseAddr("192.0.2.2"))

		end, err := turn.Wait(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}

		soon, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for name, slot := range map[string]*Slot{"the address's own": a, "that of all": b, "no address": nil} {
			if _, err := turn.Wait(soon, slot); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", name, err)
			}
		}

		end()
		for _, slot := range []*Slot{a, b, nil} {
			end, err := turn.Wait(t.Context(), slot)
			if err != nil {
				t.Fatal(err)
			}
			end()
		}
	})
}
