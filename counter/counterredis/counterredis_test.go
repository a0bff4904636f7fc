package counterredis_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// open returns a store that ends with the test, of a region with others when that has a name.
func open(t testing.TB, url, region string) *counterredis.Store {
	t.Helper()
	s := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url), Region: region, Rules: countertest.Rules, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// instance is two stores over servers; a cut kills the servers. After a crash another
// process goes on. The first crash and then one in every crashes also restarts a server,
// which takes seconds until a master of a Cluster is let in again.
func instance(t testing.TB, url, region string, servers []*redistest.Server, every int) countertest.Instance {
	s := open(t, url, region)
	crashes := 0
	return countertest.Instance{
		Store: s,
		Peer:  open(t, url, region),
		Crash: func(t testing.TB) counter.Store {
			if crashes%every == 0 {
				servers[crashes/every%len(servers)].Restart(t)
			}
			crashes++
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			s = open(t, url, region)
			countertest.AwaitServed(t, s)
			return s
		},
		Cut: func(t testing.TB) func() {
			for _, server := range servers {
				server.Kill()
			}
			return func() {
				for _, server := range servers {
					server.Restart(t)
				}
			}
		},
	}
}

// Counters of another format are neither read nor changed, also when Redis comes to have
// them later, and whoever fills that Redis is told. When the format fits again, so does the store.
func TestServerAnotherFormatIsRefused(t *testing.T) {
	server := redistest.Single(t)
	add := []counter.Op{{Changes: []counter.Change{{Key: "views:1", Rule: &counter.Rule{Kind: counter.Sum}, Verb: counter.Add, Delta: 1}}}}
	refused := func(s *counterredis.Store) {
		t.Helper()
		_, positions := s.Positions(t.Context(), "us", []int{0})
		_, leases := s.Leases(t.Context())
		for call, err := range map[string]error{"Apply": s.Apply(t.Context(), add)[0].Err, "Positions": positions, "Leases": leases} {
			// A store that keeps failing is not asked every time, as with any other failure.
			if !errors.Is(err, counter.ErrUnavailable) || !errors.Is(err, counterredis.ErrFormat) && !strings.Contains(err.Error(), "a moment ago") {
				t.Errorf("%s: %v", call, err)
			}
		}
	}
	server.Do(t, "HSET", "hc:{c}:facts", "counters", "1")
	s := open(t, server.URL(), "")
	if err := s.Apply(t.Context(), add)[0].Err; !errors.Is(err, counterredis.ErrFormat) || !strings.Contains(err.Error(), `theirs is "1", this version knows 2`) {
		t.Error(err)
	}
	refused(s)
	if keys := server.Do(t, "KEYS", "*"); len(keys.([]any)) != 1 {
		t.Errorf("beside the facts there are %v", keys)
	}
	// Never empty between two commands: that is a new Redis, which the store's probe would accept.
	server.Do(t, "HSET", "hc:{c}:facts", "seed", "1")
	server.Do(t, "HDEL", "hc:{c}:facts", "counters") // of a release before numbers
	refused(s)
	server.Do(t, "HSET", "hc:{c}:facts", "format", "5") // of one before counters had a number
	refused(s)
	server.Do(t, "HSET", "hc:{c}:facts", "counters", "2")
	countertest.AwaitServed(t, s)
	if r := s.Apply(t.Context(), add)[0]; r.Err != nil || r.Counters[0].Value != 1 {
		t.Errorf("%+v", r)
	}
	server.Do(t, "HSET", "hc:{c}:facts", "counters", "1")
	if _, err := s.Positions(t.Context(), "us", []int{0}); !errors.Is(err, counterredis.ErrFormat) {
		t.Errorf("another region is told of a format that it has no more: %v", err)
	}
}

// The server speaks TLS alone, and the store is the user that deploy/redis.acl documents.
func TestServerContract(t *testing.T) {
	server := redistest.StartSecure(t, redistest.Durable...)
	countertest.Run(t, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		return instance(t, server.URL(), "", []*redistest.Server{server}, 4)
	})
}

// The store is that of a region with others, which shares what it changes.
func TestServerContractOnCluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 0, redistest.Durable...)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "keys of one counter are in one slot, those of a batch in many",
		"changes at the same time add up":            "batches over several masters, some of which are killed",
	}, func(t testing.TB) countertest.Instance {
		cluster.Flush(t)
		return instance(t, cluster.URL(), "us", cluster.Masters, 12)
	})
}

func TestServerCopies(t *testing.T) {
	t.Parallel()
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
		s := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, redistest.Start(t).URL()), Rules: counter.BuiltinRules(), Log: zerolog.Nop()})
		t.Cleanup(func() { _ = s.Close() })
		return s
	})
}

// TestServerARestoredCounterIsSentToOtherRegions: the log of its bucket lacks it, and what other regions sent may be replaced. So
// both are sent whole, also if another counter of the import has changed meanwhile.
func TestServerARestoredCounterIsSentToOtherRegions(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	s := open(t, cluster.URL(), "us")
	restored := counter.Copy{Key: "views:restored", State: counter.State{Kind: counter.Sum, Value: 9, Updated: 1, Version: counter.Version{Incarnation: 5, Sequence: 3}}}
	changed := restored
	changed.Key = "views:changed"
	buckets := []int{counterredis.BucketOf(restored.Key)}
	outgoing := func(at counterredis.Position) counterredis.Batch {
		t.Helper()
		batches, err := s.Outgoing(t.Context(), buckets, []counterredis.Position{at}, 10)
		if err != nil {
			t.Fatal(err)
		}
		return batches[0]
	}
	at := outgoing(counterredis.Position{}).To
	from := counterredis.Batch{Bucket: buckets[0], To: counterredis.Position{Log: "1.2", Cursor: 3}}
	if _, err := s.Merge(t.Context(), "eu", "us", []counterredis.Message{
		{Batch: from, Mode: counterredis.ModeBegin, Word: "w"}, {Batch: from, Mode: counterredis.ModeEnd, Word: "w"},
	}); err != nil {
		t.Fatal(err)
	}
	if b := outgoing(at); b.All {
		t.Fatal("the log does not continue")
	}
	if is, err := s.Positions(t.Context(), "eu", buckets); err != nil || is[0] != from.To {
		t.Fatalf("eu is at %+v, %v", is, err)
	}

	// The second copy of a counter finds that the first one has changed it.
	if _, err := s.Restore(t.Context(), []counter.Copy{restored, changed, changed}, counter.BuiltinRules()); !errors.Is(err, counter.ErrUnavailable) {
		t.Fatalf("an import of what changes meanwhile: %v", err)
	}
	if b := outgoing(at); !b.All {
		t.Error("other regions are not sent the whole bucket")
	}
	if is, err := s.Positions(t.Context(), "eu", buckets); err != nil || is[0] != (counterredis.Position{}) {
		t.Errorf("after the import eu is at %+v, %v", is, err)
	}
}
