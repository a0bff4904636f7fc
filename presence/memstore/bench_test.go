package memstore_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"headcount/presence/memstore"
	"headcount/presence/unread"
)

// BenchmarkChange: 64 callers change pages, each waits until its change is kept.
func BenchmarkChange(b *testing.B) {
	for name, open := range map[string]func() *memstore.Store{
		"memory": func() *memstore.Store { return memstore.New(memstore.Config{}) },
		"disk":   func() *memstore.Store { return openDir(b, b.TempDir()) },
	} {
		b.Run(name, func(b *testing.B) {
			const callers = 64
			s := open()
			var next atomic.Int64
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
						author := unread.User{byte(i)}
						c := unread.Change{Key: fmt.Sprint(i), By: &author}
						if err := s.Change(b.Context(), fmt.Sprint("p", i%1000), c); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "changes/s")
		})
	}
}
