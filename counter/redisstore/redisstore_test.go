package redisstore_test

import (
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/redisstore"
	"headcount/counter/storetest"
	"headcount/presence/redistest"
	"headcount/servertest"
)

func TestMain(m *testing.M) { servertest.Main(m, redistest.Stop) }

// open returns a store that ends with the test, of a region with others when that has a name.
func open(t testing.TB, url, region string) *redisstore.Store {
	t.Helper()
	s, err := redisstore.Open(redisstore.Config{URL: url, Region: region, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)})
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

// instance is two stores over servers; a cut kills the servers. After a crash another
// process goes on. The first crash and then one in every crashes also restarts a server,
// which takes seconds until a master of a Cluster is let in again.
func instance(t testing.TB, url, region string, servers []*redistest.Server, every int) storetest.Instance {
	s := open(t, url, region)
	crashes := 0
	return storetest.Instance{
		Store: s,
		Peer:  open(t, url, region),
		Crash: func(t testing.TB) counter.Store {
			if crashes%every == 0 {
				servers[crashes/every%len(servers)].Restart(t)
			}
			crashes++
			s = open(t, url, region)
			storetest.AwaitServed(t, s)
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

// The server speaks TLS alone, and the store is the user that deploy/redis.acl documents.
func TestContractOnOneServer(t *testing.T) {
	server := redistest.StartSecure(t, redistest.Durable...)
	storetest.Run(t, func(t testing.TB) storetest.Instance {
		server.Flush(t)
		return instance(t, server.URL(), "", []*redistest.Server{server}, 4)
	})
}

// The store is that of a region with others, which shares what it changes.
func TestContractOnCluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 0, redistest.Durable...)
	storetest.Run(t, func(t testing.TB) storetest.Instance {
		cluster.Flush(t)
		return instance(t, cluster.URL(), "us", cluster.Masters, 12)
	})
}

func TestCopies(t *testing.T) {
	t.Parallel()
	storetest.RunCopies(t, func(t testing.TB) storetest.CopyStore {
		s, err := redisstore.Open(redisstore.Config{URL: redistest.Start(t).URL(), Log: zerolog.Nop()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	})
}
