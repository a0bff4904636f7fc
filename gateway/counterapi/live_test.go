package counterapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/presence"
)

const lag = 5 * time.Second // of the built-in rules

// scripted has counters whose feed is written by the test. Only Read, Watch, Remote and Up are called.
type scripted struct {
	Counters
	mu       sync.Mutex // guards the fields below
	counters map[string]counter.Counter
	members  map[string]bool // "key/member"
	followed map[string]bool
	away     bool
	part     bool // only stocks cannot be read
	behind   bool // while it is away a second server has old values
	silent   bool // reads are never answered
	reads    int
	during   func() // called once, in a read that has its answer already

	told func([]counter.Update)
	lost func()
}

func (s *scripted) Remote() bool { return true }

func (s *scripted) Up() bool { s.mu.Lock(); defer s.mu.Unlock(); return !s.away }

func (s *scripted) Read(ctx context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	s.mu.Lock()
	s.reads++
	if s.silent {
		s.mu.Unlock()
		<-ctx.Done()
		return nil, counter.ErrUnavailable
	}

	if s.away && !s.behind {
		s.mu.Unlock()
		return nil, counter.ErrUnavailable
	}

	var out []counter.Reading
	for _, key := range keys {
		if s.part && strings.HasPrefix(key, "stock:") {
			out = append(out, counter.Away([]string{key})...)
			continue
		}
		c := s.counters[key]
		c.Key = key
		c.Stale = c.Stale || s.away
		out = append(out, counter.Reading{Counter: c, Mine: s.members[key+"/"+member]})
	}

	during := s.during
	s.during = nil
	s.mu.Unlock()

	if during != nil {
		during()
	}
	return out, nil
}

func (s *scripted) Watch(told func([]counter.Update), lost func()) counter.Watch {
	s.told, s.lost = told, lost
	return s
}

func (s *scripted) Follow(_ context.Context, keys ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.away {
		return counter.ErrUnavailable
	}

	for _, key := range keys {
		s.followed[key] = true
	}
	return nil
}

func (s *scripted) Unfollow(keys ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for _, key := range keys {
		delete(s.followed, key)
	}
}

func (s *scripted) Close() {}

// goes makes the store go away, or come back.
func (s *scripted) goes(away bool) { s.mu.Lock(); defer s.mu.Unlock(); s.away = away }

// set gives the counter that version in the store; with sequence 0 there is no counter.
func (s *scripted) set(incarnation, sequence uint64, members ...string) counter.Counter {
	s.mu.Lock()
	defer s.mu.Unlock()

	c := counter.Counter{Key: "likes:1"}
	if sequence > 0 {
		c.Kind = counter.Members
		c.Value = int64(sequence)
		c.Version = counter.Version{Incarnation: incarnation, Sequence: sequence}
	}

	s.counters[c.Key] = c
	clear(s.members)
	for _, m := range members {
		s.members[c.Key+"/"+m] = true
	}

	return c
}

// pages is a Hub and a Viewer that note what they receive, in order.
type pages struct {
	mu  sync.Mutex
	log []string
	seq presence.Version
}

func (p *pages) Touch(presence.Topic) {}

func (p *pages) Update(u presence.Update) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if u.Stale {
		p.log = append(p.log, "stale")
		return
	}

	members, version, _ := Members(u)
	if strings.HasSuffix(members, `,"stale":true`) {
		version += " as it was"
	}

	if u.Version.Compare(p.seq) <= 0 {
		version = "an update that the hub would drop: " + version
	}

	p.seq = u.Version
	p.log = append(p.log, version)
}

func (p *pages) Mine(_ string, is, again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.log = append(p.log, fmt.Sprintf("mine %t again %t", is, again))
}

// lively runs a test of a Live that follows likes:1.
func lively(t *testing.T, test func(t *testing.T, l *Live, s *scripted, want func(...string))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{counters: map[string]counter.Counter{}, members: map[string]bool{}, followed: map[string]bool{}}
		p := &pages{}
		l := NewLive(Config{Rules: counter.BuiltinRules(), Counters: s, Log: zerolog.Nop()}, p)

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.Run(ctx) }()
		defer func() { stop(); <-done }()
		synctest.Wait()

		test(t, l, s, func(want ...string) {
			t.Helper()
			synctest.Wait()
			p.mu.Lock()
			defer p.mu.Unlock()
			if !slices.Equal(p.log, want) {
				t.Errorf("the hub received %q, want %q", p.log, want)
			}

			p.log = nil
		})
	})
}

var likes = Topic("likes:1")

func (s *scripted) tell(c counter.Counter, joined ...string) {
	s.told([]counter.Update{{Counter: c, Joined: joined}})
}

// A followed counter is read once, and then each notified version reaches the hub.
func TestFollowing(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 5)
		l.Want(likes)
		want("1-5")

		s.tell(s.set(1, 6))
		s.tell(s.set(1, 8))
		want("1-6", "1-8")

		s.tell(s.set(0, 0)) // deleted
		want("0-0")
		s.tell(s.set(2, 1))
		want("2-1")

		// No notification comes, but one may have been lost.
		s.set(2, 9)
		s.lost()
		want("2-9")

		// A counter that nobody watches must not keep its channel in the store.
		l.Unwant(likes)
		synctest.Wait()
		if n := len(s.followed); n > 0 {
			t.Errorf("%d counters are still followed, want none", n)
		}
		// Such a notification may be on its way while the counter is unfollowed.
		s.tell(s.set(2, 10))
		want()

		// A counter that is wanted again before it is unfollowed must be read again.
		l.Want(likes)
		l.Unwant(likes)
		l.Want(likes)
		want("2-10")
		if !maps.Equal(s.followed, map[string]bool{"likes:1": true}) {
			t.Errorf("%v are followed, want likes:1 alone", s.followed)
		}
	})
}

// Exact counters may have their own store. While it is away, all others are shown as before.
func TestOnlyExactCountersAreAway(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.part = true
		s.set(1, 5)
		l.Want(Topic("stock:1"))
		l.Want(likes)
		want("1-5")

		s.tell(s.set(1, 6))
		time.Sleep(5 * time.Second) // reads are tried again and again
		want("1-6")

		s.mu.Lock()
		s.part = false
		version := counter.Version{Incarnation: 7, Sequence: 1}
		s.counters["stock:1"] = counter.Counter{Kind: counter.Exact, Value: 3, Version: version}
		s.mu.Unlock()

		time.Sleep(2 * outage.MaxPause)
		want("7-1")
	})
}

// If only one counter cannot be read, it is stale, also for clients that come meanwhile, and others are not.
func TestOneIsAway(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		stock := Topic("stock:1")
		version := counter.Version{Incarnation: 7, Sequence: 1}
		s.counters["stock:1"] = counter.Counter{Kind: counter.Exact, Value: 3, Version: version}
		s.set(1, 5)
		l.Want(likes)
		want("1-5")
		l.Want(stock)
		want("7-1")

		part := func(is bool) { s.mu.Lock(); s.part = is; s.mu.Unlock() }
		part(true)
		time.Sleep(10 * time.Second)
		want("stale")
		if l.current([]string{"likes:1"}, lag) == nil || l.current([]string{"stock:1"}, lag) != nil {
			t.Error("memory must answer for likes:1 and not for the stale stock:1")
		}

		// As when the last client leaves and another one comes: it gets the old value, marked as such.
		l.Unwant(stock)
		l.Want(stock)
		want("7-1 as it was")

		s.tell(s.set(1, 6))
		time.Sleep(10 * time.Second)
		want("1-6")

		part(false)
		time.Sleep(2 * outage.MaxPause)
		want("7-1")
	})
}

// When a server is away, all its counters are soon stale, however many there are, and those of another server are not.
func TestManyAreAway(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, _ func(...string)) {
		// Many times as many as one read covers, so probes alone would take that many seconds to find them.
		const stocks = 20 * counter.MaxKeys

		s.set(1, 5)
		l.Want(likes)
		for i := range stocks {
			l.Want(Topic(fmt.Sprint("stock:", i)))
		}

		time.Sleep(time.Second)
		if l.current([]string{"stock:0", "likes:1"}, lag) == nil {
			t.Fatal("the counters are not known yet")
		}

		s.mu.Lock()
		s.part = true
		s.mu.Unlock()
		time.Sleep(5 * time.Second)

		for i := range stocks {
			if key := fmt.Sprint("stock:", i); l.current([]string{key}, lag) != nil {
				t.Fatalf("%s is answered from memory, want it stale", key)
			}
		}

		if l.current([]string{"likes:1"}, lag) == nil {
			t.Error("a counter of the other server is stale")
		}
	})
}

// A counter that did not exist when this process last read it, and exists in a store that lags, is shown.
func TestALaterCounterWinsWhileTheStoreIsStale(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, _ func(...string)) {
		l.remember(counter.Counter{Key: "likes:1"})
		time.Sleep(time.Minute)

		c := s.set(1, 5)
		c.Updated, c.Stale = time.Now(), true
		if is, ok := l.newest(counter.Reading{Counter: c}); !ok || is.Value != 5 {
			t.Errorf("the counter is %+v, %v; want 5", is, ok)
		}

		time.Sleep(time.Minute)
		l.remember(counter.Counter{Key: "likes:1"}) // the counter was deleted
		if is, ok := l.newest(counter.Reading{Counter: c}); !ok || is.Touched() {
			t.Errorf("after the deletion the counter is %+v, %v; want none", is, ok)
		}
	})
}

// A read and a notification may overtake each other. No client is shown an older version, or the end of a counter that
// was created anew.
func TestReadsAndUpdatesOvertakeEachOther(t *testing.T) {
	for name, tc := range map[string]struct {
		play func(l *Live, s *scripted)
		want []string
	}{
		"told while it is read": {func(l *Live, s *scripted) {
			s.set(1, 5)
			s.during = func() { s.tell(s.set(1, 6)) }
			l.Want(likes)
		}, []string{"1-6"}},
		"an old one told while it is read": {func(l *Live, s *scripted) {
			old := s.set(1, 4)
			s.set(1, 5)
			s.during = func() { s.tell(old) }
			l.Want(likes)
		}, []string{"1-4", "1-5"}},
		"deleted while it is read": {func(l *Live, s *scripted) {
			s.set(1, 5)
			s.during = func() { s.tell(s.set(0, 0)) }
			l.Want(likes)
		}, []string{"0-0"}},
		"told late": {func(l *Live, s *scripted) {
			old := s.set(1, 4)
			now := s.set(1, 5)
			l.Want(likes)
			synctest.Wait()
			s.tell(old)
			s.tell(now)
		}, []string{"1-5"}},
		"the end told late": {func(l *Live, s *scripted) {
			now := s.set(2, 1)
			l.Want(likes)
			synctest.Wait()
			s.tell(counter.Counter{Key: "likes:1"})
			synctest.Wait()
			s.tell(now)
		}, []string{"2-1"}},
		"the end after a read": {func(l *Live, s *scripted) {
			s.set(2, 1)
			l.Want(likes)
			synctest.Wait()
			s.tell(s.set(0, 0))
		}, []string{"2-1", "0-0"}},
		"never told": {func(l *Live, s *scripted) {
			s.set(1, 1)
			l.Want(likes)
			synctest.Wait()
			s.set(1, 2)
			time.Sleep(probeEvery + time.Millisecond)
		}, []string{"1-1", "1-2"}},
		"lost what it had": {func(l *Live, s *scripted) {
			s.set(1, 7)
			l.Want(likes)
			synctest.Wait()
			s.set(1, 3)
			s.lost()
		}, []string{"1-7", "1-3"}},
	} {
		t.Run(name, func(t *testing.T) {
			lively(t, func(_ *testing.T, l *Live, s *scripted, want func(...string)) {
				tc.play(l, s)
				want(tc.want...)
			})
		})
	}
}

// A viewer learns whether it is a member of the counter: from a read, from notifications, and from its own changes.
func TestMembership(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 1, "ann")
		ann := &pages{}
		bob := &pages{}
		tab := &pages{} // another one of ann

		told := func(v *pages, want ...string) {
			t.Helper()
			synctest.Wait()
			v.mu.Lock()
			defer v.mu.Unlock()
			if !slices.Equal(v.log, want) {
				t.Errorf("the viewer received %q, want %q", v.log, want)
			}
			v.log = nil
		}

		l.View("likes:1", "ann", ann) // not followed yet
		l.Want(likes)
		l.View("likes:1", "ann", ann)
		l.View("likes:1", "bob", bob)
		want("1-1")
		told(ann, "mine true again true")
		told(bob, "mine false again true")

		// Another tab of a known member. A store that was asked for each tab would be asked by every visitor of a busy
		// page.
		reads := s.reads
		l.View("likes:1", "ann", tab)
		told(tab, "mine true again true")
		if s.reads != reads {
			t.Error("the store was asked about a known member")
		}

		s.tell(s.set(1, 2, "ann", "bob"), "bob")
		told(bob, "mine true again false")
		// A notification names who joined, so nobody else gets a frame.
		told(ann)

		s.told([]counter.Update{{Counter: s.set(1, 3, "bob"), Left: []string{"ann"}}})
		told(ann, "mine false again false")
		told(tab, "mine false again false")

		// After a notification that does not name all changed members, the store is asked about all viewers.
		s.told([]counter.Update{{Counter: s.set(1, 4, "ann"), Reread: true}})
		told(ann, "mine true again true")
		told(bob, "mine false again true")
		told(tab, "mine true again true")

		l.Unview("likes:1", "ann", tab)
		empty := s.set(1, 5)
		empty.Value = 0 // as after a reset: no frame may say that a viewer is a member
		s.told([]counter.Update{{Counter: empty, Reread: true}})
		told(ann, "mine false again false")
		told(bob, "mine false again false")

		s.tell(s.set(0, 0))
		told(ann, "mine false again false")
		told(bob, "mine false again false")
		told(tab)
		// A read has overtaken the notification, so the frame must be sent again.
		now := s.set(2, 1, "ann")
		s.lost()
		want("1-2", "1-3", "1-4", "1-5", "0-0", "2-1")
		told(ann, "mine true again true")
		told(bob, "mine false again true")
		s.tell(now, "ann")
		told(ann, "mine true again true")

		for _, v := range []*pages{ann, bob} {
			l.Unview("likes:1", map[*pages]string{ann: "ann", bob: "bob"}[v], v)
		}

		if k := l.keys["likes:1"]; len(k.viewers) > 0 {
			t.Errorf("%d viewers are left, want none", len(k.viewers))
		}
	})
}

// While the store is away, everything is stale. A client that comes meanwhile learns when the store is back.
func TestAwayAndBack(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 1, "ann")
		l.Want(likes)
		want("1-1")

		s.goes(true)
		time.Sleep(probeEvery + time.Millisecond) // until a probe notices that the store has gone
		want("stale")
		if l.current([]string{"likes:1"}, lag) != nil {
			t.Error("memory answers with a stale counter")
		}

		ann := &pages{}
		l.View("likes:1", "ann", ann)
		l.Want(Topic("views:1"))
		// Nothing new is known, so nothing may be sent, however often the store is tried.
		time.Sleep(10 * time.Second)
		want()

		s.goes(false)
		l.StateChanged()
		synctest.Wait()
		time.Sleep(2 * outage.MaxPause)
		synctest.Wait()

		if got := strings.Join(ann.log, ","); got != "mine true again true" {
			t.Errorf("the viewer received %q", got)
		}

		if all := l.current([]string{"likes:1", "views:1"}, lag); len(all) != 2 || !all[0].Approx ||
			all[1].Kind != counter.Sum {
			t.Errorf("memory answers %+v", all)
		}
	})
}

// A client that begins to watch while the store is away gets the value that was last read, as stale.
func TestKnownWhileAway(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		c := s.set(1, 1)
		// As a call of some client has read it, which no subscriber has seen.
		l.remember(c)
		s.goes(true)
		l.StateChanged()

		l.Want(likes)
		want("1-1 as it was")
		time.Sleep(10 * time.Second)
		want()

		s.goes(false)
		l.StateChanged()
		want("1-1")
	})
}

// While Redis is away PostgreSQL behind it has an old value, which a client that begins to watch gets as well.
func TestOldValueOfASecondServer(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 1)
		s.behind = true
		s.goes(true)
		l.StateChanged()

		l.Want(likes)
		want("1-1 as it was")
		time.Sleep(10 * time.Second)
		want()

		s.set(1, 2)
		s.goes(false)
		l.StateChanged()
		synctest.Wait()
		want("1-2")
	})
}

// A change by this process, whose notification has not arrived yet, is not undone while the store is away.
func TestOwnChangeIsKnownWhileAway(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 1)
		l.Want(likes)
		want("1-1")

		// The caller was told 2. If the counter it looks at went back to 1, its change would seem to be undone.
		l.remember(s.set(1, 2))
		s.goes(true)
		l.StateChanged()
		want("1-2 as it was")
	})
}

// A store that knows only an earlier state of one counter knows the others.
func TestOneIsStale(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		c := s.set(1, 1)
		c.Approx, c.Stale = true, true

		s.mu.Lock()
		s.counters[c.Key] = c
		s.mu.Unlock()

		l.Want(Topic("views:1"))
		want("0-0")
		l.Want(likes)
		want("1-1 as it was")

		// Ten probes find the same stale value, which is sent once.
		time.Sleep(10 * time.Second)
		want()
		if all := l.current([]string{"likes:1", "views:1"}, lag); len(all) != 2 || !all[0].Stale || all[1].Stale {
			t.Errorf("memory answers %+v, want the first stale and the second not", all)
		}

		s.set(1, 1) // the store knows the counter again, without a notification
		time.Sleep(probeEvery)
		want("1-1")
		s.tell(s.set(1, 3))
		want("1-3")

		c.Version.Sequence, c.Value = 2, 2 // older than what the hub has received
		s.mu.Lock()
		s.counters[c.Key] = c
		s.mu.Unlock()
		time.Sleep(10 * time.Second)
		want("stale")

		s.set(1, 3)
		time.Sleep(probeEvery)
		want("1-3")
	})
}

// A value in memory is as old as its last confirmation by the store. While the store is silent, nothing else confirms
// it.
func TestNoReadFromMemoryIsOlderThanItsLag(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		keys := []string{"likes:1"}

		s.set(1, 1)
		l.Want(likes)
		for range 100 { // a counter that does not change is confirmed by probes
			time.Sleep(probeEvery / 2)
			if l.current(keys, 2*time.Second) == nil {
				t.Fatal("a followed counter was not answered from memory")
			}
		}

		s.mu.Lock()
		s.silent = true
		s.mu.Unlock()
		s.tell(s.set(1, 2))                          // a notification may have been on its way for any time
		time.Sleep(2*time.Second + time.Millisecond) // a probe may have begun just then, and was answered
		synctest.Wait()
		if c := l.current(keys, 2*time.Second); c != nil {
			t.Errorf("more than 2 s after the store fell silent memory answers %+v", c)
		}
		if l.current(keys, 4*time.Second) == nil {
			t.Error("a read that may be 4 s old is not answered from memory")
		}
	})
}

// An answered read confirms a counter that no probe has reached.
func TestAReadConfirmsACounter(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		const many = 100 * counter.MaxKeys
		for i := range many {
			l.Want(Topic(fmt.Sprint("views:", i)))
		}

		// A probe has at most counter.MaxKeys of them, so after the lag of five seconds most are unconfirmed again.
		time.Sleep(time.Minute)
		api := &API{cfg: l.cfg, live: l}

		unconfirmed := func() (keys []string) {
			for i := range many {
				if key := fmt.Sprint("views:", i); l.current([]string{key}, lag) == nil {
					keys = append(keys, key)
				}
			}
			return keys
		}

		keys := unconfirmed()
		if len(keys) == 0 {
			t.Fatal("a probe reaches all counters, so the test proves nothing")
		}

		if _, err := api.read(t.Context(), keys[:1], "", lag); err != nil {
			t.Fatal(err)
		}
		if l.current(keys[:1], lag) == nil {
			t.Error("the next read is not answered from memory")
		}
	})
}

// After a standstill of the process everything is stale until it has been read again.
func TestStandstill(t *testing.T) {
	lively(t, func(t *testing.T, l *Live, s *scripted, want func(...string)) {
		s.set(1, 1)
		l.Want(likes)
		want("1-1")
		// The notifications of that time may be lost, so the value is doubted even though it has not changed.
		l.resumed()
		want("stale", "1-1")

		s.set(1, 3) // without a notification
		l.resumed()
		want("stale", "1-3")
	})
}
