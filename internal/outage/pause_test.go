package outage

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestPause(t *testing.T) {
	for failures, most := range map[int]time.Duration{
		1:       100 * time.Millisecond,
		2:       200 * time.Millisecond,
		5:       1600 * time.Millisecond,
		6:       MaxPause,
		1 << 40: MaxPause,
	} {
		least, greatest := most, time.Duration(0) // the pauses are random
		for range 1000 {
			d := Pause(failures)
			least, greatest = min(least, d), max(greatest, d)
		}

		if least < most/2 || greatest > most || greatest-least < most/4 {
			t.Errorf("after %d failures %s to %s, want %s to %s", failures, least, greatest, most/2, most)
		}
	}
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if !Sleep(t.Context(), time.Minute) || time.Since(start) != time.Minute {
			t.Errorf("slept for %s", time.Since(start))
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()

		start = time.Now()
		if Sleep(ctx, time.Minute) || time.Since(start) != time.Second {
			t.Errorf("slept for %s, though the context ended after 1s", time.Since(start))
		}
	})
}
