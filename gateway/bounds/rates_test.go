package bounds

import (
	"errors"
	"net/netip"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/counter/limit"
	"headcount/gateway/calls"
)

// ofAddress returns a bound of each address.
func ofAddress(perSecond, burst int) *Bound {
	return &Bound{Each: Address, Rate: limit.PerSecond(perSecond, burst)}
}

func TestRates(t *testing.T) {
	r := NewRates(&Bound{Each: User, Rate: limit.PerSecond(10, 20)})
	now := time.Unix(1000, 0)
	four := netip.MustParseAddr("192.0.2.1")
	six, near := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")

	spend := func(c Caller) (n int) {
		for ; ; n++ {
			wait := r.take(c, 1, now)
			if wait > 100*time.Millisecond {
				t.Errorf("%v waits %s for one of ten a second", c, wait)
			}
			if wait > 0 {
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
		{Caller{Addr: near}, 0, 0}, // all of a /64 counts as one address
		{Caller{User: "a", Addr: four}, 0, 20},
		{Caller{User: "a", Addr: six}, 0, 0}, // a user is the same one at any address
		{Caller{User: "b", Addr: four}, 0, 20},
		{Caller{User: "a", Addr: four}, time.Hour, 20},
	} {
		now = now.Add(step.after)
		if got := spend(step.caller); got != step.want {
			t.Errorf("%v after %s: %d calls, want %d", step.caller, step.after, got, step.want)
		}
	}
}

// Several rates are charged in turn. The caller learns which one refuses, and those after it are not charged.
func TestAdmitAsksOneRateAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		address := NewRates(&Bound{Each: Address, Rate: limit.PerSecond(1, 2), Is: calls.ErrRate, Says: "the address"})
		all := NewRates(&Bound{Each: Everybody, Rate: limit.PerSecond(1, 3), Is: calls.ErrRate, Says: "all"})

		for i, step := range []struct {
			addr string
			n    int
			want string
		}{
			{"192.0.2.1", 2, ""},
			{"192.0.2.1", 1, "the address"},
			{"192.0.2.2", 1, ""}, // the refused call was not charged here
			{"192.0.2.3", 1, "all"},
			{"192.0.2.1", 0, ""},
		} {
			err := Admit(Caller{Addr: netip.MustParseAddr(step.addr)}, step.n, address, all)
			refused := err != nil
			if refused != (step.want != "") || refused && (err.Error() != step.want || !errors.Is(err, calls.ErrRate)) {
				t.Errorf("call %d: %v, want %q", i, err, step.want)
			}
		}
	})
}

func TestRatesForgetTheLongestIdle(t *testing.T) {
	const most = 8
	r := newRates(&Bound{Each: User, Rate: limit.PerSecond(1, 2)}, most)
	now := time.Unix(1_900_000_000, 0)
	caller := func(i int) Caller { return Caller{User: strconv.Itoa(i)} }

	for i := range most {
		r.take(caller(i), 2, now)
	}

	r.take(caller(0), 1, now) // refused, but it counts as a use
	r.take(caller(most), 1, now)

	if r.callers.Len() != most || r.callers.Contains(caller(1)) || !r.callers.Contains(caller(0)) {
		t.Fatalf("%d callers, the idle one kept: %v", r.callers.Len(), r.callers.Contains(caller(1)))
	}

	if wait := r.take(caller(0), 1, now); wait == 0 {
		t.Fatal("a limited caller was forgotten before idle ones")
	}

	// Each call forgets two callers whose whole burst is back.
	now = now.Add(r.bound.RefillTime())
	for i := range most / 2 {
		r.take(caller(100), 1, now)
		if n := r.callers.Len(); n != max(1, most-2*i-2) {
			t.Fatalf("%d callers are remembered after %d calls, want %d", n, i+1, max(1, most-2*i-2))
		}
	}
}

// However calls are spread, a caller gets no more than burst + rate × time. The wait that it is told suffices, and is
// no longer than necessary.
func TestLawsOfRates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		burst := rapid.IntRange(1, 20).Draw(t, "burst")
		perSecond := rapid.IntRange(1, 50).Draw(t, "rate")
		l := newRates(ofAddress(perSecond, burst), 4)
		start := time.Unix(1_900_000_000, 0)
		now := start
		a := Caller{Addr: netip.MustParseAddr("2001:db8::1")}
		allowed := 0

		for i, n := 0, rapid.IntRange(1, 100).Draw(t, "calls"); i < n; i++ {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "ms")) * time.Millisecond)
			wait := l.take(a, 1, now)
			if wait == 0 {
				allowed++
			} else {
				if wait > time.Duration(float64(time.Second)/float64(perSecond))+time.Microsecond {
					t.Fatalf("told to wait %s at %d a second", wait, perSecond)
				}
				// The wait is rounded by less than a microsecond.
				now = now.Add(wait + time.Microsecond)
				if again := l.take(a, 1, now); again > 0 {
					t.Fatalf("waited %s, told to wait %s more", wait, again)
				}
				allowed++
			}

			if most := float64(burst) + float64(perSecond)*now.Sub(start).Seconds() + 1e-3; float64(allowed) > most {
				t.Fatalf("%d calls were allowed in %s, want %.0f at most", allowed, now.Sub(start), most)
			}

			// Other callers come and go, fewer than the limit.
			l.take(Caller{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i % 2)})}, 1, now)
		}

		if l.callers.Len() > 4 {
			t.Fatalf("%d callers are remembered, want 4 at most", l.callers.Len())
		}
	})
}
