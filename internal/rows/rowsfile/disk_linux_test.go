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

// disk opens files, and can break the one that was opened last.
type disk struct {
	file     *os.File
	readOnly bool // what is opened from now on
}

func (d *disk) open(name string, flag int, perm os.FileMode) (*os.File, error) {
	if d.readOnly {
		flag = os.O_RDONLY
	}
	file, err := os.OpenFile(name, flag, perm)
	d.file = file

	return file, err
}

// become puts another file in the place of the one that was opened last.
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

// fill has the next write find no room.
func (d *disk) fill(t testing.TB) { d.become(t, "/dev/full", os.O_RDWR) }

// TestADiskThatIsFull: what was acknowledged stays, what is refused is neither made nor published, and the log says it
// once.
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
			time.Sleep(healWait)
			d.fill(t)

			refused := w.next(put("x", fmt.Append(nil, round)))
			refused.Publication = []byte("refused")
			for range 2 { // the second one at once
				if err := w.commit(t, refused); !errors.Is(err, rows.ErrFull) || errors.Is(err, rows.ErrUnavailable) {
					t.Fatalf("on a full disk: %v", err)
				}
			}

			if got := w.read(t, "x"); got != "before" {
				t.Errorf("after a refusal the row is %q", got)
			}
			const says = "the data directory cannot be written: "
			if err := s.Writable(); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("after a refusal Writable says %v", err)
			}
		}

		// A small commit may fit into a disk that is full for others.
		time.Sleep(healWait)
		made := w.next(put("x", []byte("after")))
		made.Publication = []byte("made")
		if err := w.commit(t, made); err != nil {
			t.Fatal(err)
		}
		if len(published) != 1 || published[0] != "made" {
			t.Errorf("published was %q", published)
		}

		if s.Writable() == nil {
			t.Error("one commit that succeeds does not mean that there is room")
		}

		// The store finds out by itself that there is room: while the process is not ready nobody sends changes.
		time.Sleep(2 * probeEvery)
		synctest.Wait()
		if err := s.Writable(); err != nil {
			t.Errorf("once there is room Writable says %v", err)
		}
		if got := w.read(t, "x"); got != "after" {
			t.Errorf("once there is room the row is %q", got)
		}

		begins := strings.Count(log.String(), "cannot be written")
		ends := strings.Count(log.String(), "can be written again")
		if begins != 1 || ends != 1 {
			t.Errorf("want a line each for the beginning and the end:\n%s", &log)
		}
	})
}

// TestADiskThatIsGone: commits are refused, rows can be read, and a repetition is made once the disk is back.
func TestADiskThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		s := open(t, t.TempDir(), Config{openFile: d.open})
		w := newWriter(t, s, 7)
		if err := w.commit(t, w.next(put("x", []byte("before")))); err != nil {
			t.Fatal(err)
		}

		d.become(t, s.path, os.O_RDONLY)
		d.readOnly = true

		c := w.next(put("x", []byte("after")))
		for range 3 {
			if err := w.commit(t, c); !errors.Is(err, rows.ErrUnavailable) || errors.Is(err, rows.ErrFull) {
				t.Fatalf("without a disk: %v", err)
			}
			if got := w.read(t, "x"); got != "before" {
				t.Errorf("the row is %q", got)
			}
			time.Sleep(healWait)
		}

		d.readOnly = false
		for w.commit(t, c) != nil {
			time.Sleep(healWait)
		}
		if got := w.read(t, "x"); got != "after" {
			t.Errorf("the row is %q", got)
		}
	})
}

// TestATransactionThatFailedMayBeMade: it is in the file if nothing but its last fsync failed.
func TestATransactionThatFailedMayBeMade(t *testing.T) {
	s := open(t, t.TempDir(), Config{})
	w := newWriter(t, s, 7)
	if err := w.commit(t, w.next(put("x", []byte("1")))); err != nil {
		t.Fatal(err)
	}

	s.turn <- struct{}{} // the store must not probe the disk meanwhile
	defer s.unlock()

	newest := s.transactions(t)
	if err := s.outcomeLocked(newest, syscall.EIO); err != nil {
		t.Errorf("the file has it: %v", err)
	}
	if n := s.transactions(t); n != newest+1 {
		t.Errorf("it was believed after %d fsyncs, want 1", n-newest)
	}
	if err := s.outcomeLocked(newest+2, syscall.EIO); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("the file does not have it: %v", err)
	}
}
