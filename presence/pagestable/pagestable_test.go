package pagestable

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence"
)

// world has a store of presence, and a table in memory that obeys the contract of rows.
type world struct {
	*Table
	log strings.Builder

	mu         sync.Mutex
	pages      map[string]presence.Count // of presence
	stale      bool
	table      map[string]presence.Count
	statements []int // number of rows in each Put
	fails      error // error of each call
	makes      bool  // a failing Put takes effect all the same
	slow       time.Duration
	grants     int
}

var errLocked = errors.New("locked")

// inWorld runs f in a bubble. The process serves all buckets.
func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{pages: map[string]presence.Count{}, table: map[string]presence.Count{}}
		log := zerolog.New(zerolog.SyncWriter(&w.log))
		cfg := Config{
			Patterns: []string{"blog/*", "front"}, Pages: w, Registerer: prometheus.NewRegistry(), Log: log,
		}
		w.Table = newTable(cfg, w)
		w.serveAll()

		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { w.Run(ctx) })
		defer run.Wait()
		defer cancel()
		f(t, w)
	})
}

func (w *world) serveAll() {
	var all []int
	for b := range presence.DefaultBuckets {
		all = append(all, b)
	}
	w.Serve(all)
}

// count makes a count of a page at a version.
func count(page string, users int64, version uint64) presence.Count {
	at := presence.Version{Incarnation: 1, Sequence: version}
	return presence.Count{Page: page, Users: users, Updated: time.Unix(1, 0), Version: at}
}

// has sets what presence has; publish also publishes it.
func (w *world) has(all ...presence.Count) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range all {
		w.pages[c.Page] = c
	}
}

func (w *world) publish(all ...presence.Count) {
	w.has(all...)
	for _, c := range all {
		w.Received([]presence.Update{c.Update()})
	}
}

// set changes w while no call uses it.
func (w *world) set(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// is returns the table as "page=users@sequence …".
func (w *world) is() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, page := range slices.Sorted(maps.Keys(w.table)) {
		c := w.table[page]
		all = append(all, fmt.Sprintf("%s=%d@%d", page, c.Users, c.Version.Sequence))
	}
	return strings.Join(all, " ")
}

// settle waits for d, and then until no call is under way: then the test may read what they wrote.
func settle(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (w *world) want(t *testing.T, after time.Duration, want string) {
	t.Helper()
	settle(after)
	if is := w.is(); is != want {
		t.Errorf("the table is %q, want %q", is, want)
	}
}

func (w *world) Counts(_ context.Context, names []string) ([]presence.Count, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	counts := make([]presence.Count, len(names))
	for i, name := range names {
		counts[i] = w.pages[name]
		counts[i].Page = name
		counts[i].Stale = w.stale
	}
	return counts, nil
}

func (w *world) Pages(_ context.Context, fn func([]string)) error {
	w.mu.Lock()
	names := slices.Collect(maps.Keys(w.pages))
	w.mu.Unlock()
	fn(names)
	return nil
}

func (w *world) Put(ctx context.Context, counts []presence.Count) error {
	time.Sleep(w.slow)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.statements = append(w.statements, len(counts))
	if w.fails != nil && !w.makes {
		return w.fails
	}
	for _, c := range counts {
		if old, ok := w.table[c.Page]; !ok || c.Newer(old) {
			w.table[c.Page] = c
		}
	}
	return w.fails
}

func (w *world) Occupied(_ context.Context, after string, limit int) (some []presence.Count, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, page := range slices.Sorted(maps.Keys(w.table)) {
		if page > after && w.table[page].Users > 0 && len(some) < limit {
			some = append(some, w.table[page])
		}
	}
	return some, w.fails
}

func (w *world) Drop(_ context.Context, counts []presence.Count) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range counts {
		if w.table[c.Page].Version == c.Version {
			delete(w.table, c.Page)
		}
	}
	return w.fails
}

func (w *world) Sweep(context.Context) error { return w.fails }
func (w *world) Close()                      {}

func (w *world) Grant(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.grants++
	return w.fails
}

func TestOneStatementASecond(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.Serve(nil) // no bucket, so no comparison
		for n := range uint64(50) {
			for page := range 40 {
				w.publish(count(fmt.Sprint("blog/", page), int64(n+1), n+1))
			}

			settle(10 * time.Millisecond)
		}

		settle(time.Second)
		if !slices.Equal(w.statements, []int{40}) || w.table["blog/7"].Users != 50 {
			t.Errorf("the statements have %v rows, and the row is %+v; want one of 40, and 50 users",
				w.statements, w.table["blog/7"])
		}

		settle(time.Minute)
		if len(w.statements) != 1 || w.lag() != 0 {
			t.Errorf("%d statements without a change, want none; lag %v", len(w.statements)-1, w.lag())
		}
	})
}

func TestOnlyPagesOfThePatterns(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		shop := presence.SiteOf("shop").Qualify("blog/2")
		w.publish(count("blog/1", 1, 1), count("front", 2, 1), count("front/2", 3, 1), count("*", 4, 1),
			count(presence.SiteOf("shop").Qualify("*"), 5, 1), count(shop, 6, 1))
		w.want(t, 2*time.Second, shop+"=6@1 blog/1=1@1 front=2@1")
	})
}

func TestAnOlderCountReplacesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.publish(count("blog/1", 5, 5), count("blog/1", 4, 4))
		w.want(t, 2*time.Second, "blog/1=5@5")
		w.publish(count("blog/1", 3, 3))
		w.want(t, 2*time.Second, "blog/1=5@5")
		w.want(t, 2*time.Minute, "blog/1=5@5") // nor does a comparison with presence
	})
}

// TestAStatementThatFails: a failed statement is repeated with the newest counts, also if it took effect without an
// answer.
func TestAStatementThatFails(t *testing.T) {
	for _, made := range []bool{false, true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.set(func() { w.fails, w.makes = errLocked, made })
			w.publish(count("blog/1", 1, 1))
			settle(20 * time.Second)
			w.publish(count("blog/1", 7, 2), count("blog/2", 1, 1))
			settle(time.Second)
			if lag := w.lag(); lag < 20 || lag > 22 {
				t.Errorf("the table is %v seconds behind, want 21", lag)
			}

			w.set(func() { w.fails = nil })
			w.want(t, time.Second, "blog/1=7@2 blog/2=1@1")
			if lag := w.lag(); lag != 0 {
				t.Errorf("the table is %v seconds behind, want 0", lag)
			}

			settle(10 * time.Second)
			bad := strings.Count(w.log.String(), "headcount_pages in PostgreSQL cannot be used")
			good := strings.Count(w.log.String(), "headcount_pages in PostgreSQL works again")
			if bad != 1 || good != 1 {
				t.Errorf("the log has %d lines about the outage and %d about its end, want 1 and 1:\n%s",
					bad, good, &w.log)
			}
		})
	}
}

// TestManyPages: the counts that have waited longest are written first, at most 10,000 a second, and fewer after a slow
// statement.
func TestManyPages(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.Serve(nil) // no bucket, so no comparison
		for page := range 25_000 {
			w.publish(count(fmt.Sprint("blog/", page), 1, 1))
		}

		w.set(func() { w.fails = errLocked })
		settle(2*time.Second + time.Millisecond)
		w.set(func() { w.fails = nil })
		w.publish(count("front", 1, 1))
		settle(3 * time.Second)
		if want := []int{10_000, 10_000, 10_000, 10_000, 5_001}; !slices.Equal(w.statements, want) {
			t.Errorf("the statements have %v rows, want %v", w.statements, want)
		}

		w.set(func() { w.slow, w.statements, w.fails = 5*time.Second, nil, errLocked })
		for page := range 25_000 {
			w.publish(count(fmt.Sprint("blog/", page), 2, 2))
		}

		settle(17 * time.Second)
		w.set(func() { w.slow, w.fails = 0, nil })
		settle(17 * time.Second)
		want := []int{10_000, 5_000, 2_500, 1_250, 625, 1_250, 2_500, 5_000, 10_000, 4_375}
		if !slices.Equal(w.statements, want) {
			t.Errorf("the statements have %v rows, want %v", w.statements, want)
		}
		if len(w.table) != 25_001 || w.table["blog/7"].Users != 2 {
			t.Errorf("the table has %d rows, want 25,001 with the newest counts", len(w.table))
		}
	})
}

// TestTooManyPages: counts beyond the bound are dropped, and a comparison writes them later.
func TestTooManyPages(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.set(func() { w.fails = errLocked })
		for page := range maxWaiting + 10 {
			w.publish(count(fmt.Sprint("blog/", page), 1, 1))
		}

		if n := len(w.waiting); n != maxWaiting {
			t.Errorf("%d pages wait, want the bound", n)
		}

		w.set(func() { w.fails = nil })
		settle(time.Minute)
		if n := len(w.table); n != maxWaiting+10 {
			t.Errorf("the table has %d rows, want all", n)
		}
	})
}

// TestASlowStatement: counts that come during a statement are written by the next one.
func TestASlowStatement(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.Serve(nil)
		w.slow = 2500 * time.Millisecond
		w.publish(count("blog/1", 1, 1))
		settle(2 * time.Second)
		w.publish(count("blog/1", 2, 2), count("blog/2", 1, 1))
		w.want(t, 2*time.Second, "blog/1=1@1")
		w.want(t, 3*time.Second, "blog/1=2@2 blog/2=1@1")
		if len(w.statements) != 2 {
			t.Errorf("the statements have %v rows", w.statements)
		}
	})
}

// TestWhatWasMissed: missed publications are found at once when the feed reports a loss, and otherwise within a minute.
func TestWhatWasMissed(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.publish(count("blog/1", 3, 3), count("blog/2", 1, 1), count("blog/3", 2, 2))
		settle(10 * time.Second)
		w.has(count("blog/1", 0, 4), count("blog/4", 4, 1), count("shop/1", 1, 1))
		w.Lost()
		w.want(t, 3*time.Second, "blog/1=0@4 blog/2=1@1 blog/3=2@2 blog/4=4@1")

		w.has(count("blog/2", 5, 9))
		w.set(func() { w.table["blog/3"] = count("blog/3", 1, 1) }) // as if PostgreSQL had lost a commit
		w.want(t, 63*time.Second, "blog/1=0@4 blog/2=5@9 blog/3=2@2 blog/4=4@1")
	})
}

// TestRowsOfUnknownPages: rows of pages that presence does not know, or that no pattern fits, are deleted. Those of
// other owners stay.
func TestRowsOfUnknownPages(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		served := presence.Bucket("blog/1", presence.DefaultBuckets)
		if presence.Bucket("blog/2", presence.DefaultBuckets) == served {
			t.Fatal("blog/2 must not be in the served bucket: choose other pages")
		}

		w.Serve([]int{served})
		var old string // a page of the served bucket
		for n := 0; old == ""; n++ {
			if name := fmt.Sprint("shop/", n); presence.Bucket(name, presence.DefaultBuckets) == served {
				old = name
			}
		}

		w.has(count(old, 1, 1))
		w.set(func() {
			for _, c := range []presence.Count{count("blog/1", 3, 3), count("blog/2", 3, 3), count(old, 1, 1)} {
				w.table[c.Page] = c
			}
		})

		w.want(t, 2*time.Second, "blog/2=3@3")
	})
}

// TestStaleCounts: a stale count may lack users, so it is not written, and no row is deleted because of it.
func TestStaleCounts(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.set(func() { w.table["blog/0"] = count("blog/0", 9, 9) })
		w.publish(count("blog/1", 3, 3))
		w.set(func() { w.stale = true })
		part := count("blog/1", 1, 4)
		part.Stale = true
		w.publish(part)
		w.want(t, 10*time.Second, "blog/0=9@9 blog/1=3@3")
		w.set(func() { w.stale = false })
		w.has(count("blog/1", 3, 5))
		w.want(t, 7*time.Second, "blog/1=3@5")
	})
}

// TestAfterARestart: after a restart nothing is compared until the users had time to come back.
func TestAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{pages: map[string]presence.Count{}, table: map[string]presence.Count{}}
		w.table["blog/1"] = count("blog/1", 3, 3)
		w.table["blog/2"] = count("blog/2", 3, 3)
		w.Table = newTable(Config{
			Patterns: []string{"*"}, Pages: w, ComeBack: 15 * time.Second, Registerer: prometheus.NewRegistry(),
		}, w)
		w.serveAll()
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { w.Run(ctx) })
		defer run.Wait()
		defer cancel()

		w.want(t, 10*time.Second, "blog/1=3@3 blog/2=3@3")
		back := count("blog/1", 2, 1)
		back.Version.Incarnation = 2
		w.publish(back)
		w.want(t, 2*time.Second, "blog/1=2@1 blog/2=3@3")
		w.want(t, 5*time.Second, "blog/1=2@1")
	})
}

func TestGrantIsMadeOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.set(func() { w.fails = errLocked })
		settle(3*time.Second + time.Millisecond)
		w.set(func() { w.fails = nil })
		settle(time.Minute)
		if w.grants != 4 {
			t.Errorf("the rights were set %d times", w.grants)
		}
	})
}
