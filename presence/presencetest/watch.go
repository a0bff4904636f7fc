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

// listener collects the publications that a watcher receives.
type listener struct {
	mu       sync.Mutex
	received map[presence.Topic][]presence.Update
	counts   map[string]presence.Count  // the newest of each page
	ends     map[presence.Endpoint]bool // whether each endpoint is there
	lost     map[int]int                // how many Losts each bucket had
}

func listen(t testing.TB, s presence.Store, buckets []int) *listener {
	t.Helper()
	e := &listener{
		received: map[presence.Topic][]presence.Update{}, counts: map[string]presence.Count{},
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
					t.Errorf("bucket %d published %+v", p.Bucket, u)
				}
				e.received[u.Topic] = append(e.received[u.Topic], u)
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

		// Only its context may end a watch.
		if ctx.Err() == nil {
			t.Error("Watch has ended by itself")
		}
	}()
	t.Cleanup(func() {
		stop()
		<-done // or the watch would report to a test that is over
	})

	e.until(t, "the first Lost of every bucket", func() bool { return len(e.lost) == len(buckets) })

	return e
}

// until waits until ok returns true. It holds the listener's lock while it calls ok.
func (e *listener) until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, "the watcher receives: "+what, func() bool {
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

	// A publication of another bucket would have come before the one of p.
	e.mu.Lock()
	defer e.mu.Unlock()
	for page := range e.counts {
		if presence.Bucket(page, presence.DefaultBuckets) != b {
			t.Errorf("received %q of another bucket", page)
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

// SlowWatcher tests a store that keeps at most 50 publications, or 64 KiB of them, for one watcher. The watcher is
// blocked until more was published than the store may keep. Whichever publications the store drops, a Lost must follow
// the gap.
func SlowWatcher(t *testing.T, s presence.Store) {
	complete(t, s)
	b := presence.Bucket("p", presence.DefaultBuckets)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	begun, release := make(chan struct{}), make(chan struct{})
	var counts, lost atomic.Int64 // counts of the page before the first Lost, and the number of Losts
	first := true
	go func() { // ends with ctx
		s.Watch(ctx, []int{b}, func(p presence.Publication) {
			// The first publication is a Lost. All others wait from here on.
			if first {
				first = false
				close(begun)
				<-release
				return
			}

			for _, u := range p.Updates {
				if c, ok := presence.CountOf(u); ok && c.Page == "p" && lost.Load() == 0 {
					counts.Add(1)
				}
			}
			if p.Lost {
				lost.Add(1)
			}
		})
	}()

	<-begun

	var long []string // pages of the bucket, whose long names soon fill the 64 KiB
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
	testkit.Eventually(t, "the slow watcher receives a Lost", func() bool { return lost.Load() > 0 })
	if n := counts.Load(); n >= published {
		t.Fatalf("%d of %d publications were kept: this is no slow watcher", n, published)
	}
	wantUsers(t, s, "p", published)
}
