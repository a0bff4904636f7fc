package counter_test

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"

	"headcount/counter"
	"headcount/counter/memstore"
)

// BenchmarkInMemory is Apply and combining together. The unit is changes of one
// core: run it with -cpu 1.
func BenchmarkInMemory(b *testing.B) {
	names := make([]string, 1_000_000)
	for i := range names {
		names[i] = "s:" + strconv.Itoa(i)
	}
	start := func(b *testing.B) *counter.Combiner {
		c := counter.NewCombiner(memstore.New(memstore.Config{}), counter.CombinerConfig{Instant: true})
		b.Cleanup(c.Close)
		b.ReportAllocs()
		b.ResetTimer()
		return c
	}
	rate := func(b *testing.B, changes int) {
		b.ReportMetric(float64(b.N*changes)/b.Elapsed().Seconds(), "changes/s")
	}
	for _, keys := range []int{1, len(names)} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			c := start(b)
			for i := range b.N {
				if r := c.Do(context.Background(), add(sum, names[i*7919%keys], 1)); r.Err != nil {
					b.Fatal(r.Err)
				}
			}
			rate(b, 1)
		})
		b.Run(fmt.Sprintf("keys=%d/buckets", keys), func(b *testing.B) {
			views := counter.BuiltinRules().Find("views:1")
			c := start(b)
			for i := range b.N {
				if r := c.Do(context.Background(), add(views, names[i*7919%keys], 1)); r.Err != nil {
					b.Fatal(r.Err)
				}
			}
			rate(b, 1)
		})
		b.Run(fmt.Sprintf("keys=%d/parallel", keys), func(b *testing.B) {
			c := start(b)
			var n atomic.Int64
			b.SetParallelism(32)
			b.RunParallel(func(p *testing.PB) {
				i := int(n.Add(1)) * 7919
				for p.Next() {
					i += 7919
					if r := c.Do(context.Background(), add(sum, names[i%keys], 1)); r.Err != nil {
						b.Error(r.Err)
						return
					}
				}
			})
			rate(b, 1)
		})
		b.Run(fmt.Sprintf("keys=%d/batches", keys), func(b *testing.B) {
			var changes []counter.Change
			for i := range counter.MaxChanges {
				changes = append(changes, add(sum, names[i*7919%keys], 1).Changes...)
			}
			c := start(b)
			for range b.N {
				if r := c.Do(context.Background(), counter.Op{Changes: changes}); r.Err != nil {
					b.Fatal(r.Err)
				}
			}
			rate(b, counter.MaxChanges)
		})
	}
}
