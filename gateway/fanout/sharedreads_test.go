package fanout

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A caller shares a read under way, unless it began so long ago that its answer may be too old.
func TestASharedReadIsNotTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads SharedReads[time.Time]
		var calls atomic.Int32
		read := func(context.Context) ([]time.Time, error) {
			calls.Add(1)
			asOf := time.Now()
			time.Sleep(3 * time.Second) // until the store answers
			return []time.Time{asOf}, nil
		}

		const lag = 2 * time.Second
		for range 30 {
			go func() {
				asked := time.Now()
				values, err := reads.Read(t.Context(), "key", lag, time.Minute, read)
				if err != nil || asked.Sub(values[0]) > lag {
					t.Errorf("asked at %v, got the value of %v (%v), want one that is at most %v old",
						asked, values, err, lag)
				}
			}()

			time.Sleep(100 * time.Millisecond)
		}

		time.Sleep(time.Minute)
		if n := calls.Load(); n != 2 {
			t.Errorf("%d calls to the store, want 2", n)
		}
	})
}

// After a standstill of the process every count is stale until it has been read again.
func TestStandstillMakesCountsStale(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		h.Want(readTopic)
		synctest.Wait()
		h.Update(version(18))
		store.brings(version(20))
		wantRead(t, store, h.Newest, version(18), 0)

		var during []bool
		store.during = func() {
			u, _ := h.Last(readTopic)
			during = append(during, u.Stale)
		}

		h.resumed()
		synctest.Wait()
		if !slices.Equal(during, []bool{true}) {
			t.Errorf("while the topic is attached and read again stale is %v, want [true]", during)
		}

		wantRead(t, store, h.Newest, version(20), 0) // the version with which it was attached
	})
}
