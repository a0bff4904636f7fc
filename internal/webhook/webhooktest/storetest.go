// Package webhooktest tests that a store keeps the contract of webhook.Store.
package webhooktest

import (
	"fmt"
	"slices"
	"testing"

	"headcount/internal/webhook"
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
	a, b := hooks[0].ID, hooks[1].ID
	s := open(t)
	report := func(want string, dropped int, changes ...webhook.Change) {
		t.Helper()
		reported, n, err := s.Report(t.Context(), changes)
		if err != nil || fmt.Sprint(reported) != want || n != dropped {
			t.Fatalf("told %v and dropped %d, %v; want %s and %d", reported, n, err, want, dropped)
		}
	}
	take := func(hook string, waiting int, want ...string) {
		t.Helper()
		events, n, err := s.Take(t.Context(), hook)
		if err != nil || !slices.Equal(events, want) || n != waiting {
			t.Fatalf("took %q of %d, %v; want %q of %d", events, n, err, want, waiting)
		}
	}
	acknowledge := func(hook, first string) {
		t.Helper()
		if err := s.Acknowledge(t.Context(), hook, first); err != nil {
			t.Fatal(err)
		}
	}
	up := func(hook, subject, event string) webhook.Change {
		return webhook.Change{Hook: hook, Subject: subject, Is: "1", Event: event}
	}

	take(a, 0)
	report("[1 1 1]", 0, up(a, "a/1", "e1"), up(b, "b/1", "f1"), up(a, "a/2", "e2"))
	report("[1]", 0, up(a, "a/1", "e1 again"))                                                   // it is reported already
	report("[1 ]", 0, webhook.Change{Hook: a, Subject: "a/1", Was: "1", Is: "1", Event: "none"}, // only reads
		webhook.Change{Hook: a, Subject: "a/9", Was: "1", Is: "1", Event: "none"})
	take(a, 2, "e1", "e2")
	report("[]", 0, webhook.Change{Hook: a, Subject: "a/1", Was: "1", Event: "e3"})
	take(a, 3, "e1", "e2") // the batch stays as it is
	acknowledge(a, "e2")   // which is not the first
	s = open(t)            // another process, or the same one after a restart
	take(a, 3, "e1", "e2")
	acknowledge(a, "e1")
	acknowledge(a, "e1")
	take(a, 1, "e3")
	take(b, 1, "f1")
	acknowledge(a, "e3")
	take(a, 0)
	for hook, want := range map[string]string{a: "map[a/2:1]", b: "map[b/1:1]"} {
		if reported, err := s.Reported(t.Context(), hook); err != nil || fmt.Sprint(reported) != want {
			t.Errorf("told %v, %v; want %s", reported, err, want)
		}
	}

	// At the bound the oldest events are dropped, and a sealed batch is dropped as a whole.
	fill := func(n, dropped int) {
		t.Helper()
		for got := 0; n > 0 || got != dropped; {
			if n == 0 {
				t.Fatalf("%d were dropped, want %d", got, dropped)
			}
			var changes []webhook.Change
			for range min(n, 1000) {
				changes = append(changes, up(a, fmt.Sprint("a/more ", n), fmt.Sprint("g", n)))
				n--
			}
			_, some, err := s.Report(t.Context(), changes)
			if err != nil {
				t.Fatal(err)
			}
			got += some
		}
	}
	fill(webhook.MaxQueue, 0)
	events, _, err := s.Take(t.Context(), a)
	if err != nil || len(events) != webhook.MaxBatch || events[0] != fmt.Sprint("g", webhook.MaxQueue) {
		t.Fatalf("took %d, %v", len(events), err)
	}
	report("[1]", webhook.MaxBatch, up(a, "one more", "h1"))
	acknowledge(a, events[0]) // of a batch that was dropped
	if events, waiting, err := s.Take(t.Context(), a); err != nil || waiting != webhook.MaxQueue-webhook.MaxBatch+1 || events[0] != fmt.Sprint("g", webhook.MaxQueue-webhook.MaxBatch) {
		t.Fatalf("took %q… of %d, %v", events[0], waiting, err)
	}
	if reported, err := s.Reported(t.Context(), a); err != nil || len(reported) != webhook.MaxQueue+2 {
		t.Errorf("%d are told, %v", len(reported), err)
	}
}
