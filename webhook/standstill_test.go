package webhook_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/webhook"
)

// Tests of a process that stands still, between any two of its steps, while another one goes on.

// longStand is how long a process stands still.
const longStand = time.Minute

// standingStore is a store in whose next call a process stands still.
type standingStore struct {
	webhook.Store
	mu    sync.Mutex
	stand func() // nil: the process does not stand still
}

// standInReport makes the process stand still before its next report arrives. Meanwhile others do something.
func (s *standingStore) standInReport(others func()) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.stand = others
}

func (s *standingStore) Report(ctx context.Context, changes []webhook.Change) ([]string, int, error) {
	s.mu.Lock()
	stand := s.stand
	s.stand = nil
	s.mu.Unlock()

	if stand != nil {
		stand()
	}

	return s.Store.Report(ctx, changes)
}

// withOther runs a test with a process that stands still and another one. Both serve everything, as after a takeover
// that the first one did not notice.
func withOther(t *testing.T, hook string, test func(w, other *world, s *standingStore)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		other := newWorld(t, hook)
		w := *other
		s := &standingStore{Store: other.store}
		w.store = s
		defer other.start()()
		defer w.start()()
		time.Sleep(longStand) // both have looked through all pages and users

		test(&w, other, s)
	})
}

// comeAndGo makes a process report that a page is occupied, and empty again.
func (w *world) comeAndGo(page string) {
	w.service.Received(w.put(page, 1, false))
	time.Sleep(soon)
	w.service.Received(w.put(page, 0, false))
	time.Sleep(longStand)
}

// A process has received a count when it stands still. When it goes on the page is empty, as another one has reported.
func TestACountOfBeforeAStandstillIsNotReported(t *testing.T) {
	for hook, want := range map[string][]string{
		"page:*=http://r.test/":     {"page.occupied q 1", "page.occupied p 1", "page.vacated p 0"},
		"count:*@1s=http://r.test/": {"page.count q 1", "page.count p 1", "page.count p 0"},
	} {
		withOther(t, hook, func(w, other *world, s *standingStore) {
			s.standInReport(func() {
				w.service.Received(w.put("p", 1, false))
				other.comeAndGo("p")
			})
			w.service.Received(w.put("q", 1, false))
			time.Sleep(2 * longStand)
			w.want(want...)
		})
	}
}

// A process stands still after it has read a count, before it reports it.
func TestACountReadBeforeAStandstillIsNotReported(t *testing.T) {
	for hook, want := range map[string][]string{
		"page:*=http://r.test/":     {"page.occupied p 1", "page.vacated p 0"},
		"count:*@1s=http://r.test/": {"page.count p 1", "page.count p 0"},
	} {
		withOther(t, hook, func(w, other *world, _ *standingStore) {
			w.put("p", 1, false)
			w.standAfterReading(func() { other.comeAndGo("p") })
			w.service.Serve(nil)
			w.service.Serve(allBuckets()) // it looks through all pages, and reads page p
			time.Sleep(2 * longStand)
			w.want(want...)
		})
	}
}

// A count fell when its process stood still. It was high meanwhile, and is low again when the process goes on, but not
// for Settle.
func TestAFallIsJudgedAnewAfterAStandstill(t *testing.T) {
	for name, tc := range map[string]struct {
		hook         string
		high, low    int64
		rises, other string
		falls        []string
	}{
		"occupation": {
			"page:*=http://r.test/", 1, 0, "page.occupied p 1", "page.occupied q 9", []string{"page.vacated p 0"},
		},
		"threshold": {"page:*>2=http://r.test/", 3, 2, "page.over p 3", "page.over q 9", nil},
	} {
		t.Run(name, func(t *testing.T) {
			withOther(t, tc.hook, func(w, other *world, s *standingStore) {
				other.service.Serve(nil)
				w.set("p", tc.high)
				w.want(tc.rises)

				w.service.Received(w.put("p", tc.low, false))
				time.Sleep(time.Second)
				s.standInReport(func() {
					time.Sleep(longStand)
					w.put("p", tc.high, false)
					w.put("p", tc.low, false)
				})
				w.service.Received(w.put("q", 9, false))
				time.Sleep(longStand + soon)
				w.service.Received(w.put("p", tc.high, false))
				time.Sleep(2 * settle)
				w.want(tc.other)

				// A fall that lasts is reported, so that the next rise is.
				w.service.Received(w.put("p", tc.low, false))
				time.Sleep(2 * settle)
				w.want(tc.falls...)
				w.set("p", tc.high)
				w.want(tc.rises)
			})
		})
	}
}

// A page was occupied for a moment, and nobody was notified, because publications were lost.
func TestAPageThatWasOccupiedUnnoticedIsNotVacatedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		defer w.start()()
		time.Sleep(soon)
		w.set("p", 1)
		w.want("page.occupied p 1")

		w.service.Received(w.put("p", 0, false))
		time.Sleep(settle - time.Second)
		w.put("p", 1, false)
		w.put("p", 0, false)
		time.Sleep(settle - time.Second)
		w.want()
		time.Sleep(2 * settle)
		w.want("page.vacated p 0")
	})
}

// A process takes over while a report of the one before is under way. It finds out, although the page does not stay as
// that report says.
func TestTakeoverWhileAReportIsUnderWay(t *testing.T) {
	for name, tc := range map[string]struct {
		reported func(w *world) // by the former process, just after the function returns
		then     int64
		want     []string
	}{
		"a page is occupied": {
			func(w *world) { w.service.Received(w.put("p", 1, false)) },
			0, []string{"page.occupied p 1", "page.vacated p 0"},
		},
		"a page is vacated": {
			func(w *world) {
				w.set("p", 1)
				w.service.Received(w.put("p", 0, false))
				time.Sleep(settle - time.Second/4)
			},
			1, []string{"page.occupied p 1", "page.vacated p 0", "page.occupied p 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "page:*=http://r.test/")
				next := *w
				s := &standingStore{Store: w.store}
				w.store = s
				defer w.start()()
				time.Sleep(longStand)

				tc.reported(w)
				s.standInReport(func() { time.Sleep(500 * time.Millisecond) })
				time.Sleep(300 * time.Millisecond)
				defer next.start()()
				time.Sleep(400 * time.Millisecond)
				w.service.Serve(nil)
				next.service.Received(w.put("p", tc.then, false))
				time.Sleep(longStand)
				w.want(tc.want...)
			})
		})
	}
}

// A process stands still after it has learned that a user is present. Meanwhile another one reports that the user has
// come and gone.
func TestAnArrivalOfBeforeAStandstillIsNotReported(t *testing.T) {
	withOther(t, "user:*=http://r.test/", func(w, other *world, _ *standingStore) {
		w.crowd.set(func() {
			w.crowd.asked = func() {
				w.crowd.set(func() { w.crowd.asked = nil })
				other.come(1, "ann")
				time.Sleep(soon)
				other.leave(1)
				time.Sleep(longStand)
			}
		})
		w.come(1, "ann")
		time.Sleep(2 * longStand)

		w.want("user.online ann", "user.offline ann")
	})
}

// A departure was due while the process stood still. The user had come back, and changes the page when it goes on.
func TestADepartureIsJudgedAnewAfterAStandstill(t *testing.T) {
	withOther(t, "user:*=http://r.test/", func(w, other *world, _ *standingStore) {
		w.come(1, "ann")
		time.Sleep(soon)
		w.want("user.online ann")

		w.leave(1)
		w.crowd.set(func() {
			w.crowd.asked = func() {
				w.crowd.set(func() { w.crowd.asked = nil })
				other.come(1, "ann")
				time.Sleep(longStand)
				other.leave(1)
			}
		})
		w.come(2, "bob")
		time.Sleep(longStand + soon)
		w.want("user.online bob")

		other.come(1, "ann")
		time.Sleep(longStand)
		w.want()

		// Who does not come back is reported.
		other.leave(1)
		time.Sleep(2 * settle)
		w.want("user.offline ann")
	})
}

// readCounters are counters of which a process stands still after it has read them.
type readCounters struct {
	counter.Store
	mu    sync.Mutex
	stand func() // nil: the process does not stand still
}

func (r *readCounters) Read(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	r.mu.Lock()
	stand := r.stand
	r.stand = nil
	r.mu.Unlock()

	readings, err := r.Store.Read(ctx, keys, member, lag)
	if stand != nil {
		stand()
	}

	return readings, err
}

// A process stands still after it has read that a counter is over its threshold. Meanwhile another one reports that,
// and the counter falls.
func TestACounterReadBeforeAStandstillIsNotReported(t *testing.T) {
	var read readCounters
	withPair(t, func(w *world) { read.Store, w.counters = w.counters, &read }, func(p *pair) {
		read.stand = func() {
			p.add(p.b, 1, time.Second)
			p.add(p.b, -50, longStand)
		}
		p.add(p.a, 101, 2*longStand)
		p.want("counter.over likes:1 102")
	})
}

// A counter fell when its process was about to lose the store, was over meanwhile, and falls once more when the process
// finds the store again. That fall has to settle, too.
func TestAFallOfACounterIsJudgedAnew(t *testing.T) {
	var far farStore
	withPair(t, func(w *world) { far.Store, w.store = w.store, &far }, func(p *pair) {
		p.add(p.a, 101, 2*settle)
		p.want("counter.over likes:1 101")

		p.add(p.a, -2, time.Second)
		far.away.Store(true)
		p.add(p.b, 2, longStand)
		p.add(p.b, -2, 0)
		far.away.Store(false)
		time.Sleep(2 * time.Second)
		p.add(p.b, 2, 2*settle)
		p.want()

		p.add(p.b, -2, 3*settle)
		p.add(p.b, 2, soon)
		p.want("counter.over likes:1 101")
	})
}
