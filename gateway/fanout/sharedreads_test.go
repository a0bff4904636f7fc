package fanout

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A caller shares a read under way unless that began so long ago that its answer may be too old.
func TestASharedReadIsNotTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads SharedReads[time.Time]
		var calls atomic.Int32
		read := func(context.Context) ([]time.Time, error) {
			calls.Add(1)
			asOf := time.Now()
			time.Sleep(3 * time.Second) // the answer of the store is on its way
			return []time.Time{asOf}, nil
		}

		const lag = 2 * time.Second
		for range 30 {
			go func() {
				asked := time.Now()
				values, err := reads.Read(t.Context(), "key", lag, time.Minute, read)
				if err != nil || asked.Sub(values[0]) > lag {
					t.Errorf("asked at %v, read %v, %v", asked, values, err)
				}
			}()
			time.Sleep(100 * time.Millisecond)
		}

		time.Sleep(time.Minute)
		if n := calls.Load(); n != 2 {
			t.Errorf("%d calls of the store, want 2", n)
		}
	})
}

// After a standstill every count is stale until it has been read again.
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
			t.Errorf("stale while it is attached and read again: %v", during)
		}
		wantRead(t, store, h.Newest, version(20), 0) // as it was attached
	})
}
