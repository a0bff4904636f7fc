package machine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStandstill(3 * time.Second)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()

		time.Sleep(time.Hour) // before Run
		resumed := 0
		go s.Run(ctx, func() {
			resumed++
			if !s.Ended() {
				t.Error("it is over for others before what depends on it was doubted")
			}
		})
		time.Sleep(time.Minute)
		if s.Ended() || resumed > 0 {
			t.Fatalf("a process that runs stood still %d times", resumed)
		}

		past := time.Now().Add(-4 * time.Second)
		s.looked.Store(&past)
		if !s.Ended() {
			t.Error("a goroutine that runs before Run does not notice")
		}
		time.Sleep(time.Minute)
		if s.Ended() || resumed != 1 {
			t.Errorf("one standstill was noticed %d times", resumed)
		}
	})
}
