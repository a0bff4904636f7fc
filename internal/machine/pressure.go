package machine

import (
	"math"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

const (
	sampleEvery = 100 * time.Millisecond

	// Pressure begins and ends at these fractions of the limit. The memory above them is
	// for short-lived objects and for the garbage collector.
	pressureFrom = 0.75
	pressureTo   = 0.70
)

// Pressure reports when this process uses so much memory that it should refuse new
// work. Any goroutine may use it.
type Pressure struct {
	limit uint64        // bytes
	used  func() uint64 // returns the bytes in use, without garbage

	mu     sync.Mutex
	looked time.Time
	high   bool
}

// LimitMemory sets Go's memory limit to nine tenths of Memory, so that garbage is
// collected before it takes the memory that connections need. If GOMEMLIMIT is set,
// LimitMemory changes nothing.
func LimitMemory() {
	// A negative argument reads the limit and does not change it.
	if debug.SetMemoryLimit(-1) == math.MaxInt64 {
		debug.SetMemoryLimit(int64(Memory() / 10 * 9))
	}
}

// NewPressure returns a Pressure that compares this process with Go's memory limit
// (GOMEMLIMIT) or Memory, whichever is smaller.
func NewPressure() *Pressure {
	limit := Memory()
	if given := debug.SetMemoryLimit(-1); given < math.MaxInt64 {
		limit = min(limit, uint64(given))
	}

	return newPressure(limit, usedMemory)
}

func newPressure(limit uint64, used func() uint64) *Pressure {
	return &Pressure{limit: limit, used: used}
}

// High reports whether too much memory is in use: from 75 % of the limit until the use is
// below 70 %. It measures at most every 100 ms.
func (p *Pressure) High() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	now := time.Now()
	if now.Sub(p.looked) < sampleEvery {
		return p.high
	}
	p.looked = now

	// Two thresholds, because one would let each collection of garbage change the answer.
	part := pressureFrom
	if p.high {
		part = pressureTo
	}
	p.high = float64(p.used()) >= part*float64(p.limit)

	return p.high
}

// usedMemory returns the bytes that the last collection found in use, plus the bytes
// that Go uses beside its heap.
func usedMemory() uint64 {
	s := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/heap/stacks:bytes"},
		{Name: "/memory/classes/os-stacks:bytes"},
		{Name: "/memory/classes/metadata/other:bytes"},
		{Name: "/memory/classes/other:bytes"},
	}

	metrics.Read(s)

	// A figure that this version of Go does not have is of another kind.
	sum := uint64(0)
	for i := range s {
		if s[i].Value.Kind() == metrics.KindUint64 {
			sum += s[i].Value.Uint64()
		}
	}

	// The ballast takes no memory, because it is never touched, but the figures above include it.
	return sum - min(sum, uint64(len(ballast)))
}
