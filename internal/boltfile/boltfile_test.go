package boltfile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
)

var (
	format  = []byte("1")
	buckets = [][]byte{[]byte("entries")}
)

func open(path string, load func(*bbolt.DB) error) (*bbolt.DB, error) {
	return Open(path, nil, format, buckets, load)
}

func nothing(*bbolt.DB) error { return nil }

// change makes a transaction in the file at path.
func change(t *testing.T, path string, f func(*bbolt.Tx) error) {
	t.Helper()
	db, err := open(path, nothing)
	if err == nil {
		err = errors.Join(db.Update(f), db.Close())
	}

	if err != nil {
		t.Fatal(err)
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file.db")

	refused := func(says string, load func(*bbolt.DB) error) {
		t.Helper()
		for range 2 { // a refused Open has closed the file, so a second one fails in the same way
			if _, err := open(path, load); err == nil || !strings.Contains(err.Error(), says) ||
				!strings.Contains(err.Error(), path) {
				t.Errorf("%v, want %q", err, says)
			}
		}
	}

	db, err := open(path, nothing)
	if err != nil {
		t.Fatal(err)
	}

	refused("in use by another process; end that one", nothing)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	refused("no luck", func(*bbolt.DB) error { return errors.New("no luck") })

	// An older file gets the buckets that it lacks.
	change(t, path, func(tx *bbolt.Tx) error { return tx.DeleteBucket(buckets[0]) })
	change(t, path, func(tx *bbolt.Tx) error {
		return errors.Join(tx.Bucket(buckets[0]).Put([]byte("a"), nil), tx.Bucket(Meta).Put(FormatKey, []byte("2")))
	})

	refused(`its format is "2", this version knows "1"; use the version that wrote it`, nothing)
}

func TestAnotherProgramsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file.db")
	change(t, path, func(tx *bbolt.Tx) error { return tx.DeleteBucket(Meta) })

	if _, err := open(path, nothing); err == nil ||
		!strings.Contains(err.Error(), "it is another program's file; give a directory of its own") {
		t.Errorf("the file of another program gives %v", err)
	}
}

func TestDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file.db")
	change(t, path, func(tx *bbolt.Tx) error {
		for i := range 1000 {
			if err := tx.Bucket(buckets[0]).Put([]byte(strconv.Itoa(i)), make([]byte, 100)); err != nil {
				return err
			}
		}

		return nil
	})

	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	// This damages a leaf page in the middle, which only a check of the whole file finds.
	page := os.Getpagesize()
	zeroed, scrambled := bytes.Clone(whole), bytes.Clone(whole)
	at := bytes.LastIndex(whole, []byte("999")) / page * page // where a leaf begins
	clear(zeroed[at : at+page])
	for i := range page {
		scrambled[at+i] = byte(i*7 + i>>8)
	}

	for name, text := range map[string][]byte{
		"nothing":         nil,
		"text":            []byte("no database at all"),
		"half a page":     whole[:2000],
		"its first page":  whole[:os.Getpagesize()],
		"half of it":      whole[:len(whole)/2],
		"most of it":      whole[:len(whole)-3*os.Getpagesize()],
		"one page is 0":   zeroed,
		"one page is odd": scrambled,
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}

			_, err := open(path, nothing)
			if err == nil || !strings.HasPrefix(err.Error(), path) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("the error is %v, want the path and the reason in one line", err)
			}

			if checked := Check(path, nil); checked == nil || checked.Error() != err.Error() {
				t.Errorf("Check: %v; Open: %v", checked, err)
			}

			if left, _ := os.ReadFile(path); !bytes.Equal(left, text) {
				t.Error("a refused file was changed")
			}
		})
	}
}

func TestLoadThatPanics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file.db")
	_, err := open(path, func(*bbolt.DB) error { panic("page 7: invalid page type") })

	if err == nil || !strings.Contains(err.Error(),
		"the file is damaged (page 7: invalid page type); put a copy of it in its place") {
		t.Errorf("a damaged file gives %v", err)
	}
	change(t, path, func(*bbolt.Tx) error { return nil }) // Open has closed the file
}
