package webhookmem

import (
	"errors"
	"strings"
	"testing"

	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/internal/webhook"
	"headcount/internal/webhook/webhooktest"
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
		t.Errorf("a second process opened it: %v", err)
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
			t.Errorf("%d and %d are told, %v", len(reported), len(other), err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAnotherFormat(t *testing.T) {
	for want, change := range map[string]func(*bbolt.Tx) error{
		`its format is "2"`:      func(tx *bbolt.Tx) error { return tx.Bucket(boltfile.Meta).Put(boltfile.FormatKey, []byte("2")) },
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
			t.Errorf("%v, want %q", err, want)
		}
	}
}
