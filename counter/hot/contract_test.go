package hot

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/internal/redistest"
)

// A store whose sums are spread from their second change in a second on keeps the contract.
func TestContract(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	begin := func() counter.Store {
		log := zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)
		redis, err := counterredis.Open(counterredis.Config{URL: server.URL(), Rules: countertest.Rules, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		s := New(redis, redis, Config{Rate: 1, Rules: countertest.Rules, Gather: 20 * time.Millisecond, Log: log})
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		return s
	}
	crashes := 0
	countertest.Run(t, countertest.Core, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		return countertest.Instance{
			Store: begin(),
			Peer:  begin(),
			Crash: func(t testing.TB) counter.Store {
				if crashes++; crashes%4 == 0 {
					server.Restart(t)
				}
				s := begin()
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
