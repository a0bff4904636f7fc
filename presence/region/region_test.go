package region

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence/pncounter"
	"headcount/presence/presencetest"
)

// store is this region's store. It has one bucket, of whose log only the length matters.
type store struct {
	mu        sync.Mutex
	end       uint64
	partial   bool
	away      bool
	greetedAt map[string]string
	out       []string
	applied   [][]string // the argument out of each ApplyPeers
	begun     int
	log       uint64
}

var errAway = errors.New("away")

func (s *store) change() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end++
}

func (s *store) Outgoing(_ context.Context, at []pncounter.Position, limit int) ([]pncounter.Batch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, errAway
	}

	all := make([]pncounter.Batch, len(at))
	for i, p := range at {
		b := pncounter.Batch{
			Region: "us", Bucket: p.Bucket, Log: s.log, From: p.Cursor, To: s.end, Complete: true, Partial: s.partial,
		}

		if p.Log != s.log {
			b.From = 0
		}

		if n := uint64(limit); b.To-b.From > n {
			b.To = b.From + n
			b.Complete = false
			b.More = true
		}

		b.Pages = make([]pncounter.PagePair, b.To-b.From)
		all[i] = b
	}

	return all, nil
}

func (s *store) BeginLogs(context.Context, []int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun++
	s.log = 1
	return nil
}

func (s *store) Raise(_ context.Context, _ int, high uint64, _ []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = max(s.log, high+1)
	return nil
}

func (s *store) Regions(context.Context) (pncounter.Regions, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return pncounter.Regions{}, errAway
	}

	greetedAt := map[string]string{}
	for name, word := range s.greetedAt {
		greetedAt[name] = word
	}

	return pncounter.Regions{Identity: "me", Words: greetedAt, Out: slices.Clone(s.out)}, nil
}

func (s *store) Identify(_ context.Context, id string) (string, error) { return id, nil }

func (s *store) DecideOut(_ context.Context, out []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out = slices.Clone(out)
	return nil
}

func (s *store) ApplyPeers(_ context.Context, _ []int, _, out []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applied = append(s.applied, slices.Clone(out))
	return nil
}

func (s *store) Sweep(context.Context, int, int) (int, error) { return 0, nil }

func (s *store) hear(name, word string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.greetedAt == nil {
		s.greetedAt = map[string]string{}
	}
	s.greetedAt[name] = word
}

func (s *store) lastApplied() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.applied[len(s.applied)-1]
}

func (s *store) leftOut() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.out)
}

// remote is a peer with a copy of one bucket.
type remote struct {
	mu     sync.Mutex
	copy   presencetest.Copy
	delay  time.Duration
	err    error // of every call
	hello  error
	merges []time.Time // times of merges that changed something
	sizes  []int
	greets int
}

func (r *remote) call() error {
	r.mu.Lock()
	delay, err := r.delay, r.err
	r.mu.Unlock()

	time.Sleep(delay)
	return err
}

func (r *remote) Hello(context.Context, string) error {
	if err := r.call(); err != nil {
		return err
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.greets++
	return r.hello
}

func (r *remote) Positions(_ context.Context, buckets []int) ([]pncounter.Position, error) {
	if err := r.call(); err != nil {
		return nil, err
	}
	r.mu.Lock()

	defer r.mu.Unlock()

	all := make([]pncounter.Position, len(buckets))
	for i, b := range buckets {
		all[i] = pncounter.Position{Bucket: b, Log: r.copy.Log, Cursor: r.copy.Cursor, Done: r.copy.Done}
	}

	return all, nil
}

func (r *remote) Merge(_ context.Context, batches []pncounter.Batch) ([]pncounter.Ack, error) {
	if err := r.call(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	acks := make([]pncounter.Ack, len(batches))
	for i, b := range batches {
		if b.To > r.copy.Cursor {
			r.merges = append(r.merges, time.Now())
			r.sizes = append(r.sizes, len(b.Pages))
		}
		acks[i] = r.copy.Merge(b)
	}

	return acks, nil
}

func (r *remote) cursor() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.copy.Cursor
}

// with runs a replicator with these peers, in a bubble, until fn returns.
func with(t *testing.T, s Local, stale time.Duration, peers map[string]*remote, fn func(r *Replicator)) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Local: s, StaleAfter: stale, Log: zerolog.Nop()}
		for name, p := range peers {
			cfg.Peers = append(cfg.Peers, Peer{name, p})
		}

		r := New(cfg)
		r.Own([]int{0})

		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = r.Run(ctx)
		}()

		fn(r)

		cancel()
		<-done
	})
}

func TestALoneChangeGoesAtOnceAndManyAreOne(t *testing.T) {
	s, eu := &store{log: 1}, &remote{delay: time.Millisecond}
	with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
		time.Sleep(10 * time.Second) // after a quiet time nothing delays the next change

		at := time.Now()
		s.change()
		r.Changed(0)
		time.Sleep(10 * time.Millisecond)
		if n := eu.cursor(); n != 1 {
			t.Fatalf("after 10 ms the peer has position %d", n)
		}

		eu.mu.Lock()
		eu.merges = nil
		eu.mu.Unlock()

		// With a change every millisecond the rounds are 200 ms apart, and each sends all that has gathered.
		for range 1000 {
			s.change()
			r.Changed(0)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(300 * time.Millisecond)
		if n := eu.cursor(); n != 1001 {
			t.Errorf("the peer has position %d, want all changes", n)
		}

		synctest.Wait()
		eu.mu.Lock()
		defer eu.mu.Unlock()
		if n := len(eu.merges); n < 4 || n > 8 {
			t.Errorf("%d rounds in a second, at %v", n, eu.merges)
		}
		for i := 1; i < len(eu.merges); i++ {
			if gap := eu.merges[i].Sub(eu.merges[i-1]); gap < 190*time.Millisecond {
				t.Errorf("two rounds are only %s apart, %s after the first", gap, eu.merges[i].Sub(at))
			}
		}
	})
}

func TestOnePeersTroubleIsItsOwn(t *testing.T) {
	s, right := &store{log: 1}, &remote{}
	slow := &remote{delay: 4 * time.Second}
	gone := &remote{delay: 2 * time.Second, err: errAway}
	with(t, s, 0, map[string]*remote{"slow": slow, "gone": gone, "right": right}, func(r *Replicator) {
		time.Sleep(time.Minute)
		s.change()
		r.Changed(0)
		time.Sleep(5 * time.Millisecond)
		if n := right.cursor(); n != 1 {
			t.Errorf("the working peer has position %d", n)
		}

		time.Sleep(20 * time.Second)
		if n := slow.cursor(); n != 1 {
			t.Errorf("the slow peer has position %d", n)
		}

		for _, l := range r.links {
			if lag := l.Lag(); (lag > 19*time.Second) != (l.Name == "gone") {
				t.Errorf("%s lags by %s", l.Name, lag)
			}
		}

		gone.mu.Lock()
		gone.err = nil
		gone.delay = 50 * time.Millisecond
		gone.mu.Unlock()

		time.Sleep(4 * time.Second)
		if n := gone.cursor(); n != 1 {
			t.Errorf("4 s after its return the peer has position %d", n)
		}
	})
}

func TestWhatAPeerLostIsToldAgain(t *testing.T) {
	s, eu := &store{}, &remote{}

	// The replicator does not run yet, so it is not notified of these changes.
	for range 3000 {
		s.change()
	}

	with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
		time.Sleep(5 * time.Second)
		if n := eu.cursor(); n != 3000 || s.begun != 1 {
			t.Fatalf("the peer has position %d; %d logs were begun", n, s.begun)
		}
		if most := slices.Max(eu.sizes); most > bucketPages {
			t.Errorf("a round has %d pages of one bucket", most)
		}

		// The peer comes back empty.
		eu.mu.Lock()
		eu.copy = presencetest.Copy{}
		eu.mu.Unlock()
		time.Sleep(compareEvery + time.Second)
		if n := eu.cursor(); n != 3000 {
			t.Errorf("a peer that came back empty has position %d", n)
		}

		eu.mu.Lock()
		// The peer knows a later incarnation of this region, so the log has to begin above it.
		eu.copy = presencetest.Copy{Log: 77, Cursor: 5000, High: 99, Done: true}
		eu.mu.Unlock()
		time.Sleep(compareEvery + time.Second)
		if n := eu.cursor(); n != 3000 || s.log != 100 {
			t.Errorf("a peer that knew a later incarnation has position %d of log %d", n, s.log)
		}
	})
}

// A replica that becomes the master may lack changes that were acknowledged since the last comparison of positions. The
// next comparison then finds the position of the one before, and the changes are sent again.
func TestWhatAPeerAcknowledgedAndLostIsToldAgain(t *testing.T) {
	s, eu := &store{log: 1}, &remote{}
	with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
		time.Sleep(compareEvery)
		for n := range uint64(5) {
			eu.mu.Lock()
			before := eu.copy
			eu.mu.Unlock()

			s.change()
			r.Changed(0)
			time.Sleep(10 * time.Millisecond)
			if at := eu.cursor(); at != n+1 {
				t.Fatalf("the peer has position %d, want %d", at, n+1)
			}

			// The peer loses its last change.
			eu.mu.Lock()
			eu.copy = before
			eu.mu.Unlock()

			time.Sleep(compareEvery + compareEvery/2/2)
			if at := eu.cursor(); at != n+1 {
				t.Fatalf("%s after it lost a change the peer has position %d, want %d",
					compareEvery+compareEvery/2/2, at, n+1)
			}
		}
	})
}

// broken has a second bucket, whose log cannot be begun or raised.
type broken struct {
	*store
	forgotten bool
}

func (s broken) Outgoing(ctx context.Context, at []pncounter.Position, limit int) ([]pncounter.Batch, error) {
	all, err := s.store.Outgoing(ctx, at, limit)
	for i := range all {
		switch {
		case all[i].Bucket == 0:
		case s.forgotten:
			all[i] = pncounter.Batch{Bucket: 1, Log: 1, Forgotten: true}
		default:
			all[i] = pncounter.Batch{Bucket: 1}
		}
	}

	return all, err
}

func (broken) BeginLogs(context.Context, []int) error             { return errAway }
func (broken) Raise(context.Context, int, uint64, []string) error { return errAway }

func TestABucketWhoseLogCannotBeWrittenHoldsUpNoOther(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		s, eu := broken{&store{log: 1}, forgotten}, &remote{}
		with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
			r.Own([]int{0, 1})
			for n := range uint64(5) {
				s.change()
				r.Changed(0)

				time.Sleep(time.Second)
				if at := eu.cursor(); at != n+1 {
					t.Fatalf("the peer has position %d of bucket 0, want %d", at, n+1)
				}
			}
		})
	}
}

func TestNothingIsToldWhileItIsPartial(t *testing.T) {
	s, eu := &store{log: 1, partial: true, end: 5}, &remote{}
	with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
		time.Sleep(10 * time.Second)
		if n := eu.cursor(); n != 0 {
			t.Errorf("the peer has position %d", n)
		}

		s.mu.Lock()
		s.partial = false
		s.mu.Unlock()

		r.Changed(0)
		time.Sleep(time.Second)
		if n := eu.cursor(); n != 5 {
			t.Errorf("later the peer has position %d", n)
		}
	})
}

func TestARefusedPeerIsTriedAgain(t *testing.T) {
	s, eu := &store{log: 1, end: 3}, &remote{hello: pncounter.ErrRefused}
	with(t, s, 0, map[string]*remote{"eu": eu}, func(r *Replicator) {
		time.Sleep(time.Minute)
		if eu.cursor() != 0 || eu.greets < 100 || eu.greets > 250 {
			t.Errorf("after a minute the peer has position %d, and %d greetings", eu.cursor(), eu.greets)
		}

		eu.mu.Lock()
		eu.hello = nil
		eu.mu.Unlock()
		time.Sleep(time.Second)
		if n := eu.cursor(); n != 3 {
			t.Errorf("the peer is valid again, and has position %d", n)
		}
	})
}

// TestARegionWithoutItsStoreIsSilent: otherwise the peers would take its last counts for present ones.
func TestARegionWithoutItsStoreIsSilent(t *testing.T) {
	s, eu := &store{log: 1}, &remote{}
	greets := func() int {
		eu.mu.Lock()
		defer eu.mu.Unlock()

		return eu.greets
	}
	setAway := func(away bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.away = away
	}

	with(t, s, time.Minute, map[string]*remote{"eu": eu}, func(*Replicator) {
		time.Sleep(10 * time.Second)
		setAway(true)
		time.Sleep(awayAfter + 2*time.Second)

		before := greets()
		time.Sleep(time.Minute)
		if n := greets(); before == 0 || n != before {
			t.Errorf("%d greetings came before the outage, and %d in a minute of it", before, n-before)
		}

		setAway(false)
		time.Sleep(5 * time.Second)
		if greets() == before {
			t.Error("the store is back, and the region sends no greetings")
		}
	})
}

func TestSilence(t *testing.T) {
	const stale = 5 * time.Minute
	words := func(s *store, from, n int) {
		for i := range n {
			s.hear("eu", string(rune('a'+from+i)))
			time.Sleep(time.Second)
		}
	}

	expect := func(t *testing.T, s *store, when string, want ...string) {
		t.Helper()
		if got := s.leftOut(); !slices.Equal(got, want) {
			t.Errorf("%s: %v are left out, want %v", when, got, want)
		}
	}

	t.Run("a region that falls silent, and comes back", func(t *testing.T) {
		s := &store{log: 1}
		with(t, s, stale, map[string]*remote{"eu": {}}, func(*Replicator) {
			words(s, 0, 10)

			// The checks are 2 s before the limit and 2 s after it.
			time.Sleep(stale - 2*time.Second)
			expect(t, s, "just before")
			time.Sleep(4 * time.Second)
			expect(t, s, "just after", "eu")
			if last := s.lastApplied(); !slices.Equal(last, []string{"eu"}) {
				t.Errorf("the buckets leave out %v", last)
			}

			time.Sleep(time.Hour)
			words(s, 20, 1)
			expect(t, s, "heard again")
		})
	})

	t.Run("never", func(t *testing.T) {
		s := &store{log: 1}
		with(t, s, 0, map[string]*remote{"eu": {}}, func(*Replicator) {
			time.Sleep(24 * time.Hour)
			expect(t, s, "after a day")
		})
	})

	t.Run("a new owner of the decision keeps it until it hears", func(t *testing.T) {
		s := &store{log: 1, out: []string{"eu"}, greetedAt: map[string]string{"eu": "x"}}
		with(t, s, stale, map[string]*remote{"eu": {}}, func(*Replicator) {
			time.Sleep(time.Minute)
			expect(t, s, "not heard", "eu")

			s.hear("eu", "y")
			time.Sleep(time.Second)
			expect(t, s, "heard")
		})
	})

	t.Run("who does not lead decides nothing", func(t *testing.T) {
		s := &store{log: 1}
		with(t, s, stale, map[string]*remote{"eu": {}}, func(r *Replicator) {
			r.Own([]int{3})
			time.Sleep(time.Hour)
			expect(t, s, "after an hour")
		})
	})

	t.Run("this region's Redis was away, so nobody could be heard", func(t *testing.T) {
		s := &store{log: 1}
		with(t, s, stale, map[string]*remote{"eu": {}}, func(*Replicator) {
			words(s, 0, 3)

			// While this region's Redis is away no greeting can arrive. So the silence of peers counts only from its
			// return on.
			s.mu.Lock()
			s.away = true
			s.mu.Unlock()
			time.Sleep(time.Hour)
			s.mu.Lock()
			s.away = false
			s.mu.Unlock()
			time.Sleep(time.Minute)
			expect(t, s, "a minute after")

			time.Sleep(stale)
			expect(t, s, "silent on", "eu")
		})
	})
}
