package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"headcount/presence"
	"headcount/webhook"
	"headcount/webhook/webhookmem"
	"headcount/webhook/webhooktest"
)

// Webhooks in a simulation: their part of the store, the server that receives their messages, and the check that it was
// notified of what is true.

const simSettle = 2 * time.Second // webhook-settle

// simHooks notify the same receiver when a page is occupied or empty, how many users it has, and when a user comes and
// goes.
var simHooks = sync.OnceValue(func() []*webhook.Hook {
	hooks, err := webhook.Parse([]string{
		"page:*=http://receiver.test/occupied", "count:*@1s=http://receiver.test/counts",
		"user:*=http://receiver.test/users",
	}, []presence.Site{presence.DefaultSite})
	must(err)

	return hooks
})

var simHookKeys = [][]byte{[]byte("the secret of a receiver")}

// about returns the subject of an event. Two events of which one undoes the other have the same subject.
func about(e webhook.Event) string {
	switch e.Type {
	case webhook.Count:
		return "count of " + e.Page
	case webhook.Online, webhook.Offline:
		return "user " + e.User
	default:
		return "page " + e.Page
	}
}

// isOn reports whether an event says that somebody is present.
func isOn(e webhook.Event) bool { return e.Type == webhook.Occupied || e.Type == webhook.Online }

// receiver is the server that webhooks notify.
type receiver struct {
	s *simulation

	mu       sync.Mutex // guards the fields below
	failing  bool       // some attempts fail
	lostAt   time.Time  // when a single process lost its outbox
	messages *webhooktest.Messages
	told     map[string]webhook.Event // the newest event, by its subject
}

func newReceiver(s *simulation) *receiver {
	return &receiver{s: s, messages: webhooktest.NewMessages(s.broken), told: map[string]webhook.Event{}}
}

func (r *receiver) set(failing bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failing = failing
}

// lose notes that a single process began with an empty outbox.
func (r *receiver) lose() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lostAt = time.Now()
}

// sender is the way from one life of a process to the receiver.
type sender struct {
	*receiver
	l *life
}

var errTimedOut = errors.New("the receiver does not answer")

// RoundTrip implements http.RoundTripper. An attempt may be refused, may arrive without an answer, or may not arrive.
func (w sender) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	if err := w.l.pass(); err != nil {
		return nil, err
	}

	luck, delay := w.l.toss(20 * time.Millisecond)
	if err := wait(req.Context(), delay); err != nil {
		return nil, err
	}

	w.mu.Lock()
	if !w.failing {
		luck = 1
	}
	w.mu.Unlock()

	status := http.StatusNoContent
	switch {
	case luck < 0.1:
		return nil, syscall.ECONNREFUSED
	case luck < 0.2:
		status = http.StatusServiceUnavailable
	case luck < 0.23:
		<-req.Context().Done()
		return nil, errTimedOut
	case luck < 0.35:
		w.receive(req.Header.Get("Webhook-Id"), string(body))
		return nil, syscall.ECONNRESET
	default:
		w.receive(req.Header.Get("Webhook-Id"), string(body))
	}

	if err := w.l.pass(); err != nil {
		return nil, err
	}

	return &http.Response{StatusCode: status, Body: http.NoBody, Request: req}, nil
}

// receive takes a message, and checks what holds for every message.
func (r *receiver) receive(id, body string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	for _, e := range r.messages.Take(id, body) {
		r.eventLocked(e)
	}
}

// eventLocked takes an event that the receiver did not have yet.
func (r *receiver) eventLocked(e webhook.Event) {
	r.s.detail("the receiver is told: %s is %s", about(e), e.Type)
	if e.Count != nil {
		r.countLocked(e)
	}

	last := r.told[about(e)]
	// A process may have kept an event that the store has lost, and send it late.
	if e.Timestamp.Before(last.Timestamp) && r.isLostLocked(e) {
		return
	}
	r.told[about(e)] = e

	isOff := e.Type == webhook.Vacated || e.Type == webhook.Offline
	switch {
	case isOff && !isOn(last):
		r.s.broken("once", "%s is %s after it was %q", about(e), e.Type, last.Type)
	case isOn(e) && isOn(last) && !r.isLostLocked(last):
		r.s.broken("once", "%s is %s twice", about(e), e.Type)
	}
}

// countLocked checks that the store had the count of the event under the version of the event.
func (r *receiver) countLocked(e webhook.Event) {
	v, err := presence.ParseVersion(e.Version)
	// After a loss the version of a page without users comes from the repair, not from a write.
	if err != nil || *e.Count != 0 && !r.s.store.past.isMade(e.Page, v, *e.Count) {
		r.s.broken("–", "%s is told as %d, of version %s, which no write has made, %v", about(e), *e.Count, v, err)
	}
}

// isLostLocked reports whether the store has lost data since the event was made.
func (r *receiver) isLostLocked(e webhook.Event) bool {
	r.s.store.mu.Lock()
	lostAt := r.s.store.lostAt
	r.s.store.mu.Unlock()
	if r.lostAt.After(lostAt) {
		lostAt = r.lostAt
	}

	return !lostAt.IsZero() && !lostAt.Before(e.Timestamp)
}

// check waits until the receiver's newest events are true. That takes more than a minute if a process has died after it
// noticed a departure, or if several attempts failed in a row.
func (r *receiver) check() {
	truth := r.s.crowd.truth()
	wrong := r.wrong(truth)
	for end := time.Now().Add(150 * time.Second); wrong != "" && time.Now().Before(end); {
		time.Sleep(time.Second)
		wrong = r.wrong(truth)
	}
	if wrong != "" {
		r.s.broken("newest", "the receiver of webhooks: %s", wrong)
	}
}

// wrong returns what the receiver wrongly has as its newest event; empty if all is right.
func (r *receiver) wrong(truth map[string]map[string]struct{}) string {
	r.mu.Lock()
	defer r.mu.Unlock()

	for _, page := range r.s.pages {
		is := len(truth[page])
		count := r.told["count of "+page]
		page := r.told["page "+page]
		told := int64(0)
		if count.Count != nil {
			told = *count.Count
		}

		// If a page becomes empty after the store has lost its report, there is no event.
		isExcused := is == 0 && r.isLostLocked(page)
		if isOn(page) != (is > 0) && !isExcused {
			return fmt.Sprintf("of %d users on a page the last event is %+v", is, page)
		}
		isExcused = is == 0 && r.isLostLocked(count)
		if told != int64(is) && !isExcused {
			return fmt.Sprintf("of %d users on a page the last event is %+v of %d", is, count, told)
		}
	}

	for _, name := range r.s.crowd.names() {
		_, is := truth[presence.AllPages][name]
		last := r.told["user "+name]
		// If a user leaves after a loss and before the user is reported again, there is no event.
		isExcused := !is && r.isLostLocked(last)
		if isOn(last) != is && !isExcused {
			return fmt.Sprintf("of %s, who is here: %t, the last event is %+v", name, is, last)
		}
	}

	return ""
}

// hookStore is the part of the store that webhooks use.
type hookStore struct{ *handle }

func (h hookStore) use(ctx context.Context, do func(*webhookmem.Store) error) error {
	err := h.call(ctx, func() error { return do(h.hooks) })
	if err != nil {
		return fmt.Errorf("%w: %w", webhook.ErrUnavailable, err)
	}

	return nil
}

func (h hookStore) Report(
	ctx context.Context, changes []webhook.Change,
) (reported []string, dropped int, err error) {
	err = h.use(ctx, func(s *webhookmem.Store) (err error) {
		reported, dropped, err = s.Report(ctx, changes)
		return err
	})
	if err != nil {
		return nil, 0, err
	}

	return reported, dropped, nil
}

func (h hookStore) Reported(ctx context.Context, hook string) (states map[string]string, err error) {
	err = h.use(ctx, func(s *webhookmem.Store) (err error) {
		states, err = s.Reported(ctx, hook)
		return err
	})
	if err != nil {
		return nil, err
	}

	return states, nil
}

func (h hookStore) Take(ctx context.Context, hook string) (events []string, waiting int, err error) {
	err = h.use(ctx, func(s *webhookmem.Store) (err error) {
		events, waiting, err = s.Take(ctx, hook)
		return err
	})
	if err != nil {
		return nil, 0, err
	}

	return events, waiting, nil
}

func (h hookStore) Acknowledge(ctx context.Context, hook, first string, n int) error {
	return h.use(ctx, func(s *webhookmem.Store) error { return s.Acknowledge(ctx, hook, first, n) })
}

// Pages implements presence.Lister.
func (h *handle) Pages(ctx context.Context, fn func(pages []string)) error {
	return h.call(ctx, func() error { return h.inner.Pages(ctx, fn) })
}

// hookBuckets says which buckets a dispatcher serves. Webhooks count in the buckets of a real cluster, and the
// simulation has fewer.
type hookBuckets struct {
	*webhook.Service
	pages []string
}

func (w hookBuckets) Serve(buckets []int) {
	names := slices.Clone(w.pages)
	for _, h := range simHooks() {
		names = append(names, h.ID)
	}

	var served []int
	for _, name := range names {
		if slices.Contains(buckets, presence.Bucket(name, simBuckets)) {
			served = append(served, presence.Bucket(name, presence.DefaultBuckets))
		}
	}
	w.Service.Serve(served)
}
