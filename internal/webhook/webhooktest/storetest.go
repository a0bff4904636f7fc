// Package webhooktest is the contract of a webhook.Store, as tests.
package webhooktest

import (
	"fmt"
	"slices"
	"testing"

	"headcount/internal/webhook"
)

// Hooks are those of the stores under test.
func Hooks(t testing.TB) []*webhook.Hook {
	t.Helper()
	hooks, err := webhook.Parse([]string{"page:a/*=http://receiver.test/a", "page:b/*=http://receiver.test/b"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return hooks
}

// Run tests the stores that open returns: each call opens one more over the same data.
func Run(t *testing.T, open func(t *testing.T) webhook.Store) {
	hooks := Hooks(t)
	a, b := hooks[0].ID, hooks[1].ID
	s := open(t)
	tell := func(want string, dropped int, changes ...webhook.Change) {
		t.Helper()
		told, n, err := s.Tell(t.Context(), changes)
		if err != nil || fmt.Sprint(told) != want || n != dropped {
			t.Fatalf("told %v and dropped %d, %v; want %s and %d", told, n, err, want, dropped)
		}
	}
	take := func(hook string, waiting int, want ...string) {
		t.Helper()
		events, n, err := s.Take(t.Context(), hook)
		if err != nil || !slices.Equal(events, want) || n != waiting {
			t.Fatalf("took %q of %d, %v; want %q of %d", events, n, err, want, waiting)
		}
	}
	done := func(hook, first string) {
		t.Helper()
		if err := s.Done(t.Context(), hook, first); err != nil {
			t.Fatal(err)
		}
	}
	up := func(hook, subject, event string) webhook.Change {
		return webhook.Change{Hook: hook, Subject: subject, Is: "1", Event: event}
	}

	take(a, 0)
	tell("[1 1 1]", 0, up(a, "a/1", "e1"), up(b, "b/1", "f1"), up(a, "a/2", "e2"))
	tell("[1]", 0, up(a, "a/1", "e1 again"))                                                   // somebody has told it
	tell("[1 ]", 0, webhook.Change{Hook: a, Subject: "a/1", Was: "1", Is: "1", Event: "none"}, // a question
		webhook.Change{Hook: a, Subject: "a/9", Was: "1", Is: "1", Event: "none"})
	take(a, 2, "e1", "e2")
	tell("[]", 0, webhook.Change{Hook: a, Subject: "a/1", Was: "1", Event: "e3"})
	take(a, 3, "e1", "e2") // the batch stays as it is
	done(a, "e2")          // which is not the first
	s = open(t)            // another process, or the same one after a restart
	take(a, 3, "e1", "e2")
	done(a, "e1")
	done(a, "e1")
	take(a, 1, "e3")
	take(b, 1, "f1")
	done(a, "e3")
	take(a, 0)
	for hook, want := range map[string]string{a: "map[a/2:1]", b: "map[b/1:1]"} {
		if told, err := s.Told(t.Context(), hook); err != nil || fmt.Sprint(told) != want {
			t.Errorf("told %v, %v; want %s", told, err, want)
		}
	}

	// At the bound the oldest go, and a batch that is under way goes as a whole.
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
			_, some, err := s.Tell(t.Context(), changes)
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
	tell("[1]", webhook.MaxBatch, up(a, "one more", "h1"))
	done(a, events[0]) // of a batch that is gone
	if events, waiting, err := s.Take(t.Context(), a); err != nil || waiting != webhook.MaxQueue-webhook.MaxBatch+1 || events[0] != fmt.Sprint("g", webhook.MaxQueue-webhook.MaxBatch) {
		t.Fatalf("took %q… of %d, %v", events[0], waiting, err)
	}
	if told, err := s.Told(t.Context(), a); err != nil || len(told) != webhook.MaxQueue+2 {
		t.Errorf("%d are told, %v", len(told), err)
	}
}
