package machine

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestMemoryIsReturnedAtRest(t *testing.T) {
	const mb = 1 << 20
	for _, c := range []struct {
		why  string
		heap heap
		rate uint64 // bytes allocated between two checks
		want bool
	}{
		{"garbage of a burst", heap{objects: 64 * mb, live: 30 * mb}, mb, true},
		{"freed by a collection", heap{objects: 30 * mb, live: 30 * mb, free: 20 * mb}, 0, true},
		{"little", heap{objects: 36 * mb, live: 30 * mb}, 0, false},
		{"little beside what is used", heap{objects: 1100 * mb, live: 1000 * mb, free: 100 * mb}, 0, false},
		{"busy", heap{objects: 64 * mb, live: 30 * mb}, 3 * mb, false},
		{"the collector has just found more in use than there is now", heap{objects: 10 * mb, live: 30 * mb}, 0, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			var looks, freed atomic.Uint64
			ctx, stop := context.WithCancel(t.Context())
			defer stop()

			go returnMemory(ctx, func() heap {
				now := c.heap
				now.allocated = 7*mb + looks.Add(1)*c.rate
				return now
			}, func() { freed.Add(1) })

			time.Sleep(restEvery + time.Second)

			if got := freed.Load() > 0; got != c.want {
				t.Errorf("%s: returned: %t, want %t", c.why, got, c.want)
			}
		})
	}
}

func TestReadHeap(t *testing.T) {
	before := readHeap()
	if before.live > before.allocated || before.objects == 0 {
		t.Fatalf("the first reading is %+v", before)
	}

	held := make([]byte, 1<<20)
	if now := readHeap(); now.allocated-before.allocated < uint64(len(held)) {
		t.Errorf("%d bytes were allocated, and %d are reported", len(held), now.allocated-before.allocated)
	}
}
