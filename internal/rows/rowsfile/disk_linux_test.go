package rowsfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/rows"
)

// disk opens files, and can break the one that it opened last.
type disk struct {
	file     *os.File
	readOnly bool // files opened from now on are read-only
}

func (d *disk) open(name string, flag int, perm os.FileMode) (*os.File, error) {
	if d.readOnly {
		flag = os.O_RDONLY
	}
	file, err := os.OpenFile(name, flag, perm)
	d.file = file

	return file, err
}

// become replaces the file that was opened last by another one.
func (d *disk) become(t testing.TB, name string, flag int) {
	t.Helper()
	other, err := os.OpenFile(name, flag, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()

	if err := syscall.Dup3(int(other.Fd()), int(d.file.Fd()), syscall.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
}

// fill makes the next write find no room.
func (d *disk) fill(t testing.TB) { d.become(t, "/dev/full", os.O_RDWR) }

// TestADiskThatIsFull: what was acknowledged stays. What is refused is neither made nor published, and is logged once.
func TestADiskThatIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		var log bytes.Buffer
		s := open(t, t.TempDir(), Config{openFile: d.open, Log: zerolog.New(&log)})
		w := newWriter(t, s, 7)
		var published []string
		heard := func(_ int, _ uint64, publication []byte) { published = append(published, string(publication)) }
		go func() { _ = s.Watch(t.Context(), heard, func() {}) }()
		synctest.Wait()
		if err := w.commit(t, w.next(put("x", []byte("before")))); err != nil {
			t.Fatal(err)
		}

		for round := range 3 {
			// The store opens its file again after a failure, and only then does a commit reach the disk.
			time.Sleep(healWait)
			d.fill(t)

			refused := w.next(put("x", fmt.Append(nil, round)))
			refused.Publication = []byte("refused")
			for range 2 { // the second attempt comes at once
				if err := w.commit(t, refused); !errors.Is(err, rows.ErrFull) || errors.Is(err, rows.ErrUnavailable) {
					t.Fatalf("a commit on a full disk returns %v, want ErrFull", err)
				}
			}

			if got := w.read(t, "x"); got != "before" {
				t.Errorf("after a refusal the row is %q, want \"before\"", got)
			}
			// By this the process says that it is not ready.
			const says = "the data directory cannot be written: "
			if err := s.Writable(); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("after a refusal Writable returns %v, want an error", err)
			}
		}

		// A small commit may fit on a disk that is too full for others.
		time.Sleep(healWait)
		made := w.next(put("x", []byte("after")))
		made.Publication = []byte("made")
		if err := w.commit(t, made); err != nil {
			t.Fatal(err)
		}
		if len(published) != 1 || published[0] != "made" {
			t.Errorf("%q were published, want \"made\" alone", published)
		}

		if s.Writable() == nil {
			t.Error("after one commit that fitted Writable returns nil, though there may be no room")
		}

		// The store must find out by itself that there is room: a process that is not ready gets no changes.
		time.Sleep(2 * probeEvery)
		synctest.Wait()
		if err := s.Writable(); err != nil {
			t.Errorf("once there is room Writable returns %v", err)
		}
		if got := w.read(t, "x"); got != "after" {
			t.Errorf("once there is room the row is %q, want \"after\"", got)
		}

		begins := strings.Count(log.String(), "cannot be written")
		ends := strings.Count(log.String(), "can be written again")
		if begins != 1 || ends != 1 {
			t.Errorf("the log must have one line for the beginning and one for the end:\n%s", &log)
		}
	})
}

// TestADiskThatIsGone: without a disk commits are refused, and rows can be read. A repetition succeeds when the disk is
// back.
func TestADiskThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		s := open(t, t.TempDir(), Config{openFile: d.open})
		w := newWriter(t, s, 7)
		if err := w.commit(t, w.next(put("x", []byte("before")))); err != nil {
			t.Fatal(err)
		}

		d.become(t, s.path, os.O_RDONLY)
		// Opening the file again does not help either while the disk is gone.
		d.readOnly = true

		c := w.next(put("x", []byte("after")))
		for range 3 {
			if err := w.commit(t, c); !errors.Is(err, rows.ErrUnavailable) || errors.Is(err, rows.ErrFull) {
				t.Fatalf("a commit without a disk returns %v, want ErrUnavailable", err)
			}
			if got := w.read(t, "x"); got != "before" {
				t.Errorf("without a disk the row is %q, want \"before\"", got)
			}
			time.Sleep(healWait)
		}

		d.readOnly = false
		for w.commit(t, c) != nil {
			time.Sleep(healWait)
		}
		if got := w.read(t, "x"); got != "after" {
			t.Errorf("when the disk is back the row is %q, want \"after\"", got)
		}
	})
}

// TestATransactionThatFailedMayBeMade: a transaction of which only the last fsync failed is in the file, and counts as
// made.
func TestATransactionThatFailedMayBeMade(t *testing.T) {
	s := open(t, t.TempDir(), Config{})
	w := newWriter(t, s, 7)
	if err := w.commit(t, w.next(put("x", []byte("1")))); err != nil {
		t.Fatal(err)
	}

	s.turn <- struct{}{} // keeps the store from probing the disk meanwhile
	defer s.unlock()

	newest := s.transactions(t)
	if err := s.outcomeLocked(newest, syscall.EIO); err != nil {
		t.Errorf("the file has the transaction, and its outcome is %v", err)
	}
	if n := s.transactions(t); n != newest+1 {
		t.Errorf("the outcome was decided after %d fsyncs, want 1", n-newest)
	}
	if err := s.outcomeLocked(newest+2, syscall.EIO); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("the file lacks the transaction, and its outcome is %v, want ErrUnavailable", err)
	}
}

// TestAFileThatHasDisappeared: the disk is unmounted, or the file is removed, and a write fails. No empty file takes
// the place of the one with the counters: changes are refused until that one is back.
func TestAFileThatHasDisappeared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		s := open(t, t.TempDir(), Config{openFile: d.open})
		w := newWriter(t, s, 7)
		if err := w.commit(t, w.next(put("x", []byte("before")))); err != nil {
			t.Fatal(err)
		}

		elsewhere := s.path + ".elsewhere"
		if err := os.Rename(s.path, elsewhere); err != nil {
			t.Fatal(err)
		}
		// The open descriptor would still accept writes to the file that has no name any more, so it is made to fail.
		d.become(t, elsewhere, os.O_RDONLY)

		c := w.next(put("x", []byte("after")))
		for range 3 {
			if err := w.commit(t, c); !errors.Is(err, rows.ErrUnavailable) {
				t.Fatalf("without its file a commit returns %v, want ErrUnavailable", err)
			}
			time.Sleep(healWait)
		}
		if _, err := os.Stat(s.path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("there is a new file, or it cannot be seen: %v", err)
		}

		if err := os.Rename(elsewhere, s.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * probeEvery)
		if err := w.commit(t, c); err != nil {
			t.Fatal(err)
		}
		if got := w.read(t, "x"); got != "after" {
			t.Errorf("with its file again the row is %q, want \"after\"", got)
		}
	})
}
