package region_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/counter/region"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// redisRegion is a region in a Redis of its own, with one process.
type redisRegion struct {
	name   string
	server *redistest.Server
	home   *rowsredis.Store
	owner  *owner.Owner
	region *region.Region
	store  *region.Store
}

// openRows returns a store in a Redis, which is closed when the test ends.
func openRows(t *testing.T, server *redistest.Server, inbox string) *rowsredis.Store {
	t.Helper()
	s := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, server.URL()), Inbox: inbox})
	t.Cleanup(s.Close)

	return s
}

func (r *redisRegion) start(t *testing.T, life int, other *redisRegion) {
	t.Helper()
	name := fmt.Sprint(r.name, " ", life)
	r.home = openRows(t, r.server, "")
	peer := region.Peer{
		Name:   other.name,
		Rows:   openRows(t, other.server, ""),
		Outbox: openRows(t, other.server, r.name),
		Inbox:  openRows(t, r.server, other.name),
	}

	r.region = region.New(region.Config{
		Name: r.name, Process: name, Store: r.home, Peers: []region.Peer{peer},
		Every: 50 * time.Millisecond, Log: zerolog.New(zerolog.NewTestWriter(t)),
	})

	r.owner = owner.New(r.home, owner.Config{Name: name, Region: r.name, Shared: r.region.Shared})
	r.region.Start(r.owner)
	var all []int
	for id := range rows.Partitions {
		all = append(all, id)
	}

	if err := r.owner.Own(t.Context(), all...); err != nil {
		t.Fatal(err)
	}

	counters := call.NewStore(r.home, countertest.Everywhere{Owner: r.owner}, ordinary, call.Config{Stream: name})
	r.store = region.NewStore(counters, ordinary, []region.Peer{peer})
}

func (r *redisRegion) end() {
	r.region.Close()
	_ = r.store.Close()
	r.owner.Close()
}

func (r *redisRegion) change(t *testing.T, c counter.Change) {
	t.Helper()
	result := r.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
	if result.Err != nil {
		t.Fatalf("%s: %v", r.name, result.Err)
	}
}

// awaitTotals waits until all regions have these totals.
func awaitTotals(t *testing.T, want map[string]int64, all ...*redisRegion) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprint("all have ", want), func() bool {
		for _, r := range all {
			for key, value := range want {
				read, err := r.store.Read(t.Context(), []string{key}, "", 0)
				if err != nil || read[0].Value != value {
					return false
				}
			}
		}
		return true
	})
}

// TestServerTwoRegionsInRedis: a region has inboxes beside its rows in the same Redis. That Redis loses everything
// twice: while its owner lives, and while no process remembers anything.
func TestServerTwoRegionsInRedis(t *testing.T) {
	us := &redisRegion{name: "us", server: redistest.Start(t)}
	eu := &redisRegion{name: "eu", server: redistest.Start(t)}
	us.start(t, 1, eu)
	eu.start(t, 1, us)
	defer func() {
		us.end()
		eu.end()
	}()

	for i, r := range []*redisRegion{us, eu} {
		r.change(t, add("v", int64(i+1)))
		r.change(t, counter.Change{
			Key: "u", Rule: ordinary.Find("u"), Verb: counter.Edit, Join: []string{"ann", r.name},
		})
		r.change(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Edit, Join: []string{"ann"}})
	}
	awaitTotals(t, map[string]int64{"v": 3, "u": 3, "l": 2}, us, eu)

	us.server.Flush(t)
	us.change(t, add("v", 10))
	awaitTotals(t, map[string]int64{"v": 13, "u": 3, "l": 2}, us, eu)

	us.end()
	us.server.Flush(t)
	us.start(t, 2, eu)
	us.change(t, add("v", 100))
	awaitTotals(t, map[string]int64{"v": 113, "u": 3, "l": 1}, us, eu) // the region's set of members is lost

	eu.change(t, counter.Change{Key: "v", Rule: views, Verb: counter.Reset, Reason: "r", By: "b"})
	eu.change(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Delete})
	awaitTotals(t, map[string]int64{"v": 0, "l": 0}, us, eu)
}
