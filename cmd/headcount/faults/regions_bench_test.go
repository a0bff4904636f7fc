package faults

import (
	"context"
	"slices"
	"testing"
	"time"

	"headcount/presence/redistest"
)

// BenchmarkLoneJoinInAnotherRegion measures how long after a join in one region another
// region shows it, beyond the delay of the link, while nothing else happens.
func BenchmarkLoneJoinInAnotherRegion(b *testing.B) {
	for name, delay := range map[string]time.Duration{"no delay": 0, "100ms one way": 100 * time.Millisecond} {
		b.Run(name, func(b *testing.B) {
			us, eu := &dataCentre{name: "us", redis: redistest.Start(b)}, &dataCentre{name: "eu", redis: redistest.Start(b)}
			for _, pair := range [][2]*dataCentre{{us, eu}, {eu, us}} {
				r, other := pair[0], pair[1]
				m := newMember(r.name, "gateway", r.redis.URL(), nil, "--region="+r.name, "--peer="+other.name+"="+newWire(b, other.redis.Addr, delay).url())
				m.flags[1] = "--roles=gateway,presence,dispatcher"
				r.members = []*member{m}
			}
			startAll(b, us.members[0], eu.members[0])
			awaitReady(b, readyWithin, us.members[0], eu.members[0])
			ctx, cancel := context.WithTimeout(b.Context(), 5*time.Minute)
			defer cancel()
			watcher, err := dial(ctx, eu.members[0], "", []string{`{"type":"subscribe","pages":[` + quoted(spot) + `]}`})
			if err != nil {
				b.Fatal(err)
			}
			defer watcher.CloseNow()
			await := func(n int64) {
				for {
					f, err := read(ctx, watcher)
					if err != nil {
						b.Fatal(err)
					}
					if f.Type == "count" && f.Count == n {
						return
					}
				}
			}
			await(0)
			var took []time.Duration
			for i := range max(b.N, 50) {
				joiner, err := dial(ctx, us.members[0], "", nil)
				if err != nil {
					b.Fatal(err)
				}
				defer joiner.CloseNow()
				go func() { // ends with the connection; pings are answered meanwhile
					for {
						if _, err := read(ctx, joiner); err != nil {
							return
						}
					}
				}()
				time.Sleep(time.Duration(700+i*37%500) * time.Millisecond) // everything is quiet, at a random point between its regular messages
				start := time.Now()
				if err := joiner.Write(ctx, 1, []byte(join(spot))); err != nil {
					b.Fatal(err)
				}
				await(int64(i + 1))
				took = append(took, time.Since(start)-delay)
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
			b.ReportMetric(0, "ns/op")
		})
	}
}
