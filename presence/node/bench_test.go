package node

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// loaded returns a partition in which one gateway has users users, each on one of a
// thousand pages.
func loaded(b *testing.B, users int) *partition {
	b.Helper()
	n, err := New(newStore(), Config{Name: "n", Partitions: 1, Reply: replies(func(string, *heartbeat.Reply) {}), Log: zerolog.Nop()})
	if err != nil {
		b.Fatal(err)
	}
	p := newPartition(n, presence.Claim{})
	src := &source{Source: gw("a")}
	p.sources[src.Source] = src
	names := make([]string, 1000)
	for i := range names {
		names[i] = fmt.Sprintf("/articles/%d/how-to-count-people", i)
	}
	for i := range users {
		p.arrive(src, presence.User(uint64(i)*0x9E3779B97F4A7C15), p.page(names[i%len(names)]))
		if i%1000 == 0 {
			p.out.take(1)
		}
	}
	p.out.take(1)
	return p
}

// BenchmarkHeartbeats: steady heartbeats of a million users, as they come out
// of datagrams, applied by one actor.
func BenchmarkHeartbeats(b *testing.B) {
	const users, batch = 1_000_000, 139 // what a datagram holds
	p := loaded(b, users)
	beat := &heartbeat.Beat{Source: gw("a"), Alive: make([]presence.User, batch)}
	next := 0
	b.ReportAllocs()
	for b.Loop() {
		for i := range beat.Alive {
			beat.Alive[i] = presence.User(uint64(next) * 0x9E3779B97F4A7C15)
			if next++; next == users {
				next = 0
			}
		}
		p.beat(beat)
	}
	b.ReportMetric(float64(b.N)*batch/b.Elapsed().Seconds(), "heartbeats/s")
}

// BenchmarkSessionMemory: what a session on one page costs.
func BenchmarkSessionMemory(b *testing.B) {
	const users = 1_000_000
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		p := loaded(b, users)
		b.ReportMetric(float64(heap()-before)/users, "B/session")
		runtime.KeepAlive(p)
	}
}

// BenchmarkJoins: joins through the actor and the writer into the embedded store.
func BenchmarkJoins(b *testing.B) {
	acked := make(chan uint64, 1024)
	n, err := New(newStore(), Config{
		Name: "n", Partitions: testPartitions, Log: zerolog.Nop(),
		Reply: replies(func(_ string, r *heartbeat.Reply) { acked <- r.Acked }),
	})
	if err != nil {
		b.Fatal(err)
	}
	n.Own([]int{0, 1, 2})
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = n.Run(ctx)
	}()
	defer func() { stop(); <-done }()
	for !n.Owns(0) || !n.Owns(1) || !n.Owns(2) {
		time.Sleep(time.Millisecond)
	}
	const batch = 64
	user, first := uint64(0), uint64(1)
	b.ReportAllocs()
	for b.Loop() {
		ops := make([]heartbeat.Op, batch)
		for i := range ops {
			ops[i] = join(presence.User(user*testPartitions), "p") // all of partition 0
			user++
		}
		n.Deliver(&heartbeat.Beat{Source: gw("a"), Stream: 1, First: first, Ops: ops})
		first += batch
		for a := range acked {
			if a == first-1 {
				break
			}
		}
	}
	b.ReportMetric(float64(b.N)*batch/b.Elapsed().Seconds(), "joins/s")
}
