package testkit

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

func TestTheStopwatchStandsStillWhileTheMachineDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewStopwatch(t)
		w.lost.Add(int64(time.Hour))
		if elapsed := w.Elapsed(); elapsed > -time.Hour {
			t.Errorf("elapsed %s although an hour was lost", elapsed)
		}
		if elapsed := NewStopwatch(t).Elapsed(); elapsed < -time.Minute {
			t.Errorf("a later stopwatch shows %s: it includes time lost before its start", elapsed)
		}
	})
}

func TestEventuallyAndWithinReturnOnceItIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		Eventually(t, "three calls", func() bool { calls++; return calls == 3 })
		Within(t, time.Minute, "six calls", func() bool { calls++; return calls == 6 })
		if calls != 6 {
			t.Errorf("the condition was checked %d times", calls)
		}
	})
}
