package webhookmem

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/webhook"
	"headcount/webhook/webhooktest"
)

func TestInMemory(t *testing.T) {
	s := New()
	webhooktest.Run(t, func(*testing.T) webhook.Store { return s })
}

func TestInADirectory(t *testing.T) {
	dir := t.TempDir()
	var open *Store
	webhooktest.Run(t, func(t *testing.T) webhook.Store {
		if open != nil {
			if err := open.Close(); err != nil {
				t.Fatal(err)
			}
		}

		s, err := Open(dir, webhooktest.Hooks(t))
		if err != nil {
			t.Fatal(err)
		}

		open = s
		return s
	})

	if _, err := Open(dir, nil); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a second Open returns %v, want that the file is in use", err)
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}

	hooks := webhooktest.Hooks(t)
	for range 2 { // the data of a removed hook is deleted
		s, err := Open(dir, hooks[1:])
		if err != nil {
			t.Fatal(err)
		}

		reported, err := s.Reported(t.Context(), hooks[0].ID)
		if other, _ := s.Reported(t.Context(), hooks[1].ID); err != nil || len(reported) != 0 || len(other) != 1 {
			t.Errorf("%d and %d subjects are reported, %v", len(reported), len(other), err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// If the file does not accept a step, no part of it is in memory, not even the dropping of old events.
func TestARefusedStepLeavesNoTrace(t *testing.T) {
	hooks := webhooktest.Hooks(t)
	s, err := Open(t.TempDir(), hooks)
	if err != nil {
		t.Fatal(err)
	}

	hook := hooks[0].ID
	step := func(from, n int) []webhook.Change {
		changes := make([]webhook.Change, n)
		for i := range changes {
			subject := fmt.Sprint("a/", from+i)
			changes[i] = webhook.Change{Hook: hook, Subject: subject, Is: "1", Event: subject}
		}

		return changes
	}

	if _, _, err := s.Report(t.Context(), step(0, webhook.MaxQueue)); err != nil {
		t.Fatal(err)
	}

	before, waiting, err := s.Take(t.Context(), hook)
	if err != nil {
		t.Fatal(err)
	}

	if err := s.Close(); err != nil { // every write fails from now on
		t.Fatal(err)
	}
	if _, _, err := s.Report(t.Context(), step(webhook.MaxQueue, 3)); !errors.Is(err, webhook.ErrUnavailable) {
		t.Fatalf("the step returns %v", err)
	}
	if err := s.Acknowledge(t.Context(), hook, before[0], len(before)); !errors.Is(err, webhook.ErrUnavailable) {
		t.Fatalf("the acknowledgement returns %v", err)
	}

	after, waits, err := s.Take(t.Context(), hook)
	if err != nil || !slices.Equal(after, before) || waits != waiting {
		t.Errorf("got %d events of %d, %v; want the %d of %d from before", len(after), waits, err, len(before), waiting)
	}
	if reported, _ := s.Reported(t.Context(), hook); len(reported) != webhook.MaxQueue {
		t.Errorf("%d subjects are reported, want %d", len(reported), webhook.MaxQueue)
	}
}

func TestAnotherFormat(t *testing.T) {
	for want, change := range map[string]func(*bbolt.Tx) error{
		`its format is "2"`: func(tx *bbolt.Tx) error {
			return tx.Bucket(boltfile.Meta).Put(boltfile.FormatKey, []byte("2"))
		},
		"another program's file": func(tx *bbolt.Tx) error { return tx.DeleteBucket(boltfile.Meta) },
	} {
		dir := t.TempDir()
		s, err := Open(dir, webhooktest.Hooks(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.db.Update(change), s.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
}
