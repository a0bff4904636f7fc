package machine

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// standing is a process that stands still on demand: reads of its clock block.
type standing struct {
	*Standstill
	gate    atomic.Pointer[chan struct{}]
	noticed int
}

func (s *standing) clock() time.Duration {
	if gate := s.gate.Load(); gate != nil {
		<-*gate
	}

	return time.Duration(time.Now().UnixNano())
}

// stand makes the process stand still.
func (s *standing) stand(lasts time.Duration) {
	gate := make(chan struct{})

	s.gate.Store(&gate)
	time.Sleep(lasts)
	s.gate.Store(nil)
	close(gate)
}

func TestStandstill(t *testing.T) {
	const limit = 3 * time.Second
	for lasts, long := range map[time.Duration]bool{
		0: false, limit - lookEvery: false, limit + lookEvery: true, time.Hour: true,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &standing{}
			s.Standstill = NewStandstill(limit, s.clock)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()

			time.Sleep(time.Hour) // time before Run does not count
			go s.Run(ctx, func() {
				s.noticed++
				if !s.Ended() {
					t.Error("the process went on before the standstill was noticed")
				}
			})

			time.Sleep(time.Minute)
			if s.Ended() || s.EndedWithin(time.Second) || s.noticed > 0 {
				t.Fatal("a running process counts as having stood still")
			}

			s.stand(lasts)
			if got := s.EndedWithin(time.Second); got != long { // also before Run has looked
				t.Errorf("after %s, before the next check of Run, the answer is %t", lasts, got)
			}
			synctest.Wait()
			if s.noticed > 0 != long || s.EndedWithin(time.Second) != long || s.Ended() {
				t.Errorf("a standstill of %s was noticed %d times, want once", lasts, s.noticed)
			}

			time.Sleep(time.Second)
			if s.EndedWithin(time.Second) {
				t.Errorf("after %s the process still counts as having just stood still", lasts)
			}
		})
	}
}
