package counterapi

import (
	"fmt"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
)

// A notification of the store about some of a thousand counters that clients look at.
func BenchmarkNotify(b *testing.B) {
	for _, changed := range []int{1, 100} {
		b.Run(fmt.Sprint(changed), func(b *testing.B) {
			l := NewLive(Config{Rules: counter.BuiltinRules(), Counters: &scripted{}, Log: zerolog.Nop()}, nowhere{})
			for i := range 1000 {
				l.Want(Topic(fmt.Sprint("views:", i)))
			}
			changes := make([]counter.Update, changed)
			for i := range changes {
				changes[i].Counter = counter.Counter{Key: fmt.Sprint("views:", i), Kind: counter.Sum, Version: counter.Version{Incarnation: 1}}
			}
			b.ReportAllocs()
			for b.Loop() {
				for i := range changes {
					changes[i].Counter.Value++
					changes[i].Counter.Version.Sequence++
				}
				l.notify(changes)
			}
		})
	}
}
