package counterapi

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/testkit"
)

// BenchmarkNotify measures a notification of the store about some of a thousand counters that clients watch.
func BenchmarkNotify(b *testing.B) {
	for _, changed := range []int{1, 100} {
		b.Run(fmt.Sprint(changed), func(b *testing.B) {
			cfg := Config{Rules: counter.BuiltinRules(), Counters: &scripted{}, Log: zerolog.Nop()}
			l := NewLive(cfg, nowhere{})
			for i := range 1000 {
				l.Want(Topic(fmt.Sprint("views:", i)))
			}

			changes := make([]counter.Update, changed)
			for i := range changes {
				changes[i].Counter = counter.Counter{
					Key: fmt.Sprint("views:", i), Kind: counter.Sum, Version: counter.Version{Incarnation: 1},
				}
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

// BenchmarkCall measures a call from the router to the written answer, over a store in memory.
func BenchmarkCall(b *testing.B) {
	for name, call := range map[string]struct{ method, path string }{
		"increment": {http.MethodPost, "/views:1/increment"},
		"read":      {http.MethodGet, "/views:1"},
	} {
		b.Run(name, func(b *testing.B) {
			s := serve(b, nil)
			r := httptest.NewRequest(call.method, Root+call.path, nil)
			r.Header.Set("X-API-Key", "k")
			w := &testkit.Unsent{}

			b.ReportAllocs()
			for b.Loop() {
				clear(w.Header())
				s.engine.ServeHTTP(w, r)
			}

			if w.Status != http.StatusOK {
				b.Fatal(w.Status)
			}
		})
	}
}
