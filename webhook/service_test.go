package webhook_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/webhook"
	"headcount/webhook/webhookmem"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const settle = 5 * time.Second

var keys = [][]byte{[]byte("a key of twenty-four bytes")}

// receiver is the server that receives messages. It notes what it accepts.
type receiver struct {
	t *testing.T

	mu       sync.Mutex
	status   int // of its answers; 0: it accepts requests and does not answer
	messages map[string]string
	attempts int
	events   []string        // in order of arrival: type, page or counter, number
	taken    map[string]bool // ids of events
	all      []webhook.Event
}

func (r *receiver) RoundTrip(req *http.Request) (*http.Response, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}

	r.attempts++
	id := req.Header.Get("Webhook-Id")
	at, _ := strconv.ParseInt(req.Header.Get("Webhook-Timestamp"), 10, 64)
	if at != time.Now().Unix() || req.Header.Get("Webhook-Signature") != webhook.Sign(keys, id, at, body) {
		r.t.Errorf("the signature is wrong: %v", req.Header)
	}
	if was, again := r.messages[id]; again && was != string(body) {
		r.t.Errorf("message %s was first %s and is now %s", id, was, body)
	}

	r.messages[id] = string(body)

	if r.status == 0 {
		r.mu.Unlock()
		<-req.Context().Done()
		r.mu.Lock()
		return nil, req.Context().Err()
	}

	if r.status/100 != 2 {
		elsewhere := http.Header{"Location": {"http://elsewhere.test/"}}
		return &http.Response{StatusCode: r.status, Header: elsewhere, Body: http.NoBody, Request: req}, nil
	}

	var m struct {
		Data struct{ Events []webhook.Event }
	}
	if err := json.Unmarshal(body, &m); err != nil || len(m.Data.Events) == 0 {
		r.t.Errorf("%s: %v", body, err)
	}

	for _, e := range m.Data.Events {
		if r.taken[e.ID] {
			r.t.Errorf("event %s came in two messages", e.ID)
		}

		r.taken[e.ID] = true
		r.all = append(r.all, e)

		text := fmt.Sprint(e.Type, " ", e.User)
		switch {
		case e.Counter != "":
			text = fmt.Sprint(e.Type, " ", e.Counter, " ", *e.Value)
		case e.Page != "":
			text = fmt.Sprint(e.Type, " ", e.Page, " ", *e.Count)
		}

		if e.Site != "default" {
			text = e.Site + " " + text
		}
		r.events = append(r.events, text)
	}

	return &http.Response{StatusCode: r.status, Body: http.NoBody, Request: req}, nil
}

func (r *receiver) answers(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.status = status
}

// tried returns how many messages there were, and how many attempts.
func (r *receiver) tried() (messages, attempts int) {
	r.mu.Lock()
	defer r.mu.Unlock()

	return len(r.messages), r.attempts
}

// want requires exactly these events since the last want, in any order.
func (r *receiver) want(events ...string) {
	r.t.Helper()
	synctest.Wait()

	r.mu.Lock()
	defer r.mu.Unlock()

	slices.Sort(events)
	slices.Sort(r.events)

	if !slices.Equal(events, r.events) {
		r.t.Fatalf("the receiver got\n%s\nwant\n%s", strings.Join(r.events, "\n"), strings.Join(events, "\n"))
	}

	r.events = nil
}

// house has the counts of pages, like a store.
type house struct {
	mu      sync.Mutex
	counts  map[string]presence.Count
	version uint64
	err     error
	wasRead func() // called once, between the reading of an answer and its return; nil: nothing is
}

func (h *house) Counts(_ context.Context, pages []string) ([]presence.Count, error) {
	h.mu.Lock()
	all := make([]presence.Count, len(pages))
	for i, page := range pages {
		all[i] = h.counts[page]
		all[i].Page = page
	}

	wasRead, err := h.wasRead, h.err
	h.wasRead = nil
	h.mu.Unlock()

	if wasRead != nil {
		wasRead()
	}

	return all, err
}

// standAfterReading makes the process that reads counts next stand still between the answer and its use. Meanwhile
// others do something.
func (h *house) standAfterReading(others func()) {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.wasRead = others
}

func (h *house) Pages(_ context.Context, fn func(pages []string)) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	fn(slices.Collect(maps.Keys(h.counts)))

	return nil
}

// put sets a count and returns its publication.
func (h *house) put(page string, users int64, stale bool) []presence.Update {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.version++
	version := presence.Version{Incarnation: 1, Sequence: h.version}
	c := presence.Count{Page: page, Users: users, Version: version, Stale: stale}
	h.counts[page] = c

	return []presence.Update{c.Update()}
}

// world has one receiver, and the counts and the outbox that services share.
type world struct {
	t *testing.T
	*receiver
	*house
	*crowd
	store    webhook.Store
	hooks    []*webhook.Hook
	counters counter.Store
	registry *prometheus.Registry // of the service that was started last
	service  *webhook.Service
}

func newWorld(t *testing.T, hooks ...string) *world {
	t.Helper()
	parsed, err := webhook.Parse(hooks, []presence.Site{presence.DefaultSite, presence.SiteOf("shop")})
	if err != nil {
		t.Fatal(err)
	}

	return &world{
		t: t, hooks: parsed, store: webhookmem.New(), counters: countertest.InMemory(t, nil),
		receiver: &receiver{
			t: t, status: http.StatusNoContent, messages: map[string]string{}, taken: map[string]bool{},
		},
		house: &house{counts: map[string]presence.Count{}},
		crowd: &crowd{present: map[presence.User]bool{}},
	}
}

// start starts a process that serves everything.
func (w *world) start() (stop func()) { return w.startOver(w.receiver) }

// startOver is start with other connections to receivers.
func (w *world) startOver(transport http.RoundTripper) (stop func()) {
	w.registry = prometheus.NewRegistry()
	s := webhook.New(webhook.Config{
		Hooks: w.hooks, Keys: keys, Store: w.store, Pages: w.house, Users: w.crowd, Counters: w.counters,
		Settle:    settle,
		Transport: transport, Registerer: w.registry, Log: zerolog.Nop(),
	})
	w.service = s

	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx) }() // ends with stop
	s.Serve(allBuckets())

	return func() { cancel(); <-done }
}

func allBuckets() (buckets []int) {
	for b := range presence.DefaultBuckets {
		buckets = append(buckets, b)
	}

	return buckets
}

// set sets a count, and waits until events that are due at once have been sent.
func (w *world) set(page string, users int64) {
	w.service.Received(w.put(page, users, false))
	time.Sleep(3 * time.Second)
}

func (w *world) metric(name, label, value string) float64 {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}

	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := m.GetLabel()
			if len(labels) == 1 && labels[0].GetName() == label && labels[0].GetValue() == value {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}

	return 0
}

func TestPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:p/*=http://r.test/", "page:p/*>2=http://r.test/", "site=http://r.test/")
		stop := w.start()
		defer func() { stop() }()

		shop := presence.SiteOf("shop")

		w.set("p/1", 1)
		w.set("p/1", 2)
		w.set("other", 1)
		w.set(shop.Qualify("p/1"), 1)
		w.set(presence.AllPages, 3)
		w.want("page.occupied p/1 1", "shop page.occupied p/1 1", "page.occupied * 3")

		w.set("p/1", 3)
		w.set("p/1", 9)
		w.want("page.over p/1 3")

		// A user who returns within Settle causes no event.
		w.set("p/1", 0)
		w.set("p/1", 9)
		time.Sleep(2 * settle)
		w.want()

		// A stale count is ignored until it is no longer stale.
		w.service.Received(w.put("p/1", 0, true))
		time.Sleep(2 * settle)
		w.want()

		w.put("p/1", 0, false) // without a publication
		time.Sleep(2 * settle)
		w.want("page.vacated p/1 0")

		// A threshold is reported again only after the count was below it for Settle.
		w.set("p/1", 3)
		w.want("page.occupied p/1 3", "page.over p/1 3")
		w.set("p/1", 2)
		w.set("p/1", 3)
		w.set("p/1", 2)
		time.Sleep(2 * settle)
		w.set("p/1", 3)
		w.want("page.over p/1 3")
	})
}

func TestPeaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*>peak=http://r.test/")
		stop := w.start()
		defer func() { stop() }()

		w.set("p", 1)
		w.set("p", 4)
		w.set("p", 2)
		time.Sleep(settle)
		w.want("page.peak p 4")

		w.set("p", 4)
		time.Sleep(settle)
		w.want()

		w.set("p", 5)
		w.service.Received(w.put("q", 1, false))
		time.Sleep(time.Second)
		w.put("q", 0, false)
		stop()
		stop = w.start() // the next process finds peaks that were not reported, if they last
		time.Sleep(2 * settle)
		w.set("p", 3)

		w.want("page.peak p 5")
		w.set("q", 1)
		time.Sleep(settle)
		w.want("page.peak q 1")

		w.set("q", 0)

		// Each day begins with the count of its first moment.
		time.Sleep(24 * time.Hour)
		w.want("page.peak p 3")

		if reported, err := w.store.Reported(t.Context(), w.hooks[0].ID); err != nil || len(reported) != 1 {
			t.Errorf("an empty page is still remembered: %v, %v", reported, err)
		}
	})
}

func TestEveryCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "count:p/*@10s=http://r.test/")
		stop := w.start()
		defer func() { stop() }()

		// The first change is reported at once. Of those within the interval the last is reported at its end.
		w.put("other", 1, false)
		w.set("p/1", 1)
		w.want("page.count p/1 1")
		w.set("p/1", 2)
		w.set("p/1", 3)
		w.want()
		time.Sleep(4 * time.Second)
		w.want("page.count p/1 3")

		// A count that did not last, or is old, is not reported.
		w.set("p/1", 4)
		w.set("p/1", 3)
		time.Sleep(10 * time.Second)
		old := w.put("p/1", 7, false)
		w.set("p/1", 5)
		w.want("page.count p/1 5")
		time.Sleep(10 * time.Second)
		w.service.Received(old)
		time.Sleep(10 * time.Second)
		w.want()

		// A stale count waits, and the next process continues where this one ends.
		w.service.Received(w.put("p/1", 2, true))
		time.Sleep(20 * time.Second)
		w.want()
		w.set("p/1", 6)
		w.want("page.count p/1 6")
		stop()
		w.put("p/1", 8, false)
		w.put("p/2", 1, false)
		stop = w.start()
		time.Sleep(3 * time.Second)
		w.want("page.count p/2 1")
		time.Sleep(10 * time.Second)
		w.want("page.count p/1 8")

		// The return to 0 is reported as well, and then nothing is remembered.
		w.set("p/1", 0)
		w.set("p/2", 0)
		time.Sleep(20 * time.Second)
		w.want("page.count p/1 0", "page.count p/2 0")
		if reported, err := w.store.Reported(t.Context(), w.hooks[0].ID); err != nil || len(reported) != 0 {
			t.Errorf("empty pages are still remembered: %v, %v", reported, err)
		}
	})
}

// The process that reported the last count had a clock that was ahead. Later counts do not wait for that time.
func TestACountDoesNotWaitForAnotherClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "count:*@5s=http://r.test/")
		ahead := fmt.Sprint("1 1-1 ", time.Now().Add(time.Hour).UnixMilli())
		change := webhook.Change{Hook: w.hooks[0].ID, Subject: "p", Is: ahead}
		if _, _, err := w.store.Report(t.Context(), []webhook.Change{change}); err != nil {
			t.Fatal(err)
		}
		w.put("p", 1, false)
		defer w.start()()
		time.Sleep(soon)

		w.set("p", 2)
		time.Sleep(2 * settle)
		w.want("page.count p 2")
	})
}

// A server that comes back with a clock of before gives counts lower versions. They do not wait until it has caught up
// with what was reported before.
func TestCountsOfAClockThatWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "count:*@5s=http://r.test/")
		before := fmt.Sprint("1 2-1 ", time.Now().Add(-time.Minute).UnixMilli())
		change := webhook.Change{Hook: w.hooks[0].ID, Subject: "p", Is: before}
		if _, _, err := w.store.Report(t.Context(), []webhook.Change{change}); err != nil {
			t.Fatal(err)
		}
		defer w.start()()
		w.put("p", 2, false)
		time.Sleep(2 * settle)
		w.want("page.count p 2")

		w.set("p", 3)
		time.Sleep(2 * settle)
		w.want("page.count p 3")
	})
}

// However often counts change, and whichever process notices: there is at most one event of a page in each interval,
// each is newer than the one before, and the last has the last count.
func TestEveryCountIsThrottled(t *testing.T) {
	const every = 5 * time.Second
	for seed := range uint64(3) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "count:*@5s=http://r.test/")
			stop := w.start()
			other := *w // also serves everything, as for a moment while a bucket moves, but does not send
			other.receiver = &receiver{t: t, messages: map[string]string{}}
			stopOther := other.start()
			random := rand.New(rand.NewPCG(seed, 0))
			pages := []string{"a", "b", "c"}

			for range 150 {
				updates := w.put(pages[random.IntN(3)], random.Int64N(4), false)
				if random.IntN(4) > 0 {
					other.service.Received(updates)
				}
				w.service.Received(updates)
				time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
				if random.IntN(20) == 0 {
					stop()
					stop = w.start()
				}
			}

			stopOther()
			time.Sleep(3 * every)
			stop()

			last := map[string]webhook.Event{}
			for _, e := range w.all {
				before, told := last[e.Page]
				version, _ := presence.ParseVersion(e.Version)
				older, _ := presence.ParseVersion(before.Version)
				if told && (e.Timestamp.Sub(before.Timestamp) < every || version.Compare(older) <= 0 ||
					*e.Count == *before.Count) {
					t.Errorf("%s: %d (%s) at %s after %d (%s) at %s",
						e.Page, *e.Count, e.Version, e.Timestamp, *before.Count, before.Version, before.Timestamp)
				}

				last[e.Page] = e
			}

			for _, page := range pages {
				if got := last[page]; *got.Count != w.counts[page].Users {
					t.Errorf("the last event of %s has %d users, want %d", page, *got.Count, w.counts[page].Users)
				}
			}
		})
	}
}

// A process that takes over reports changes that no process noticed, and does not repeat others.
func TestTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		stop := w.start()
		w.set("stays", 1)
		w.set("goes", 1)
		w.want("page.occupied stays 1", "page.occupied goes 1")

		stop()
		w.put("goes", 0, false)
		w.put("came", 1, false)
		stop = w.start()

		defer func() { stop() }()
		w.service.Received(w.put("stays", 2, false))
		time.Sleep(2 * settle)
		w.want("page.occupied came 1", "page.vacated goes 0")

		// Changes in a gap of the publications are found.
		w.put("came", 0, false)
		w.put("late", 1, false)
		w.service.Lost()
		time.Sleep(time.Minute + 2*settle)
		w.want("page.vacated came 0", "page.occupied late 1")
	})
}

// unsure is a store that makes changes, but loses its first answers.
type unsure struct {
	webhook.Store
	mu   sync.Mutex
	lose int
}

func (u *unsure) Report(ctx context.Context, changes []webhook.Change) ([]string, int, error) {
	reported, dropped, err := u.Store.Report(ctx, changes)

	u.mu.Lock()
	defer u.mu.Unlock()
	if u.lose > 0 {
		u.lose--
		return nil, 0, webhook.ErrUnavailable
	}

	return reported, dropped, err
}

// A step whose answer is lost takes effect once, and later changes are reported.
func TestLostAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		w.store = &unsure{Store: w.store, lose: 3}
		stop := w.start()
		defer func() { stop() }()

		w.set("p", 1)
		w.set("q", 1)
		w.set("p", 0)

		time.Sleep(4 * settle)
		w.want("page.occupied p 1", "page.occupied q 1", "page.vacated p 0")
	})
}

// recordingStore remembers the changes that it has made, and can be replaced by a replica.
type recordingStore struct {
	mu sync.Mutex
	webhook.Store
	made []webhook.Change
}

func (r *recordingStore) now() webhook.Store {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.Store
}

func (r *recordingStore) Report(ctx context.Context, changes []webhook.Change) ([]string, int, error) {
	r.mu.Lock()
	r.made = append(r.made, changes...)
	r.mu.Unlock()

	return r.now().Report(ctx, changes)
}

func (r *recordingStore) Take(ctx context.Context, hook string) ([]string, int, error) {
	return r.now().Take(ctx, hook)
}

func (r *recordingStore) Acknowledge(ctx context.Context, hook, first string, n int) error {
	return r.now().Acknowledge(ctx, hook, first, n)
}

// failOver replaces the store by one that has all changes, but does not know which events were sent.
func (r *recordingStore) failOver(t *testing.T, replica webhook.Store) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()

	if _, _, err := replica.Report(t.Context(), r.made); err != nil {
		t.Fatal(err)
	}
	r.Store = replica
}

// A replica takes over that does not know the batch under way. What is sent then has further events, so it is another
// message: a receiver drops what has an id that it knows.
func TestAnotherBatchIsAnotherMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		replica := newWorld(t, "page:*=http://r.test/").store
		s := &recordingStore{Store: w.store}
		w.store = s
		w.answers(503)
		defer w.start()()

		w.set("p", 1)
		s.failOver(t, replica)
		w.set("q", 1)
		time.Sleep(soon)
		w.answers(204)
		time.Sleep(time.Minute)
		w.want("page.occupied p 1", "page.occupied q 1")
		if messages, _ := w.tried(); messages != 2 {
			t.Errorf("two batches were sent as %d messages", messages)
		}
	})
}

// Events of a process that was away for days are tried once before they are dropped.
func TestOldEventsAreTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		w.answers(503)

		stop := w.start()
		w.set("a", 1)
		stop()
		time.Sleep(2 * webhook.MaxAge)
		w.answers(200)

		stop = w.start()
		defer func() { stop() }()
		time.Sleep(time.Second)
		w.want("page.occupied a 1")
	})
}

func TestReceivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/", "counter:*>1=http://r.test/") // the second hook has no events
		stop := w.start()
		defer func() { stop() }()

		// The first attempts fail in every way. Events gather meanwhile, and the message does not change.
		w.answers(0)
		w.set("a", 1)
		for i, status := range []int{500, 302, 404, 429} {
			w.answers(status)
			w.set(fmt.Sprint("b", i), 1)
			time.Sleep(time.Minute)
		}

		w.want()
		if messages, attempts := w.tried(); messages != 1 || attempts < 5 {
			t.Errorf("%d messages in %d attempts, want one in several", messages, attempts)
		}

		w.answers(200)
		stop()
		stop = w.start() // another process sends the same batch
		time.Sleep(time.Minute)
		w.want("page.occupied a 1", "page.occupied b0 1", "page.occupied b1 1", "page.occupied b2 1",
			"page.occupied b3 1")

		if messages, _ := w.tried(); messages != 2 {
			t.Errorf("%d messages, want two: of the first event, and of the others", messages)
		}

		// A message that the receiver refuses for good is not sent again.
		w.answers(http.StatusGone)
		w.set("c", 1)
		w.answers(200)
		time.Sleep(time.Hour)
		w.want()
		if n := w.metric("headcount_webhook_dropped_total", "reason", "refused"); n != 1 {
			t.Errorf("%v are counted as refused, want 1", n)
		}

		// Pauses grow to minutes, and events that are too old are dropped.
		w.answers(503)
		w.set("d", 1)
		_, before := w.tried()
		w.set("soon after", 1)
		time.Sleep(23 * time.Hour)
		_, after := w.tried()
		if n := w.metric("headcount_webhook_waiting", "host", "r.test"); n != 2 {
			t.Errorf("%v events wait, want 2", n)
		}
		if n := after - before; n < 23*60/6 || n > 23*60/2 {
			t.Errorf("%d attempts were made in 23 hours", n)
		}
		w.set("e", 1)
		time.Sleep(2 * time.Hour)
		w.answers(200)
		time.Sleep(10 * time.Minute)
		w.want("page.occupied e 1") // though it was in a batch with one that is too old
		if n := w.metric("headcount_webhook_dropped_total", "reason", "old"); n != 2 {
			t.Errorf("%v events are counted as too old, want 2", n)
		}
	})
}

// Beyond the bound of an outbox the oldest events are dropped and counted.
func TestOutboxIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "page:*=http://r.test/")
		stop := w.start()
		defer func() { stop() }()

		w.answers(503)
		w.set("first", 1)
		const more = webhook.MaxQueue + 50
		for i := range more {
			w.service.Received(w.put(fmt.Sprint("p", i), 1, false))
		}

		time.Sleep(3 * time.Second)
		if events, waiting, err := w.store.Take(t.Context(), w.hooks[0].ID); err != nil || waiting != webhook.MaxQueue {
			t.Errorf("%d events wait, and %d are returned at once, %v", waiting, len(events), err)
		}

		w.answers(200)
		time.Sleep(10 * time.Minute)
		synctest.Wait()

		if len(w.events) != webhook.MaxQueue {
			t.Errorf("%d events arrived, want %d", len(w.events), webhook.MaxQueue)
		}
		if n := w.metric("headcount_webhook_dropped_total", "reason", "full"); n != more+1-webhook.MaxQueue {
			t.Errorf("%v events are counted as dropped, want %d", n, more+1-webhook.MaxQueue)
		}
	})
}

func TestCounters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "counter:likes:*>100=http://r.test/", "counter:*>1000=http://r.test/")
		stop := w.start()
		defer func() { stop() }()

		rules := counter.BuiltinRules()
		change := func(key string, n int64) {
			t.Helper()
			op := counter.Op{Changes: []counter.Change{{Key: key, Rule: rules.Of("*"), Verb: counter.Add, Delta: n}}}
			results := w.counters.Apply(t.Context(), []counter.Op{op})
			w.service.Changed(results)
			for _, r := range results {
				if r.Err != nil {
					t.Fatal(r.Err)
				}
			}
		}

		add := func(key string, n int64) {
			t.Helper()
			change(key, n)
			time.Sleep(3 * time.Second)
		}

		add("likes:1", 100)
		add("views:1", 1000)
		w.want()

		add("likes:1", 1)
		add("likes:1", 1)
		w.want("counter.over likes:1 101")

		stop()
		stop = w.start()
		add("likes:1", 900)
		add(presence.SiteOf("shop").Qualify("likes:1"), 101)
		w.want("counter.over likes:1 1002", "shop counter.over likes:1 101")

		// After it was below the threshold for Settle, any process reports it again.
		add("likes:1", -2)
		add("likes:1", 2)
		time.Sleep(2 * settle)
		w.want()

		add("likes:1", -2)
		time.Sleep(2 * settle)
		add("likes:1", 2)
		w.want("counter.over likes:1 1002")

		// A process that ends in order first judges its last changes, also those between two rounds.
		change("views:2", 1)
		synctest.Wait()
		change("likes:2", 101)
		stop()
		stop = w.start()
		time.Sleep(3 * time.Second)
		w.want("counter.over likes:2 101")
	})
}
