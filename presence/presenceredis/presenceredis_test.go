package presenceredis_test

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence/presenceredis"
	"headcount/presence/presencetest"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// open returns a store that ends with the test.
func open(t testing.TB, url string, with ...func(*presenceredis.Config)) *presenceredis.Store {
	t.Helper()
	cfg := presenceredis.Config{Conn: redistest.Dial(t, url), Log: zerolog.New(zerolog.NewTestWriter(t)), Facts: presenceredis.Facts{Region: "local", Secret: "k"}}
	for _, w := range with {
		w(&cfg)
	}
	s := presenceredis.Open(cfg)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// forContract are the settings that the contract asks for.
func forContract(c *presenceredis.Config) {
	c.PageStats, c.LastSeen, c.FactsWait = time.Hour, time.Hour, 50*time.Millisecond
}

func TestServerContract(t *testing.T) {
	presencetest.Run(t, presencetest.Full, func(t testing.TB) presencetest.Store { return open(t, redistest.Single(t).URL(), forContract) })
}

func TestServerContractOnCluster(t *testing.T) {
	presencetest.Run(t, presencetest.Core, func(t testing.TB) presencetest.Store { return open(t, redistest.ThreeMasters(t).URL(), forContract) })
}

func TestServerASlowWatcherIsToldToReadAgain(t *testing.T) {
	presencetest.SlowWatcher(t, open(t, redistest.Single(t).URL(), func(c *presenceredis.Config) { c.Backlog = 64 << 10 }))
}
