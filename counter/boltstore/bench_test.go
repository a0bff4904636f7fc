package boltstore

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"headcount/counter"
)

// BenchmarkClients is 64 clients of one exact counter and of many, against one
// fsync for each change: the same without combining.
func BenchmarkClients(b *testing.B) {
	const clients = 64
	run := func(b *testing.B, rule *counter.Rule, keys int, do func(counter.Op) counter.Result) {
		b.ResetTimer()
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				for i := c; i < b.N; i += clients {
					if r := do(add(rule, "k"+strconv.Itoa(i%keys), "")); r.Err != nil {
						b.Error(r.Err)
						return
					}
				}
			})
		}
		wg.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "changes/s")
	}
	b.Run("floor", func(b *testing.B) {
		s := open(b, b.TempDir(), Config{})
		run(b, sum, 1, func(op counter.Op) counter.Result { return s.Apply(context.Background(), []counter.Op{op})[0] })
	})
	for name, rule := range map[string]*counter.Rule{"sum": sum, "exact": exact} {
		for _, keys := range []int{1, 100_000} {
			b.Run(name+"/keys="+strconv.Itoa(keys), func(b *testing.B) {
				s := open(b, b.TempDir(), Config{})
				w := &counted{Writer: s}
				c := counter.NewCombiner(w, counter.CombinerConfig{})
				defer c.Close()
				defer func() { b.ReportMetric(float64(b.N)/float64(w.writes), "changes/write") }()
				run(b, rule, keys, func(op counter.Op) counter.Result { return c.Do(context.Background(), op) })
			})
		}
	}
}

// counted counts writes; a Combiner of one lane calls it one at a time.
type counted struct {
	counter.Writer
	writes int
}

func (c *counted) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	c.writes++
	return c.Writer.Apply(ctx, ops)
}
