package counter_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/testkit"
)

// BenchmarkTop measures the question for the keys that gained most, when a million keys have gained in the running
// minute, and with the lists of all steps of the last 90 days. It logs the memory of the tracker.
func BenchmarkTop(b *testing.B) {
	rules := counter.BuiltinRules()
	rule := rules.Find("views:1")
	for _, listed := range []int{100, 1000} {
		store := countertest.InMemory(b, nil)

		now := time.Now()
		for _, bucket := range rule.Resolutions {
			step := int64(bucket.Step / time.Second)
			for number := now.Add(-bucket.Kept).Unix() / step; number < now.Unix()/step; number++ {
				list := counter.TopList{Number: number}
				for i := range listed {
					list.Most = append(list.Most, counter.Gained{
						Key: fmt.Sprint("views:", (int(number)*7+i)%10_000), Value: int64(2*listed - i),
					})
				}
				if err := store.KeepTop(b.Context(), rule.Match, bucket.Step, list, bucket.Kept, nil); err != nil {
					b.Fatal(err)
				}
			}
		}

		runtime.GC()

		tops := track(store, rules)
		ops := make([]counter.Op, 1000)
		for range 1000 {
			for i := range ops {
				ops[i].Changes = []counter.Change{
					{Key: fmt.Sprint("views:", rand.IntN(1_000_000)), Rule: rule, Verb: counter.Add, Delta: 1},
				}
			}
			tops.Apply(b.Context(), ops)
		}

		for _, last := range []time.Duration{time.Hour, 24 * time.Hour, 90 * 24 * time.Hour} {
			b.Run(fmt.Sprintf("lists of %d/last %s", listed, last), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := tops.Top(b.Context(), rule, last, 10); err != nil {
						b.Fatal(err)
					}
				}
			})
		}

		all := testkit.Heap()
		if err := tops.Close(); err != nil {
			b.Fatal(err)
		}

		runtime.KeepAlive(tops)
		tops = tracked{}
		b.Logf("lists of %d: the tracker has %.1f MB", listed, float64(all-testkit.Heap())/1e6)
		runtime.KeepAlive(store)
	}
}
