package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presencemem"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// receiver stands for the gateways that receive pushes. It keeps the newest counts.
type receiver struct {
	mu     sync.Mutex
	counts map[string]map[string]presence.Count // by gateway and page
	pushes map[string]int
	fail   map[string]bool
	slow   time.Duration
}

func (*receiver) Ended(string) bool { return false }

func (r *receiver) PushUpdates(ctx context.Context, gateway string, updates []presence.Update) error {
	r.mu.Lock()
	slow := r.slow
	fail := r.fail[gateway]
	r.mu.Unlock()

	time.Sleep(slow)
	if fail {
		return errors.New("no answer")
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.pushes[gateway]++
	for _, u := range updates {
		c, _ := presence.CountOf(u)
		if r.counts[gateway] == nil {
			r.counts[gateway] = map[string]presence.Count{}
		}
		r.counts[gateway][c.Page] = c
	}

	return ctx.Err()
}

func (r *receiver) want(t *testing.T, gateway, page string, users int64) {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := r.counts[gateway][page]; !ok || c.Users != users {
		t.Fatalf("%s has %+v of %q, want %d", gateway, c, page, users)
	}
}

// run starts a dispatcher of all buckets over s. The returned set writes counts to s.
func run(
	t *testing.T, s presence.Store, with ...func(*Config),
) (r *receiver, d *Dispatcher, set func(page string, users int64)) {
	t.Helper()
	r = &receiver{counts: map[string]map[string]presence.Count{}, pushes: map[string]int{}, fail: map[string]bool{}}
	cfg := Config{Store: s, Gateways: r, Log: zerolog.Nop()}
	for _, w := range with {
		w(&cfg)
	}

	d = New(cfg)
	d.Own(upTo(presence.DefaultBuckets))

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = d.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})

	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}

	seq := uint64(0)
	synctest.Wait()
	return r, d, func(page string, users int64) {
		t.Helper()
		seq++
		o := s.Write(t.Context(), []presence.Change{{
			Claim: claims[0], Sequence: seq, Counts: []presence.PageUsers{{Page: page, Users: users}}, Complete: true,
		}})
		if o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
}

func attach(t *testing.T, s *presencemem.Store, gateway string, pages ...string) {
	t.Helper()
	if _, err := s.Attach(t.Context(), gateway, presence.CountTopics(pages)); err != nil {
		t.Fatal(err)
	}
}

func TestCountsReachTheGatewaysThatWantThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		attach(t, s, "before", "p")
		r, _, set := run(t, s)

		attach(t, s, "a", "p", "q")
		attach(t, s, "b", "q")

		set("p", 1)
		set("q", 2)
		set("r", 3)

		r.want(t, "before", "p", 1)
		r.want(t, "a", "p", 1)
		r.want(t, "a", "q", 2)
		r.want(t, "b", "q", 2)
		if _, pushed := r.counts["b"]["p"]; pushed || len(r.counts["a"]) != 2 {
			t.Fatalf("the gateways received %+v, want each only the topics that it is attached to", r.counts)
		}

		if err := s.Detach(t.Context(), "a", presence.CountTopics([]string{"p"})); err != nil {
			t.Fatal(err)
		}

		set("p", 5)
		r.want(t, "before", "p", 5)
		r.want(t, "a", "p", 1)
	})
}

func TestBusyGatewayGetsTheNewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		r, _, set := run(t, s)
		attach(t, s, "a", "p")

		r.mu.Lock()
		r.slow = time.Second
		r.mu.Unlock()
		synctest.Wait()
		before := r.pushes["a"]

		// In a second of changes the slow gateway only has time for a few pushes.
		for i := range 1000 {
			set("p", int64(i+1))
			time.Sleep(time.Millisecond)
		}

		time.Sleep(3 * time.Second)
		r.want(t, "a", "p", 1000)
		if n := r.pushes["a"] - before; n > 5 {
			t.Fatalf("%d pushes to the slow gateway, want 5 at most", n)
		}
	})
}

func TestGatewayThatFailsIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		r, _, set := run(t, s)
		attach(t, s, "a", "p")
		attach(t, s, "b", "p")

		r.mu.Lock()
		r.fail["a"] = true
		r.mu.Unlock()

		// The slow gateway does not delay the other one.
		for i := range 10 {
			set("p", int64(i+1))
			time.Sleep(time.Second)
		}
		r.want(t, "b", "p", 10)

		r.mu.Lock()
		r.fail["a"] = false
		r.mu.Unlock()

		time.Sleep(3 * time.Second)
		r.want(t, "a", "p", 10)
	})
}

func TestLostPublicationsAreReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{Backlog: 2}) // a backlog too small for the changes below
		var pages []string
		for i := range 200 {
			pages = append(pages, fmt.Sprint("p", i))
		}

		r, _, set := run(t, s)
		attach(t, s, "a", pages...)

		for n := range 5 {
			for _, page := range pages {
				set(page, int64(n+1))
			}
		}

		for _, page := range pages {
			r.want(t, "a", page, 5)
		}
	})
}

// broken is a store in which some buckets cannot be read.
type broken struct {
	*presencemem.Store
	mu    sync.Mutex
	fails map[int]bool  // the broken buckets; true if they fail at present
	slow  time.Duration // how long a read of a broken bucket takes
	reads map[int]int   // how many reads have begun, by bucket
}

func newBroken(buckets ...int) *broken {
	s := &broken{Store: presencemem.New(presencemem.Config{}), fails: map[int]bool{}, reads: map[int]int{}}
	for _, b := range buckets {
		s.fails[b] = true
	}

	return s
}

func (s *broken) Attached(ctx context.Context, bucket int) ([]presence.Endpoint, error) {
	s.mu.Lock()
	s.reads[bucket]++
	fails, broken := s.fails[bucket]
	slow := s.slow
	s.mu.Unlock()

	endpoints, err := s.Store.Attached(ctx, bucket)
	if broken {
		time.Sleep(slow)
	}

	if fails {
		return nil, presence.ErrUnavailable
	}

	return endpoints, err
}

// set changes whether the broken buckets fail and how long their reads take, and forgets the reads so far.
func (s *broken) set(fail bool, slow time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow, s.reads = slow, map[int]int{}
	for b := range s.fails {
		s.fails[b] = fail
	}
}

func (s *broken) readsOf(bucket int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads[bucket]
}

// pageIn returns a page of the bucket.
func pageIn(bucket int) string {
	for i := 0; ; i++ {
		page := fmt.Sprint("p", i)
		if presence.Bucket(page, presence.DefaultBuckets) == bucket {
			return page
		}
	}
}

func TestBucketThatCannotBeReadDoesNotDelayOthers(t *testing.T) {
	for name, slow := range map[string]time.Duration{
		"it fails at once": 0, "its server does not answer": 5 * time.Second,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newBroken(9)
				one, nine := pageIn(1), pageIn(9)
				attach(t, s.Store, "a", one, nine)

				r, _, set := run(t, s)
				time.Sleep(time.Second)

				s.set(true, slow)
				for i := range 20 {
					set(one, int64(i+1))
					r.want(t, "a", one, int64(i+1))
					time.Sleep(700 * time.Millisecond)
				}

				if n := s.readsOf(1); n != 0 {
					t.Errorf("bucket 1 was read again %d times, want none", n)
				}
				if n := s.readsOf(9); n > 24 {
					t.Errorf("bucket 9 was read %d times in %s", n, 14*time.Second)
				}

				// Publications of the broken bucket are still handled.
				attach(t, s.Store, "b", nine)
				attach(t, s.Store, "c", nine)
				set(nine, 1)
				r.want(t, "b", nine, 1)

				if _, known := r.counts["a"][nine]; known {
					t.Error("the dispatcher knows an endpoint of a bucket that it never read")
				}

				// From now on the bucket can be read.
				s.set(false, 50*time.Millisecond)
				time.Sleep(slow + 3*time.Second)
				r.want(t, "a", nine, 1)

				set(nine, 2)
				for _, gateway := range []string{"a", "b", "c"} {
					r.want(t, gateway, nine, 2)
				}

				if n := s.readsOf(9); n != 2 {
					t.Errorf("bucket 9 was read %d times, want 2: outside the turn, and in it", n)
				}
			})
		})
	}
}

// Endpoints that change while a lost bucket is being read are neither lost nor resurrected.
func TestEndpointsChangeWhileALostBucketIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBroken(9)
		nine := pageIn(9)
		attach(t, s.Store, "old", nine)
		r, _, set := run(t, s)

		s.set(false, time.Second)

		// Gateways attach while the bucket is read, and every second one detaches again.
		for i := range 40 { // for 4 s, longer than the pause and two reads
			attach(t, s.Store, fmt.Sprint("g", i), nine)
			time.Sleep(100 * time.Millisecond)
			if i%2 == 0 {
				err := s.Detach(t.Context(), fmt.Sprint("g", i), presence.CountTopics([]string{nine}))
				if err != nil {
					t.Fatal(err)
				}
			}
		}

		if n := s.readsOf(9); n != 2 {
			t.Fatalf("bucket 9 was read %d times, want 2", n)
		}

		set(nine, 7)
		r.want(t, "old", nine, 7)

		for i := range 40 {
			gateway := fmt.Sprint("g", i)
			if i%2 == 1 {
				r.want(t, gateway, nine, 7)
			} else if c := r.counts[gateway][nine]; c.Users == 7 {
				t.Fatalf("%s was detached, and yet received %+v", gateway, c)
			}
		}
	})
}

func TestAllBucketsAreReadAfterAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := upTo(presence.DefaultBuckets)
		s := newBroken(all...)
		for _, b := range all {
			attach(t, s.Store, "a", pageIn(b))
		}

		r, d, set := run(t, s)
		time.Sleep(10 * time.Second)

		// Broken buckets are tried again, but not without pauses.
		for _, b := range all {
			if n := s.readsOf(b); n < 5 || n > 20 {
				t.Errorf("bucket %d was read %d times in 10s", b, n)
			}
			set(pageIn(b), 3)
		}

		s.set(false, 0)
		time.Sleep(2 * time.Second)

		for _, b := range all {
			r.want(t, "a", pageIn(b), 3)
		}

		s.set(true, time.Second)
		d.Own(all[:9]) // the test ends while these buckets are being read
		time.Sleep(5 * time.Second)
	})
}

func TestOwnChangesWhatIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		r, d, set := run(t, s)

		attach(t, s, "a", "p")
		set("p", 1)
		r.want(t, "a", "p", 1)

		// Without the bucket nothing is pushed. When it is owned again, the current count is.
		d.Own(nil)
		synctest.Wait()
		set("p", 2)
		r.want(t, "a", "p", 1)

		d.Own([]int{presence.Bucket("p", presence.DefaultBuckets)})
		r.want(t, "a", "p", 2)
	})
}

// After a standstill a process sends no old counts: the store may have lost its data meanwhile, so the newest known
// count may be one from before the loss. The dispatcher reads all buckets again.
func TestNothingIsSentFromBeforeAStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		var stood atomic.Int64 // how long the process has stood still in all
		elapsed := func() time.Duration { return time.Duration(time.Now().UnixNano() + stood.Load()) }
		r, d, set := run(t, s, func(c *Config) { c.Elapsed = elapsed })

		attach(t, s, "a", "p")
		set("p", 3)
		r.want(t, "a", "p", 3)

		// A publication that was in flight during the standstill arrives.
		stood.Add(int64(10 * time.Second))
		old := presence.Count{Page: "p", Users: 9, Version: presence.Version{Incarnation: 1 << 50, Sequence: 1}}
		bucket := presence.Bucket("p", presence.DefaultBuckets)
		d.publication(t.Context(), nil, presence.Publication{Bucket: bucket, Updates: []presence.Update{old.Update()}})
		r.want(t, "a", "p", 3)

		set("p", 5) // this publication is dropped as well
		time.Sleep(time.Second)
		r.want(t, "a", "p", 5)

		set("p", 6)
		r.want(t, "a", "p", 6)
	})
}

// standing is a store with which the process stands still after it has read updates.
type standing struct {
	*presencemem.Store
	stand atomic.Pointer[func()] // nil: the process does not stand still
}

func (s *standing) Updates(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	updates, err := s.Store.Updates(ctx, topics)
	if stand := s.stand.Swap(nil); stand != nil {
		(*stand)()
	}

	return updates, err
}

// watcher is a Watcher that keeps the counts that it has received.
type watcher struct {
	mu     sync.Mutex
	counts []int64
}

func (*watcher) Serve([]int) {}
func (*watcher) Lost()       {}

func (w *watcher) Received(updates []presence.Update) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, u := range updates {
		c, _ := presence.CountOf(u)
		w.counts = append(w.counts, c.Users)
	}
}

// A process stands still while it reads a bucket. Watchers do not receive what was read before: they could not tell it
// from what is true.
func TestWatchersReceiveNothingFromBeforeAStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &standing{Store: presencemem.New(presencemem.Config{})}
		var stood atomic.Int64
		elapsed := func() time.Duration { return time.Duration(time.Now().UnixNano() + stood.Load()) }
		w := &watcher{}
		_, d, set := run(t, s, func(c *Config) {
			c.Elapsed = elapsed
			c.Watchers = []Watcher{w}
		})

		attach(t, s.Store, "a", "p")
		set("p", 3)
		d.Own(nil)
		time.Sleep(time.Second)

		stand := func() {
			stood.Add(int64(10 * time.Second))
			set("p", 5)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.counts = nil
		}
		s.stand.Store(&stand)
		d.Own([]int{presence.Bucket("p", presence.DefaultBuckets)})
		time.Sleep(time.Second)

		w.mu.Lock()
		defer w.mu.Unlock()
		if slices.Contains(w.counts, 3) || !slices.Contains(w.counts, 5) {
			t.Errorf("after the standstill the watcher received %v, want only 5", w.counts)
		}
	})
}

// A process stands still again before it serves its buckets again. Afterwards it serves them.
func TestStandstillsThatFollowEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		var stood atomic.Int64
		var standsStill atomic.Bool
		elapsed := func() time.Duration {
			if standsStill.Load() {
				stood.Add(int64(10 * time.Second))
			}

			return time.Duration(time.Now().UnixNano() + stood.Load())
		}

		r, _, set := run(t, s, func(c *Config) { c.Elapsed = elapsed })
		attach(t, s, "a", "p")

		standsStill.Store(true) // at each read of the clock
		time.Sleep(time.Second)
		standsStill.Store(false)
		time.Sleep(time.Second)

		set("p", 5)
		r.want(t, "a", "p", 5)
	})
}
