package presencemem

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

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/presence"
	"headcount/unread"
)

func reopen(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Config{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestDirectoryKeepsEverything: after a restart the follows, changes, keys and the secret are those of before.
func TestDirectoryKeepsEverything(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := reopen(t, dir)

	secret := s.Secret()
	u, author := unread.User{1}, unread.User{2, 0, 0xff}
	b := unread.NewFollowService(s)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	pages := []string{"p", "ü \"\\", "never changed"}
	for _, page := range pages {
		must(b.Follow(t.Context(), u, page))
	}
	must(b.Follow(t.Context(), u, "ended"))
	must(b.Unfollow(t.Context(), u, "ended"))

	for range 3 {
		must(s.Change(t.Context(), "p", unread.Change{Key: "k"}))
		must(s.Change(t.Context(), pages[1], unread.Change{By: &author}))
	}

	// A reset and a later change, so that one page is unread and two are read.
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	must(s.Change(t.Context(), pages[1], unread.Change{Title: "ü", URL: "/a b"}))

	type all struct {
		records []unread.Record
		levels  []unread.Level
		owns    []unread.Own
		unread  int64
		updated time.Time
		list    []unread.Notification
	}

	read := func(s *Store) (a all) {
		t.Helper()
		var err error
		a.records, err = s.Records(t.Context(), []unread.User{u, author})
		must(err)
		a.levels, a.owns, err = s.Levels(t.Context(), author, pages)
		must(err)
		a.unread, a.updated, err = unread.NewFollowService(s).Unread(t.Context(), u)
		must(err)
		a.list, _, err = unread.NewFollowService(s).Notifications(t.Context(), u, 50)
		must(err)
		return a
	}
	before := read(s)

	must(s.Close())
	s = reopen(t, dir)
	after := read(s)
	if fmt.Sprint(after) != fmt.Sprint(before) || after.unread != 1 || after.list[0].URL != "/a b" {
		t.Errorf("after the restart: %+v; before: %+v", after, before)
	}

	if s.Secret() != secret || secret == "" {
		t.Errorf("the secret is %q, and was %q before", s.Secret(), secret)
	}

	must(s.Change(t.Context(), "p", unread.Change{Key: "k"}))
	if a := read(s); a.levels[0].All != 1 {
		t.Errorf("a repetition after the restart counted: %+v, want 1 change", a.levels[0])
	}

	must(s.Close())
}

// TestDirectoryServesOneProcess: a second process is refused while the first one uses the directory.
func TestDirectoryServesOneProcess(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("the second Open returns %v, want that the directory is in use", err)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// Close has released the file.
	s = reopen(t, dir)
	_ = s.Close()
}

// TestBadDirectories: a directory that cannot be used is refused, with its name and the reason.
func TestBadDirectories(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}

	// The file is longer than a page of bbolt, so that its head is read.
	garbage := t.TempDir()
	text := []byte(strings.Repeat("garbage", 2000))
	if err := os.WriteFile(filepath.Join(garbage, dataFile), text, 0o600); err != nil {
		t.Fatal(err)
	}

	for name, dir := range map[string]string{
		"a file": file, "below a file": filepath.Join(file, "d"), "garbage": garbage,
	} {
		if s, err := Open(dir, Config{}); err == nil {
			_ = s.Close()
			t.Errorf("%s: Open succeeds, want an error", name)
		} else if !strings.Contains(err.Error(), "data directory") {
			t.Errorf("%s: %v, want an error about the data directory", name, err)
		}
	}

	for name, tc := range map[string]struct{ bucket, key, value, want string }{
		"another format": {
			"meta", "format", "2", `its format is "2", this version knows "1"; use the version that wrote it`,
		},
		"another program's file": {"theirs", "k", "v", "another program's file"},
	} {
		dir := t.TempDir()
		inFile(t, dir, func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists([]byte(tc.bucket))
			if err != nil {
				return err
			}

			return b.Put([]byte(tc.key), []byte(tc.value))
		})

		if s, err := Open(dir, Config{}); err == nil {
			_ = s.Close()
			t.Errorf("%s: Open succeeds, want an error", name)
		} else if !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// inFile changes the file of a data directory without the store.
func inFile(t *testing.T, dir string, fn func(*bbolt.Tx) error) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(dir, dataFile), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(fn), db.Close()); err != nil {
		t.Fatal(err)
	}
}

// The file keeps nothing about a user who was erased, or who follows nothing and had nothing unread. A later record of
// that user has a greater version.
func TestNothingIsKeptOfAnErasedUser(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	// At the erasure one user has read the change, and the other has not.
	erased, ended := unread.User{1}, unread.User{2}

	book := unread.NewFollowService(s)

	for _, user := range []unread.User{erased, ended} {
		if err := book.Follow(t.Context(), user, "p"); err != nil {
			t.Fatal(err)
		}
	}

	if err := s.Change(t.Context(), "p", unread.Change{}); err != nil {
		t.Fatal(err)
	}
	if _, err := book.Reset(t.Context(), erased); err != nil {
		t.Fatal(err)
	}

	err := errors.Join(
		book.Forget(t.Context(), erased), book.Follow(t.Context(), ended, "q"), book.Forget(t.Context(), ended),
	)
	if err != nil {
		t.Fatal(err)
	}

	// The version of the erased record is not in the file, and must still be exceeded after the restart.
	former, err := s.Records(t.Context(), []unread.User{erased})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	inFile(t, dir, func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{recordsBucket, followsBucket} {
			if n := tx.Bucket(name).Stats().KeyN; n != 0 {
				t.Errorf("%s has %d entries, want none", name, n)
			}
		}
		return nil
	})

	s = reopen(t, dir)
	if err := unread.NewFollowService(s).Follow(t.Context(), erased, "p"); err != nil {
		t.Fatal(err)
	}

	again, err := s.Records(t.Context(), []unread.User{erased})
	if err != nil || again[0].Version.Compare(former[0].Version) <= 0 {
		t.Errorf("the record of the erased user has version %s, want one greater than %s; %v",
			again[0].Version, former[0].Version, err)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// Malformed entries are dropped, and logged once.
func TestDropsWhatCannotBeRead(t *testing.T) {
	u, author := unread.User{1}, unread.User{2}
	for name, tc := range map[string]struct {
		bucket, key, value string
		all, by            int64 // of the page "p" after it
		follows            []string
		says               string
	}{
		"own changes without page": {
			"owns", "q\x00" + string(author[:]), "1 1 0", 3, 1, []string{"p"},
			`own changes of \"q\", without their page`,
		},
		"a follow without its record": {
			"follows", string(author[:]) + "z", "0 0 0 0", 3, 1, []string{"p"}, `a follow of \"z\" without its record`,
		},
		"a page that cannot be read": {"pages", "p", "1 2", 0, 0, []string{"p"}, `the changes of \"p\"`},
		"a record of nobody":         {"records", "short", "1 1 0", 3, 1, []string{"p"}, "a record: "},
		"a follow of nobody":         {"follows", "short", "0 0 0 0", 3, 1, []string{"p"}, "a follow of nobody"},
		"a follow that cannot be read": {
			"follows", string(u[:]) + "q", "0", 3, 1, []string{"p"}, `the follow of \"q\" is malformed`,
		},
		"a key of another length": {"keys", "k", "v", 3, 1, []string{"p"}, "an idempotency key: "},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := reopen(t, dir)
			err := errors.Join(
				unread.NewFollowService(s).Follow(t.Context(), u, "p"),
				s.Change(t.Context(), "p", unread.Change{}),
				s.Change(t.Context(), "p", unread.Change{}),
				s.Change(t.Context(), "p", unread.Change{By: &author}),
				s.Close(),
			)

			if err != nil {
				t.Fatal(err)
			}

			inFile(t, dir, func(tx *bbolt.Tx) error {
				return tx.Bucket([]byte(tc.bucket)).Put([]byte(tc.key), []byte(tc.value))
			})

			// The first start has dropped the entry, so the second one logs nothing.
			for _, says := range []string{tc.says, ""} {
				var log strings.Builder
				s, err := Open(dir, Config{Log: zerolog.New(&log)})
				if err != nil {
					t.Fatal(err)
				}

				levels, _, _ := s.Levels(t.Context(), u, []string{"p"})
				records, _ := s.Records(t.Context(), []unread.User{u})
				if levels[0].All != tc.all || levels[0].By != tc.by || !slices.Equal(records[0].Pages(), tc.follows) {
					t.Errorf("got %+v, %+v; want %d changes, %d own, follows %q",
						levels[0], records[0], tc.all, tc.by, tc.follows)
				}
				if got := log.String(); says == "" && got != "" || !strings.Contains(got, says) {
					t.Errorf("the log says %q, want %q", got, says)
				}

				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A transaction that fails after its last write is in the file. The probe of the disk undoes it.
func TestProbeUndoesWhatFailedLate(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	if err := s.Change(t.Context(), "p", unread.Change{Key: "first"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = New(Config{})
	d, _, err := openDisk(dir, s)
	if err != nil {
		t.Fatal(err)
	}

	// The transaction reaches the file, but the store treats it as failed, as after an error of the last sync.
	tx := newTransaction(&s.unread, time.Now())
	tx.change("p", unread.Change{Key: "k", By: &unread.User{1}})
	tx.change("q", unread.Change{})

	if err := d.update(tx.puts(), &d.undo); err != nil {
		t.Fatal(err)
	}

	d.fail(errors.New("the last step"))
	d.probe()
	if err := errors.Join(d.writable(), d.db.Close()); err != nil {
		t.Fatal(err)
	}

	s = reopen(t, dir)
	defer s.Close()
	levels, owns, _ := s.Levels(t.Context(), unread.User{1}, []string{"p", "q"})
	first, second := levels[0], levels[1]
	if first.All != 1 || first.By != 0 || owns[0] != (unread.Own{}) || second != (unread.Level{}) ||
		len(s.unread.keys) != 1 {
		t.Errorf("got %+v %+v, %d keys; want the state before the failed transaction", levels, owns, len(s.unread.keys))
	}
}

// stopped returns a store with a directory whose writer does not run.
func stopped(t *testing.T) *Store {
	t.Helper()
	s := New(Config{})
	var err error
	s.unread.disk, _, err = openDisk(t.TempDir(), s)
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// A change whose caller gives up before the writer reaches it is not made.
func TestGivingUp(t *testing.T) {
	s := stopped(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.Change(ctx, "p", unread.Change{})
	if !errors.Is(err, presence.ErrUnavailable) || !strings.Contains(err.Error(), "was not carried out") {
		t.Errorf("the change that was given up returns %v", err)
	}

	go s.unread.disk.run(s.commit)
	if err := errors.Join(s.Change(t.Context(), "p", unread.Change{}), s.Close()); err != nil {
		t.Fatal(err)
	}

	if l, _, _ := s.Levels(t.Context(), unread.User{}, []string{"p"}); l[0].All != 1 {
		t.Errorf("the levels are %+v, want 1 change", l)
	}

	if err := s.Change(t.Context(), "p", unread.Change{}); !errors.Is(err, presence.ErrUnavailable) {
		t.Errorf("after Close a change returns %v, want ErrUnavailable", err)
	}
}

// The queue of changes is bounded, and Close writes all queued changes.
func TestWaitingIsBounded(t *testing.T) {
	s := stopped(t)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error)
	for range maxWaiting + 7 {
		go func() { errs <- s.Change(ctx, "p", unread.Change{}) }()
	}

	// Callers beyond the bound are refused at once, without the writer.
	for range 7 {
		err := <-errs
		if !errors.Is(err, presence.ErrUnavailable) || !strings.Contains(err.Error(), "wait for the disk already") {
			t.Errorf("beyond the bound: %v, want ErrUnavailable", err)
		}
	}
	go s.unread.disk.run(s.commit)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	for range maxWaiting {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}

	cancel()
	if l, _, _ := s.Levels(t.Context(), unread.User{}, []string{"p"}); l[0].All != maxWaiting {
		t.Errorf("the levels are %+v, want %d changes", l, maxWaiting)
	}
}

// Many calls share few transactions.
func TestCallsShareTransactions(t *testing.T) {
	s := reopen(t, t.TempDir())
	defer s.Close()
	transactions := func() (n int) {
		err := s.unread.disk.db.View(func(tx *bbolt.Tx) error {
			n = tx.ID()
			return nil
		})

		if err != nil {
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

	// Each call was carried out, though many of them shared a transaction.
	levels, _, err := s.Levels(t.Context(), unread.User{}, []string{"p0", "p9"})
	if err != nil || levels[0].All != 20 || levels[1].All != 20 {
		t.Errorf("the levels are %+v, %v; want 20 changes of each page", levels, err)
	}

	// The bound is loose, because on a slow machine few calls may arrive during a transaction.
	if n := transactions() - before; n < 1 || n > 150 {
		t.Errorf("200 simultaneous changes took %d transactions, want 1 to 150", n)
	}
}

// TestKeysAreForgottenAfterADay: a repetition under a key is known for a day, and later the key is dropped.
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
			t.Errorf("within the day of the key there are %d changes, want 1", n)
		}

		if err := s.Change(t.Context(), "q", unread.Change{Key: "another"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		// Each change drops keys that are too old.
		if err := s.Change(t.Context(), "q", unread.Change{Key: "one more"}); err != nil {
			t.Fatal(err)
		}

		if n := count(); n != 2 {
			t.Errorf("after the day of the key there are %d changes, want 2", n)
		}

		if len(s.unread.keys) != 3 || len(s.unread.oldest) != 3 {
			t.Errorf("%d keys are kept in %d, want 3", len(s.unread.keys), len(s.unread.oldest))
		}
	})
}

// TestRecordsAreCopies: a record that was read does not change with the store.
func TestRecordsAreCopies(t *testing.T) {
	s := New(Config{})
	b := unread.NewFollowService(s)
	for _, page := range []string{"b", "c", "a"} {
		if err := b.Follow(t.Context(), unread.User{}, page); err != nil {
			t.Fatal(err)
		}
	}

	r, err := s.Records(t.Context(), []unread.User{{}})
	if err != nil {
		t.Fatal(err)
	}

	// A change of the record must not reach the copy that was read.
	if err := b.Unfollow(t.Context(), unread.User{}, "a"); err != nil {
		t.Fatal(err)
	}

	if got := r[0].Pages(); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("a record that was read has become %q", got)
	}
}

// A data directory keeps its own key of user hashes.
func TestADirectoryKeepsItsHashKey(t *testing.T) {
	key := func(dir string) string {
		s, err := Open(dir, Config{})
		if err != nil {
			t.Fatal(err)
		}

		defer s.Close()
		k, err := s.HashKey()
		if err != nil {
			t.Fatal(err)
		}

		return string(k)
	}

	dir := t.TempDir()
	first := key(dir)
	if again := key(dir); again != first || first == "" {
		t.Errorf("the key of the directory was %s, and is %s", first, again)
	}

	if key(t.TempDir()) == first {
		t.Error("another directory has the same key")
	}
}

// Stored users are found by their hashes. So a directory with users, but without the key of the hashes, gets no new
// key: with it the users would be lost.
func TestUsersWithoutAHashKeyAreRefused(t *testing.T) {
	s, err := Open(t.TempDir(), Config{})
	if err != nil {
		t.Fatal(err)
	}

	defer s.Close()
	err = s.unread.disk.db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket(recordsBucket).Put([]byte("user"), []byte("record"))
	})
	if err != nil {
		t.Fatal(err)
	}

	if key, err := s.HashKey(); err == nil {
		t.Errorf("the directory got a new key: %x", key)
	}
}
