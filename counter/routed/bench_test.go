package routed

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
)

// BenchmarkReservations measures 64 clients that reserve and then commit over PostgreSQL: on one counter, and on a
// thousand.
//
//	go test -run '^$' -bench Reservations -benchtime 30000x ./counter/routed
func BenchmarkReservations(b *testing.B) {
	for _, keys := range []int64{1, 1000} {
		b.Run(fmt.Sprint(keys, " counters"), func(b *testing.B) { benchReservations(b, keys) })
	}
}

func benchReservations(b *testing.B, keys int64) {
	s := openAlone(b, pgtest.Single(b).Database(b))
	combiner := counter.NewCombiner(s, counter.CombinerConfig{Queues: 8, SeparateExact: true})
	b.Cleanup(combiner.Close)
	rule := countertest.Rules.Find("e:1")

	var n, took atomic.Int64
	each := func(verb counter.Verb) {
		n.Store(0)
		began := time.Now()
		var clients sync.WaitGroup
		for range 64 {
			clients.Go(func() {
				for i := n.Add(1); i <= int64(b.N); i = n.Add(1) {
					c := counter.Change{Key: fmt.Sprint("e:", i%keys), Rule: rule, Verb: verb, Delta: 1}
					c.Hold = &counter.Hold{ID: fmt.Sprint("cart ", i), For: time.Hour}
					if r := combiner.Do(b.Context(), counter.Op{Changes: []counter.Change{c}}); r.Err != nil {
						b.Error(r.Err)
						return
					}
				}
			})
		}

		clients.Wait()
		took.Store(int64(time.Since(began)))
	}

	b.ResetTimer()
	each(counter.Reserve)
	b.ReportMetric(float64(b.N)/time.Duration(took.Load()).Seconds(), "reservations/s")
	each(counter.Commit)
	b.ReportMetric(float64(b.N)/time.Duration(took.Load()).Seconds(), "commits/s")
}
