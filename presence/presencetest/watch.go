package presencetest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"headcount/internal/testkit"
	"headcount/presence"
)

// ear collects the publications that a watcher receives.
type ear struct {
	mu     sync.Mutex
	heard  map[presence.Topic][]presence.Update
	counts map[string]presence.Count // the newest ones
	ends   map[presence.Endpoint]bool
	lost   map[int]int
}

func listen(t testing.TB, s presence.Store, buckets []int) *ear {
	t.Helper()
	e := &ear{
		heard: map[presence.Topic][]presence.Update{}, counts: map[string]presence.Count{},
		ends: map[presence.Endpoint]bool{}, lost: map[int]int{},
	}

	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Watch(ctx, buckets, func(p presence.Publication) {
			e.mu.Lock()
			defer e.mu.Unlock()

			for _, u := range p.Updates {
				if u.Topic.Bucket(presence.DefaultBuckets) != p.Bucket || u.Check() != nil {
					t.Errorf("bucket %d told %+v", p.Bucket, u)
				}
				e.heard[u.Topic] = append(e.heard[u.Topic], u)
				c, ok := presence.CountOf(u)
				// Counts may arrive twice or late, so the newest version wins.
				if old, known := e.counts[c.Page]; ok && (!known || c.Newer(old)) {
					e.counts[c.Page] = c
				}
			}

			for _, ep := range p.Endpoints {
				e.ends[presence.Endpoint{Topic: ep.Topic, Gateway: ep.Gateway}] = !ep.Gone
			}

			if p.Lost {
				e.lost[p.Bucket]++
			}
		})

		// A watch lasts until it is told to end, whatever the store does.
		if ctx.Err() == nil {
			t.Error("Watch has ended by itself")
		}
	}()
	t.Cleanup(func() {
		stop()
		// Otherwise the watch would report to a test that is over.
		<-done
	})

	e.until(t, "the first Lost of every bucket", func() bool { return len(e.lost) == len(buckets) })

	return e
}

// until waits until ok returns true. It calls ok with the ear's lock held.
func (e *ear) until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, "the watcher is told: "+what, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return ok()
	})
}

func allBuckets() []int { return upTo(presence.DefaultBuckets) }

func watchBuckets(t *testing.T, s Store) {
	b := presence.Bucket("p", presence.DefaultBuckets)
	e := listen(t, s, []int{b})
	w := claim(t, s, 3)

	for i := range 200 {
		w.set(fmt.Sprint("other", i), 1)
	}

	w.set("p", 1)
	e.until(t, "p", func() bool { return e.counts["p"].Users == 1 })

	// The publications of other buckets came before the one of p, if at all.
	e.mu.Lock()
	defer e.mu.Unlock()
	for page := range e.counts {
		if presence.Bucket(page, presence.DefaultBuckets) != b {
			t.Errorf("told of %q of another bucket", page)
		}
	}
}

func concurrent(t *testing.T, s Store) {
	const partitions, rounds = 8, 50
	var wg sync.WaitGroup
	for p := range partitions {
		w := claim(t, s, p)
		wg.Go(func() {
			for i := range rounds {
				// All partitions write to one page, and each to a page of its own.
				change := w.change(nil, presence.PageUsers{Page: "p", Users: int64(i)},
					presence.PageUsers{Page: fmt.Sprint(p), Users: 1})
				if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
					t.Error(o[0].Err)
				}
			}
		})
	}

	wg.Wait()
	wantUsers(t, s, "p", partitions*(rounds-1))
}

// SlowWatcher tests a store that keeps at most 50 publications, or 64 KiB of them, for one watcher. It does not check
// which publications are dropped, but that a Lost follows each gap. The watcher is blocked until more was published
// than the store may keep. So the last publications are lost, and only a Lost can make up for them.
func SlowWatcher(t *testing.T, s presence.Store) {
	complete(t, s)

	b := presence.Bucket("p", presence.DefaultBuckets)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	begun, release := make(chan struct{}), make(chan struct{})
	var told, lost atomic.Int64 // counts of the page before the first Lost, and the number of Losts
	first := true
	go func() { // ends with ctx
		s.Watch(ctx, []int{b}, func(p presence.Publication) {
			// The first publication says to read. From here on all others wait.
			if first {
				first = false
				close(begun)
				<-release
				return
			}

			for _, u := range p.Updates {
				if c, ok := presence.CountOf(u); ok && c.Page == "p" && lost.Load() == 0 {
					told.Add(1)
				}
			}
			if p.Lost {
				lost.Add(1)
			}
		})
	}()

	<-begun

	// Long names fill the 64 KiB soon.
	var long []string // pages of the bucket, with names as long as they may be
	for i := 0; len(long) < 100; i++ {
		if page := fmt.Sprintf("%0128d", i); presence.Bucket(page, presence.DefaultBuckets) == b {
			long = append(long, page)
		}
	}

	w := claim(t, s, 3)
	published := int64(0)
	for range 10 { // together more than 50, and more than 64 KiB
		w.setMany(long, published)
		for range 10 {
			published++
			w.set("p", published)
		}
	}

	close(release)
	testkit.Eventually(t, "the slow watcher is told to read again", func() bool { return lost.Load() > 0 })
	if n := told.Load(); n >= published {
		t.Fatalf("%d of %d publications were kept: this is no slow watcher", n, published)
	}
	wantUsers(t, s, "p", published)
}
