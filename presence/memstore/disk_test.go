package memstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"headcount/presence"
	"headcount/presence/unread"
)

func reopen(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Config{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDirectoryKeepsEverything(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := reopen(t, dir)
	secret := s.Secret()
	u, author := unread.User{1}, unread.User{2, 0, 0xff}
	b := unread.NewBook(s, nil)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pages := []string{"p", "ü \"\\", "never changed"}
	for _, page := range pages {
		must(b.Follow(t.Context(), u, page, page == "p"))
	}
	must(b.Follow(t.Context(), u, "ended", false))
	must(b.Unfollow(t.Context(), u, "ended"))
	for range 3 {
		must(s.Change(t.Context(), "p", unread.Change{Key: "k"}))
		must(s.Change(t.Context(), pages[1], unread.Change{By: &author}))
	}
	must(b.Attend(t.Context(), u, "p", "g/1", true))
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	must(s.Change(t.Context(), pages[1], unread.Change{}))
	type all struct {
		records []unread.Record
		levels  []unread.Level
		owns    []unread.Own
		unread  int64
		updated time.Time
	}
	read := func(s *Store) (a all) {
		t.Helper()
		var err error
		a.records, err = s.Records(t.Context(), []unread.User{u, author})
		must(err)
		a.levels, a.owns, err = s.Levels(t.Context(), author, pages)
		must(err)
		a.unread, a.updated, err = unread.NewBook(s, nil).Unread(t.Context(), u)
		must(err)
		return a
	}
	before := read(s)
	must(s.Close())
	s = reopen(t, dir)
	if after := read(s); fmt.Sprint(after) != fmt.Sprint(before) || after.unread != 1 {
		t.Errorf("%+v was %+v", after, before)
	}
	if s.Secret() != secret || secret == "" {
		t.Errorf("the secret %q was %q", s.Secret(), secret)
	}
	must(s.Change(t.Context(), "p", unread.Change{Key: "k"}))
	if a := read(s); a.levels[0].All != 1 {
		t.Errorf("a key is forgotten: %+v", a.levels[0])
	}
	must(s.Close())
}

func TestDirectoryServesOneProcess(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("the second: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, dir)
	_ = s.Close()
}

func TestBadDirectories(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	garbage := t.TempDir()
	if err := os.WriteFile(filepath.Join(garbage, dataFile), []byte(strings.Repeat("garbage", 2000)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"a file": file, "below a file": filepath.Join(file, "d"), "garbage": garbage} {
		if s, err := Open(dir, Config{}); err == nil {
			_ = s.Close()
			t.Errorf("%s: opened", name)
		} else if !strings.Contains(err.Error(), "data directory") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, tc := range map[string]struct{ bucket, key, value string }{
		"another format":          {"meta", "format", "2"},
		"a page":                  {"pages", "p", "1 2"},
		"a follow of nobody":      {"follows", strings.Repeat("u", 16) + "p", "0 0 0 0"},
		"a record":                {"records", "short", "1 1 0"},
		"own changes of no page":  {"owns", "p\x00" + strings.Repeat("u", 16), "1 1 0"},
		"a key of another length": {"keys", "k", "v"},
	} {
		dir := t.TempDir()
		if err := reopen(t, dir).Close(); err != nil {
			t.Fatal(err)
		}
		db, err := bbolt.Open(filepath.Join(dir, dataFile), 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(db.Update(func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte(tc.bucket)).Put([]byte(tc.key), []byte(tc.value))
		}), db.Close())
		if err != nil {
			t.Fatal(err)
		}
		if s, err := Open(dir, Config{}); err == nil {
			_ = s.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

// What cannot be written is refused, also when it is sent again, until it can be.
func TestDiskFails(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	good := s.notices.disk.db
	bad, err := bbolt.Open(filepath.Join(t.TempDir(), "x"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := bad.Close(); err != nil {
		t.Fatal(err)
	}
	s.notices.disk.swap(bad)
	for range 2 {
		if err := s.Change(t.Context(), "p", unread.Change{Key: "k"}); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("a change that is not on disk: %v", err)
		}
	}
	s.notices.disk.swap(good)
	for end := time.Now().Add(10 * time.Second); s.Change(t.Context(), "p", unread.Change{Key: "k"}) != nil; {
		if time.Now().After(end) {
			t.Fatal("the disk is well, and changes are refused")
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, dir)
	defer s.Close()
	if l, _, _ := s.Levels(t.Context(), unread.User{}, []string{"p"}); l[0].All != 1 {
		t.Errorf("%+v", l)
	}
}

func (d *disk) swap(db *bbolt.DB) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.db = db
}

func TestSyncEndsWithItsContext(t *testing.T) {
	s := reopen(t, t.TempDir())
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.notices.disk.put(pagesBucket, "p", []byte("1 1 0 1"))
	if err := s.notices.disk.sync(ctx); err != nil && !errors.Is(err, presence.ErrUnavailable) {
		t.Error(err)
	}
	if err := s.notices.disk.sync(t.Context()); err != nil {
		t.Error(err)
	}
}

// Many calls share few transactions.
func TestCallsShareTransactions(t *testing.T) {
	s := reopen(t, t.TempDir())
	defer s.Close()
	transactions := func() (n int) {
		if err := s.notices.disk.db.View(func(tx *bbolt.Tx) error { n = tx.ID(); return nil }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := transactions()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			if err := s.Change(t.Context(), fmt.Sprint("p", i%10), unread.Change{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	levels, _, err := s.Levels(t.Context(), unread.User{}, []string{"p0", "p9"})
	if err != nil || levels[0].All != 20 || levels[1].All != 20 {
		t.Errorf("%+v, %v", levels, err)
	}
	if n := transactions() - before; n < 1 || n > 150 {
		t.Errorf("200 changes at once took %d transactions", n)
	}
}

func TestKeysAreForgottenAfterADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{})
		count := func() int64 {
			if err := s.Change(t.Context(), "p", unread.Change{Key: "k"}); err != nil {
				t.Fatal(err)
			}
			l, _, err := s.Levels(t.Context(), unread.User{}, []string{"p"})
			if err != nil {
				t.Fatal(err)
			}
			return l[0].All
		}
		count()
		time.Sleep(unread.KeyFor - time.Second)
		if n := count(); n != 1 {
			t.Errorf("forgotten within its day: %d changes", n)
		}
		if err := s.Change(t.Context(), "q", unread.Change{Key: "another"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		if err := s.Change(t.Context(), "q", unread.Change{Key: "one more"}); err != nil {
			t.Fatal(err)
		}
		if n := count(); n != 2 {
			t.Errorf("remembered after its day: %d changes", n)
		}
		if len(s.notices.keys) != 3 || len(s.notices.oldest) != 3 {
			t.Errorf("%d keys", len(s.notices.keys))
		}
	})
}

func TestRecordsAreCopies(t *testing.T) {
	s := New(Config{})
	b := unread.NewBook(s, nil)
	for _, page := range []string{"b", "c", "a"} {
		if err := b.Follow(t.Context(), unread.User{}, page, false); err != nil {
			t.Fatal(err)
		}
	}
	r, err := s.Records(t.Context(), []unread.User{{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Unfollow(t.Context(), unread.User{}, "a"); err != nil {
		t.Fatal(err)
	}
	if got := r[0].Pages(); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("a record that was read has become %q", got)
	}
}
