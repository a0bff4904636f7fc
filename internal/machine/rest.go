package machine

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	restEvery = 10 * time.Second

	// spareMemory is what a process at rest may keep, at least, beside the memory that
	// it uses; a quarter of that is nothing to speak of either.
	spareMemory = 8 << 20
)

// ReturnMemory gives memory back to the system when the process comes to rest, until
// ctx ends. Go collects garbage when the heap has doubled, or after two minutes, and
// then keeps some memory for the next time. So what a crowd of arrivals has left
// behind would stay for minutes.
func ReturnMemory(ctx context.Context) { returnMemory(ctx, readHeap, debug.FreeOSMemory) }

// heap is what Go says of it, in bytes.
type heap struct {
	allocated uint64 // since the start of the process
	objects   uint64 // in use, or garbage
	live      uint64 // what the last collection found in use, with the ballast
	free      uint64 // neither used nor returned
}

// spare is what the system would get back, at least.
func (h heap) spare() uint64 { return h.free + max(h.objects, h.live) - h.live }

func returnMemory(ctx context.Context, read func() heap, free func()) {
	tick := time.NewTicker(restEvery)
	defer tick.Stop()
	for before := read(); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := read()
		if worthwhile(before, now) {
			free()
		}
		before = now
	}
}

// worthwhile reports whether memory is to be returned: there is enough, and at the rate
// of the last look it takes more than two minutes until there is as much garbage again.
// So this collects no more often than Go does by itself.
func worthwhile(before, now heap) bool {
	spare := now.spare()
	return spare > max(spareMemory, now.live/4) && (now.allocated-before.allocated)*uint64(2*time.Minute/restEvery) < spare
}

func readHeap() heap {
	s := []metrics.Sample{
		{Name: "/gc/heap/allocs:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	return heap{allocated: s[0].Value.Uint64(), objects: s[1].Value.Uint64(), live: s[2].Value.Uint64(), free: s[3].Value.Uint64()}
}
