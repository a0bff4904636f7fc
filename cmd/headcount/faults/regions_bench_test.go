package faults

import (
	"slices"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
)

// BenchmarkLoneJoinInAnotherRegion measures how long after a join in one region another region shows it, in excess of
// the delay of the link, while nothing else happens.
func BenchmarkLoneJoinInAnotherRegion(b *testing.B) {
	for name, delay := range map[string]time.Duration{"no delay": 0, "100ms one way": 100 * time.Millisecond} {
		b.Run(name, func(b *testing.B) {
			us := &dataCentre{name: "us", redis: redistest.Start(b)}
			eu := &dataCentre{name: "eu", redis: redistest.Start(b)}
			for _, pair := range [][2]*dataCentre{{us, eu}, {eu, us}} {
				r, other := pair[0], pair[1]
				m := newMember(r.name, allRoles, r.redis.URL(), nil, "--region="+r.name,
					"--peer="+other.name+"="+newWire(b, other.redis.Addr, delay).url())
				r.members = []*member{m}
			}

			startAll(b, us.members[0], eu.members[0])
			awaitReady(b, us.members[0], eu.members[0])

			watcher := mustDial(b, eu.members[0])
			if err := watcher.Subscribe(spot); err != nil {
				b.Fatal(err)
			}

			await := func(n int64) {
				var f client.Frame
				for f.Count.Count != n || f.Type != "count" {
					if err := watcher.Receive(&f); err != nil {
						b.Fatal(err)
					}
				}
			}

			await(0)
			var took []time.Duration
			for i := range max(b.N, 50) {
				joiner := mustDial(b, us.members[0])
				go drain(joiner)

				// All is quiet, at a random moment between regular messages.
				time.Sleep(time.Duration(700+i*37%500) * time.Millisecond)
				start := time.Now()
				if err := joiner.Join(spot); err != nil {
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
