package hot

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/internal/redistest"
)

// eager is a process that splits each sum after its first change, and gathers what it adds at once. It leaves out sums s:…,
// of which the contract expects updates and histories that do not lag.
type eager struct{ *Store }

func (e eager) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := e.Store.Apply(ctx, ops)
	for _, r := range results {
		for _, c := range r.Counters {
			if strings.HasPrefix(c.Key, "s:") {
				continue
			}
			if c.Kind == counter.Sum && c.IsSharded() {
				_ = e.gatherKeys(ctx, c.Key) // the server may be away
			} else if c.Kind == counter.Sum && c.Touched() {
				_ = e.split(ctx, c.Key)
			}
		}
	}
	return results
}

// A store whose sums are sharded from their second change on keeps the contract.
func TestServerContractOfShardedSums(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	begin := func() eager {
		log := zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)
		redis := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, server.URL()), Rules: countertest.Rules, Log: log})
		s := eager{New(redis, redis, Config{Rate: 1_000_000, Rules: countertest.Rules, Gather: 20 * time.Millisecond, Log: log})}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		return s
	}
	crashes := 0
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "sums are split and merged on the way",
		"changes at the same time add up":            "changes land while sums are split and merged",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		s := begin()
		return countertest.Instance{
			Store: s,
			Peer:  begin(),
			Crash: func(t testing.TB) counter.Store {
				s.stop() // what it has not gathered stays in the shards
				s.wg.Wait()
				if crashes++; crashes%4 == 0 {
					server.Restart(t)
				}
				s = begin()
				countertest.AwaitServed(t, s)
				return s
			},
			Cut: func(t testing.TB) func() {
				server.Kill()
				return func() { server.Restart(t) }
			},
		}
	})
}
