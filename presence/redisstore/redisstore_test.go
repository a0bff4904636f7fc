package redisstore_test

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
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

func TestContractOnOneServer(t *testing.T) {
	storetest.Run(t, func(t testing.TB) presence.Store { return open(t, redistest.Single(t).URL()) })
}

func TestContractOnCluster(t *testing.T) {
	storetest.Run(t, func(t testing.TB) presence.Store { return open(t, redistest.ThreeMasters(t).URL()) })
}

func TestProcessesContractOnOneServer(t *testing.T) {
	storetest.RunProcesses(t, func(t testing.TB) storetest.ProcessStore { return open(t, redistest.Single(t).URL(), quick) })
}

func TestProcessesContractOnCluster(t *testing.T) {
	storetest.RunProcesses(t, func(t testing.TB) storetest.ProcessStore { return open(t, redistest.ThreeMasters(t).URL(), quick) })
}

func remembers(cfg *redisstore.Config) { cfg.PageStats = time.Hour }

func TestMinutesContractOnOneServer(t *testing.T) {
	storetest.RunMinutes(t, func(t testing.TB) storetest.MinuteStore { return open(t, redistest.Single(t).URL(), remembers) })
}

func TestMinutesContractOnCluster(t *testing.T) {
	storetest.RunMinutes(t, func(t testing.TB) storetest.MinuteStore {
		return open(t, redistest.ThreeMasters(t).URL(), remembers)
	})
}

func TestUnreadContractOnOneServer(t *testing.T) {
	storetest.RunUnread(t, func(t testing.TB) storetest.UnreadStore { return open(t, redistest.Single(t).URL()) })
}

func TestUnreadContractOnCluster(t *testing.T) {
	storetest.RunUnread(t, func(t testing.TB) storetest.UnreadStore { return open(t, redistest.ThreeMasters(t).URL()) })
}
