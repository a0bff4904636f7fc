// Package webhooktest tests that a store keeps the contract of webhook.Store, and checks the messages that a receiver
// gets.
package webhooktest

import (
	"fmt"
	"slices"
	"testing"

	"headcount/webhook"
)

// Hooks returns the hooks of the stores under test.
func Hooks(t testing.TB) []*webhook.Hook {
	t.Helper()
	hooks, err := webhook.Parse([]string{"page:a/*=http://receiver.test/a", "page:b/*=http://receiver.test/b"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return hooks
}

// Run tests the stores that open returns. Each call of open returns another store over the same data.
func Run(t *testing.T, open func(t *testing.T) webhook.Store) {
	hooks := Hooks(t)
	s := &store{open(t), t}
	s.keeps(open, hooks[0].ID, hooks[1].ID)
	s.drops(hooks[0].ID)
}

// A store is the store under test.
type store struct {
	webhook.Store
	t *testing.T
}

func (s *store) report(want string, dropped int, changes ...webhook.Change) {
	s.t.Helper()
	reported, n, err := s.Report(s.t.Context(), changes)
	if err != nil || fmt.Sprint(reported) != want || n != dropped {
		s.t.Fatalf("reported %v and dropped %d, %v; want %s and %d", reported, n, err, want, dropped)
	}
}

func (s *store) take(hook string, waiting int, want ...string) {
	s.t.Helper()
	events, n, err := s.Take(s.t.Context(), hook)
	if err != nil || !slices.Equal(events, want) || n != waiting {
		s.t.Fatalf("took %q of %d, %v; want %q of %d", events, n, err, want, waiting)
	}
}

func (s *store) acknowledge(hook, first string, n int) {
	s.t.Helper()
	if err := s.Acknowledge(s.t.Context(), hook, first, n); err != nil {
		s.t.Fatal(err)
	}
}

func up(hook, subject, event string) webhook.Change {
	return webhook.Change{Hook: hook, Subject: subject, Is: "1", Event: event}
}

// keeps tests that a store, and another one over the same data, keep the events and the reported states of two hooks.
func (s *store) keeps(open func(t *testing.T) webhook.Store, a, b string) {
	s.take(a, 0)
	s.report("[1 1 1]", 0, up(a, "a/1", "e1"), up(b, "b/1", "f1"), up(a, "a/2", "e2"))
	s.report("[1]", 0, up(a, "a/1", "e1 again")) // this state is already reported
	reads := webhook.Change{Hook: a, Subject: "a/1", Was: "1", Is: "1", Event: "none"}
	other := reads
	other.Subject = "a/9"
	s.report("[1 ]", 0, reads, other)

	s.take(a, 2, "e1", "e2")
	s.report("[]", 0, webhook.Change{Hook: a, Subject: "a/1", Was: "1", Event: "e3"})
	s.take(a, 3, "e1", "e2")  // the batch stays the same until it is acknowledged
	s.acknowledge(a, "e2", 1) // no effect: e2 is not the first of the batch

	s.Store = open(s.t) // another process, or the same one after a restart
	s.take(a, 3, "e1", "e2")
	s.acknowledge(a, "e1", 1)
	s.acknowledge(a, "e1", 1)
	s.take(a, 2, "e2", "e3")
	s.take(b, 1, "f1")
	s.acknowledge(a, "e2", 2)
	s.take(a, 0)

	for hook, want := range map[string]string{a: "map[a/2:1]", b: "map[b/1:1]"} {
		if reported, err := s.Reported(s.t.Context(), hook); err != nil || fmt.Sprint(reported) != want {
			s.t.Errorf("reported %v, %v; want %s", reported, err, want)
		}
	}
}

// drops tests the bound of the queue. Beyond it the oldest events are dropped, and a batch that was taken is dropped as
// a whole. It runs after keeps, whose states are still reported.
func (s *store) drops(hook string) {
	for n := webhook.MaxQueue; n > 0; {
		var changes []webhook.Change
		for range min(n, 1000) {
			changes = append(changes, up(hook, fmt.Sprint("a/more ", n), fmt.Sprint("g", n)))
			n--
		}
		if _, dropped, err := s.Report(s.t.Context(), changes); err != nil || dropped != 0 {
			s.t.Fatalf("dropped %d below the bound, %v", dropped, err)
		}
	}

	events, _, err := s.Take(s.t.Context(), hook)
	if err != nil || len(events) != webhook.MaxBatch || events[0] != fmt.Sprint("g", webhook.MaxQueue) {
		s.t.Fatalf("took %d, %v", len(events), err)
	}

	const left = webhook.MaxQueue - webhook.MaxBatch
	s.report("[1]", webhook.MaxBatch, up(hook, "one more", "h1"))
	s.acknowledge(hook, events[0], len(events)) // of a batch that was dropped
	events, waiting, err := s.Take(s.t.Context(), hook)
	if err != nil || waiting != left+1 || events[0] != fmt.Sprint("g", left) {
		s.t.Fatalf("took %q of %d, %v", events, waiting, err)
	}

	if reported, err := s.Reported(s.t.Context(), hook); err != nil || len(reported) != webhook.MaxQueue+2 {
		s.t.Errorf("%d are reported, %v", len(reported), err)
	}
}
