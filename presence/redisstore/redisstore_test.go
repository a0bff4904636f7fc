package redisstore_test

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence/redisstore"
	"headcount/presence/redistest"
	"headcount/presence/storetest"
	"headcount/servertest"
)

func TestMain(m *testing.M) { servertest.Main(m, redistest.Stop) }

// open returns a store that ends with the test.
func open(t testing.TB, url string, with ...func(*redisstore.Config)) *redisstore.Store {
	t.Helper()
	cfg := redisstore.Config{URL: url, Log: zerolog.New(zerolog.NewTestWriter(t)), Facts: redisstore.Facts{Region: "local", Secret: "k"}}
	for _, w := range with {
		w(&cfg)
	}
	s, err := redisstore.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// forContract are the settings that the contract asks for.
func forContract(c *redisstore.Config) { c.PageStats, c.FactsWait = time.Hour, 50*time.Millisecond }

func TestContractOnOneServer(t *testing.T) {
	storetest.Run(t, storetest.Full, func(t testing.TB) storetest.Store { return open(t, redistest.Single(t).URL(), forContract) })
}

func TestContractOnCluster(t *testing.T) {
	storetest.Run(t, storetest.Core, func(t testing.TB) storetest.Store { return open(t, redistest.ThreeMasters(t).URL(), forContract) })
}

func TestASlowWatcherIsToldToReadAgain(t *testing.T) {
	storetest.SlowWatcher(t, open(t, redistest.Single(t).URL(), func(c *redisstore.Config) { c.Backlog = 64 << 10 }))
}
