package httppolicy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

func TestRateLimiter(t *testing.T) {
	r, now := NewRateLimiter(10, 20), time.Unix(1000, 0)
	four, six, near := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	spend := func(c Caller) (n int) {
		for ; ; n++ {
			ok, wait := r.Allow(c, now)
			if !ok {
				if wait <= 0 || wait > 100*time.Millisecond {
					t.Errorf("%v waits %s for one of ten a second", c, wait)
				}
				return n
			}
		}
	}
	for _, step := range []struct {
		caller Caller
		after  time.Duration
		want   int
	}{
		{Caller{Addr: four}, 0, 20},
		{Caller{Addr: four}, time.Second, 10},
		{Caller{Addr: six}, 0, 20},
		{Caller{Addr: near}, 0, 0}, // one /64 is one address
		{Caller{User: "a", Addr: four}, 0, 20},
		{Caller{User: "a", Addr: six}, 0, 0}, // a user is one wherever it is
		{Caller{User: "b", Addr: four}, 0, 20},
		{Caller{User: "a", Addr: four}, time.Hour, 20},
	} {
		now = now.Add(step.after)
		if got := spend(step.caller); got != step.want {
			t.Errorf("%v after %s: %d calls, want %d", step.caller, step.after, got, step.want)
		}
	}
}

func TestRateLimiterForgetsTheLongestIdle(t *testing.T) {
	r, now := NewRateLimiter(10, 1), time.Unix(1000, 0)
	for i := range maxCallers + 1 {
		if ok, _ := r.Allow(Caller{User: fmt.Sprint(i)}, now); !ok {
			t.Fatalf("caller %d is refused its first call", i)
		}
	}
	if n := r.callers.Len(); n != maxCallers {
		t.Errorf("%d callers are remembered", n)
	}
	for user, want := range map[string]bool{"0": true, fmt.Sprint(maxCallers): false} {
		if ok, _ := r.Allow(Caller{User: user}, now); ok != want {
			t.Errorf("caller %s: allowed %t", user, ok)
		}
	}
}
