package machine

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	restEvery = 10 * time.Second

	// spareMemory, or a quarter of the memory in use if that is more, is kept by a process
	// at rest in addition to the memory in use.
	spareMemory = 8 << 20
)

// ReturnMemory returns memory to the system when the process comes to rest, until ctx
// ends. Go collects garbage when the heap has doubled, or after two minutes, and then keeps
// some memory for later. So without ReturnMemory, garbage from a peak of load would take
// memory for minutes.
func ReturnMemory(ctx context.Context) { returnMemory(ctx, readHeap, debug.FreeOSMemory) }

// heap has figures of Go's heap, in bytes.
type heap struct {
	allocated uint64 // since the start of the process
	objects   uint64 // in use, or garbage
	live      uint64 // in use at the last collection, with the ballast
	free      uint64 // neither used nor returned
}

// spare returns how much memory could be returned to the system, at least.
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

// worthwhile reports whether memory is to be returned: there is enough to return, and at
// the present rate of allocation it takes more than two minutes until there is as much
// garbage again. So ReturnMemory collects no more often than Go does by itself.
func worthwhile(before, now heap) bool {
	spare := now.spare()
	inTwoMinutes := (now.allocated - before.allocated) * uint64(2*time.Minute/restEvery)

	return spare > max(spareMemory, now.live/4) && inTwoMinutes < spare
}

func readHeap() heap {
	s := []metrics.Sample{
		{Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)

	return heap{
		allocated: s[0].Value.Uint64(),
		objects:   s[1].Value.Uint64(),
		live:      s[2].Value.Uint64(),
		free:      s[3].Value.Uint64(),
	}
}
