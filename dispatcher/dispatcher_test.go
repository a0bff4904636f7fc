package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"headcount/presence"
	"headcount/presence/presencemem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// receiver is the gateways' side of pushes.
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
	slow, fail := r.slow, r.fail[gateway]
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

// run starts a dispatcher of all buckets over s; set writes counts to s.
func run(t *testing.T, s *presencemem.Store) (r *receiver, d *Dispatcher, set func(page string, users int64)) {
	t.Helper()
	r = &receiver{counts: map[string]map[string]presence.Count{}, pushes: map[string]int{}, fail: map[string]bool{}}
	d = New(Config{Store: s, Gateways: r, Log: zerolog.Nop()})
	d.Own(upTo(presence.DefaultBuckets))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = d.Run(ctx)
	}()
	t.Cleanup(func() { stop(); <-done })
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
		if _, told := r.counts["b"]["p"]; told || len(r.counts["a"]) != 2 {
			t.Fatalf("told %+v, want each only what it is attached to", r.counts)
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
		for i := range 1000 {
			set("p", int64(i+1))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(3 * time.Second)
		r.want(t, "a", "p", 1000)
		if n := r.pushes["a"] - before; n > 5 {
			t.Fatalf("%d pushes, want conflation", n)
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

func TestLostPublicationsAreMadeGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{Backlog: 2})
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

func TestOwnChangesWhatIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{})
		r, d, set := run(t, s)
		attach(t, s, "a", "p")
		set("p", 1)
		r.want(t, "a", "p", 1)
		d.Own(nil)
		synctest.Wait()
		set("p", 2)
		r.want(t, "a", "p", 1)
		d.Own([]int{presence.Bucket("p", presence.DefaultBuckets)})
		r.want(t, "a", "p", 2)
	})
}
