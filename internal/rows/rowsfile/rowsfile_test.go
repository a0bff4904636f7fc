package rowsfile

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/internal/rows"
	"headcount/internal/rows/rowstest"
	"headcount/internal/testkit"
)

// childVariable names the directory in which a child process commits until it is killed.
const childVariable = "HEADCOUNT_ROWSFILE_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childVariable); dir != "" {
		commitUntilKilled(dir)
	}
	testkit.Main(m)
}

func open(t testing.TB, dir string, cfg Config) *Store {
	t.Helper()
	s, err := Open(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })

	return s
}

// writer is the owner of a partition.
type writer struct {
	store     rows.Store
	partition int
	claim     rows.Claim
}

func newWriter(t testing.TB, store rows.Store, partition int) *writer {
	t.Helper()
	claims, err := store.Claim(t.Context(), "test", []rows.Former{{Partition: partition}})
	if err != nil {
		t.Fatal(err)
	}

	return &writer{store: store, partition: partition, claim: claims[0]}
}

// next returns the commit that follows the newest one.
func (w *writer) next(changes ...rows.Row) rows.Commit {
	return rows.Commit{
		Partition: w.partition, Epoch: w.claim.Epoch, After: w.claim.Number, Number: w.claim.Number + 1,
		At: time.Now(), Rows: changes,
	}
}

func (w *writer) commit(t testing.TB, c rows.Commit) error {
	err := w.store.Commit(t.Context(), []rows.Commit{c})[0]
	if err == nil {
		w.claim.Number = c.Number
	}

	return err
}

func put(field string, value []byte) rows.Row {
	return rows.Row{Name: rows.Name{Collection: "c", Field: field}, Value: value}
}

// read returns a row of collection c.
func (w *writer) read(t testing.TB, field string) string {
	t.Helper()
	at := rows.Address{Partition: w.partition, Name: rows.Name{Collection: "c", Field: field}}
	found := w.store.Read(t.Context(), []rows.Address{at})
	if found[0].Err != nil {
		t.Fatal(found[0].Err)
	}

	return string(found[0].Value)
}

func TestContract(t *testing.T) {
	rowstest.RunInBubble(t, func(t *testing.T) rows.Store { return open(t, t.TempDir(), Config{}) })
}

// TestFilesThatCannotBeUsed: a file of another format, or that another program wrote, is refused with the reason.
func TestFilesThatCannotBeUsed(t *testing.T) {
	const inUse = "it is in use by another process; end that one, or give each its own directory"
	const newer = `its format is "3", this version knows "2"; use the version that wrote it`

	for want, prepare := range map[string]func(t *testing.T, dir string){
		inUse: func(t *testing.T, dir string) { open(t, dir, Config{}) },
		newer: func(t *testing.T, dir string) {
			s := open(t, dir, Config{})
			change := func(tx *bbolt.Tx) error { return tx.Bucket(boltfile.Meta).Put(boltfile.FormatKey, []byte("3")) }
			if err := errors.Join(s.db.Update(change), s.Close()); err != nil {
				t.Fatal(err)
			}
		},
		"the file is damaged": func(t *testing.T, dir string) {
			text := strings.Repeat("not a database ", 1000)
			if err := os.WriteFile(filepath.Join(dir, File), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		dir := t.TempDir()
		prepare(t, dir)

		if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), File+": "+want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// TestOthersCannotReadTheFile: only the user of the process may read the directory and the file.
func TestOthersCannotReadTheFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")

	open(t, dir, Config{})
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, File): 0o600} {
		is, err := os.Stat(path)
		if err != nil || is.Mode().Perm() != want {
			t.Errorf("%s has mode %v, %v; want %v", path, is.Mode().Perm(), err, want)
		}
	}
}

// TestDeletedRowsLeaveRoom: the file does not grow, although much more is written and deleted than it has room for.
func TestDeletedRowsLeaveRoom(t *testing.T) {
	s := open(t, t.TempDir(), Config{})
	w := newWriter(t, s, 7)
	now := time.Now()
	value := make([]byte, 1000)

	var early int64
	for round := range 20 {
		now = now.Add(time.Hour)
		c := w.next()
		c.At = now
		for i := range 300 {
			c.Rows = append(c.Rows, put(fmt.Sprint(round, " ", i), value))
			// Each round deletes the rows of the one before, so there is always the same amount of live data.
			c.Rows = append(c.Rows, put(fmt.Sprint(round-1, " ", i), nil))
			id := rows.ID{Bytes: [16]byte{byte(round), byte(i >> 8), byte(i)}, Until: now.Add(time.Hour)}
			c.IDs = append(c.IDs, id)
		}
		if err := w.commit(t, c); err != nil {
			t.Fatal(err)
		}

		is, err := os.Stat(s.path)
		if err != nil {
			t.Fatal(err)
		}

		// By then there are as many free pages for the next transaction as there will ever be.
		if round == 4 {
			early = is.Size()
		}
		if early > 0 && is.Size() > early {
			t.Fatalf("the file has %d bytes after round %d, and had %d after five", is.Size(), round, early)
		}
	}

	err := s.db.View(func(tx *bbolt.Tx) error {
		ids, forget := tx.Bucket(idsBucket).Stats().KeyN, tx.Bucket(forgetBucket).Stats().KeyN
		if ids != 300 || forget != 300 {
			t.Errorf("%d IDs and %d times to forget them are left, want the 300 of the last round", ids, forget)
		}

		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestCommitsShareTransactions: commits that wait at the same time share a transaction, and refused ones need none.
func TestCommitsShareTransactions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, t.TempDir(), Config{})
		var writers []*writer
		for partition := range 32 {
			writers = append(writers, newWriter(t, s, partition))
		}

		if n := queueAndCommit(t, s, writers, nil); n != 1 {
			t.Errorf("%d commits made %d transactions, want 1", len(writers), n)
		}

		for _, w := range writers {
			w.claim.Epoch--
		}
		if n := queueAndCommit(t, s, writers, &rows.Fenced{}); n != 0 {
			t.Errorf("refused commits made %d transactions, want none", n)
		}
	})
}

// TestACallerThatLeaves: a caller gives up while another transaction is under way. Its commit is not made later,
// because the caller may already reuse the slices.
func TestACallerThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, t.TempDir(), Config{})
		w := newWriter(t, s, 7)
		ctx, leave := context.WithCancel(t.Context())

		s.turn <- struct{}{} // the turn of the other transaction

		var left sync.WaitGroup
		left.Go(func() {
			commits := []rows.Commit{w.next(put("x", []byte("1")))}
			if err := s.Commit(ctx, commits)[0]; !errors.Is(err, rows.ErrUnavailable) {
				t.Errorf("the caller that gave up got %v, want ErrUnavailable", err)
			}
		})
		synctest.Wait()
		leave()
		left.Wait()
		s.unlock()

		// This commit has the number of the one that was given up, which is free only if that one is never made.
		if err := w.commit(t, w.next(put("y", []byte("2")))); err != nil {
			t.Fatal(err)
		}
		if got := w.read(t, "x"); got != "" {
			t.Errorf("the commit of the caller that gave up was made: %q", got)
		}
	})
}

// queueAndCommit makes all writers commit before any of them can write, and returns how many transactions that took.
// Each commit must return an error of the type of want.
func queueAndCommit(t *testing.T, s *Store, writers []*writer, want error) (transactions int) {
	t.Helper()
	before := s.transactions(t)
	s.turn <- struct{}{}

	var all sync.WaitGroup
	for _, w := range writers {
		all.Go(func() {
			if err := w.commit(t, w.next(put("x", []byte("1")))); reflect.TypeOf(err) != reflect.TypeOf(want) {
				t.Errorf("got %v, want an error like %v", err, want)
			}
		})
	}
	synctest.Wait() // until all are queued

	s.unlock()
	all.Wait()

	return s.transactions(t) - before
}

// transactions returns how many transactions were made so far.
func (s *Store) transactions(t testing.TB) (n int) {
	t.Helper()
	err := s.db.View(func(tx *bbolt.Tx) error {
		n = tx.ID()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	return n
}

// TestClockKilledWhileItCommits: after a kill the file has all acknowledged commits, and every commit is in it whole or
// not at all.
func TestClockKilledWhileItCommits(t *testing.T) {
	dir := t.TempDir()
	for round := range 3 {
		acknowledged := killAfter(t, dir, 200*(round+1))

		s := open(t, dir, Config{})
		for partition := range childPartitions {
			w := newWriter(t, s, partition)
			is := w.claim.Number
			// More than was acknowledged is right: a commit may be made and its acknowledgement be cut off by the kill.
			if is < acknowledged[partition] {
				t.Errorf("round %d: partition %d has %d commits, though %d were acknowledged",
					round, partition, is, acknowledged[partition])
			}

			// Both rows are in one commit, so both have its number.
			a := w.read(t, "a")
			b := w.read(t, fmt.Sprint("b", is))
			if a != fmt.Sprint(is) || b != a {
				t.Errorf("round %d: commit %d of partition %d was only made in part: %q and %q",
					round, is, partition, a, b)
			}
		}

		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

const childPartitions = 8

// killAfter kills a process after some of its commits, and returns the newest acknowledged commit of each partition.
func killAfter(t *testing.T, dir string, commits int) (acknowledged map[int]uint64) {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+dir)
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}

	acknowledged = map[int]uint64{}
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		if n == commits {
			_ = child.Process.Kill()
		}

		// The last line may be cut off.
		var partition int
		var number uint64
		if _, err := fmt.Sscan(lines.Text(), &partition, &number); err == nil {
			acknowledged[partition] = number
		}
	}

	if child.Wait() == nil {
		t.Fatal("the process ended before it was killed")
	}
	if len(acknowledged) == 0 {
		t.Fatal("nothing was acknowledged")
	}

	return acknowledged
}

// commitUntilKilled commits in several partitions at once, and prints what is acknowledged.
func commitUntilKilled(dir string) {
	t := &fatal{}
	s := open(t, dir, Config{})

	var all sync.WaitGroup
	for partition := range childPartitions {
		w := newWriter(t, s, partition)
		all.Go(func() {
			for {
				number := fmt.Append(nil, w.claim.Number+1)
				former := fmt.Sprint("b", w.claim.Number)
				c := w.next(put("a", number), put("b"+string(number), number), put(former, nil))
				if err := w.commit(t, c); err != nil {
					t.Fatal(err)
				}

				fmt.Println(partition, w.claim.Number)
			}
		})
	}

	all.Wait()
}

// fatal is a testing.TB for a process without a test.
type fatal struct{ testing.TB }

func (*fatal) Helper()        {}
func (*fatal) Cleanup(func()) {}

func (*fatal) Context() context.Context { return context.Background() }

func (*fatal) Fatal(args ...any) {
	fmt.Fprintln(os.Stderr, args...)
	os.Exit(1)
}
