package seal_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence/seal"
)

// TestTimeOfTheStore: the clock follows that of the store. A reading moves it only as far as the reading proves it
// wrong, and it runs on between readings.
func TestTimeOfTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c seal.Clock
		if !c.Now().IsZero() {
			t.Error("the time is known before the first reading")
		}

		origin := time.Now()
		for i, step := range []struct {
			store, took time.Duration // time of the store since origin, and how long the call took
			want        time.Duration // of the clock, since origin
		}{
			{time.Hour, 0, time.Hour},                                                 // the first reading
			{time.Hour + time.Second, 0, time.Hour + time.Second},                     // it counted on for a second
			{time.Hour + time.Second, 2 * time.Second, time.Hour + 3*time.Second},     // read at once, answered late
			{time.Hour + 6*time.Second, 3 * time.Second, time.Hour + 7*time.Second},   // read somewhere in between
			{time.Minute, 0, time.Minute},                                             // set back
			{time.Minute + 10*time.Second, time.Second, time.Minute + 10*time.Second}, // set forward
		} {
			asked := time.Now()
			time.Sleep(step.took)
			c.Observe(origin.Add(step.store), asked)
			if got := c.Now().Sub(origin); got != step.want {
				t.Errorf("step %d: %s, want %s", i, got, step.want)
			}

			time.Sleep(time.Second)
		}
	})
}

// TestNothingIsAcceptedBeforeTheTimeIsKnown: a process has just started, and its own clock may be an hour behind. Until
// it knows the store's time it accepts no message, and afterwards no replay.
func TestNothingIsAcceptedBeforeTheTimeIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c seal.Clock
		g := seal.NewGuard(1024, c.Now())
		recorded := time.Now().Add(time.Hour)

		take := func(at time.Time, seq uint64) error {
			_, err := g.Admit(c.Now(), []byte("a"), 1, at.UnixMilli(), seq)
			return err
		}
		if err := take(recorded, 1); !errors.Is(err, seal.ErrClock) {
			t.Errorf("before the time is known a message gets %v", err)
		}

		time.Sleep(5 * time.Second)
		c.Observe(recorded.Add(5*time.Second), time.Now())
		if err := take(recorded, 1); !errors.Is(err, seal.ErrOld) {
			t.Errorf("a message recorded before gets %v", err)
		}

		time.Sleep(2 * time.Second)
		if err := take(c.Now(), 2); err != nil {
			t.Errorf("a message sent now gets %v", err)
		}
	})
}

// TestTheClockOfTheStoreJumps: another server with another clock takes over. Messages of known senders with the new
// time are accepted at once, and nothing is accepted twice, even when the old time returns.
func TestTheClockOfTheStoreJumps(t *testing.T) {
	for name, jump := range map[string]time.Duration{"ahead": time.Hour, "back": -time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var c seal.Clock
			c.Observe(time.Now(), time.Now())
			g := seal.NewGuard(1024, c.Now())

			take := func(at int64, seq uint64) error {
				_, err := g.Admit(c.Now(), []byte("a"), 1, at, seq)
				return err
			}

			first := c.Now().UnixMilli()
			if err := take(first, 1); err != nil {
				t.Fatal(err)
			}

			for range 2 {
				c.Observe(c.Now().Add(jump), time.Now())
				if err := take(c.Now().UnixMilli(), 2); err != nil && !errors.Is(err, seal.ErrReplayed) {
					t.Errorf("%s: a message with the new time gets %v", name, err)
				}

				c.Observe(c.Now().Add(-jump), time.Now())
				for seq := range uint64(3) {
					if err := take(first, seq); err == nil {
						t.Errorf("%s: number %d was accepted again", name, seq)
					}
				}
			}
		})
	}
}
