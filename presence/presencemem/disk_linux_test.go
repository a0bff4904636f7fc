package presencemem

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/unread"
)

// breakFile replaces the open file of the data directory by a device that is always full, so that all writes fail with
// ENOSPC until mend is called.
func breakFile(t testingT, dir string) (mend func()) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}

	path, err := filepath.EvalSymlinks(filepath.Join(dir, dataFile))
	if err != nil {
		t.Fatal(err)
	}

	for _, entry := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + entry.Name()); err != nil || to != path {
			continue
		}
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			t.Fatal(err)
		}

		kept, err := syscall.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}

		full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}

		defer full.Close()

		// The descriptor of the store's file now refers to the full device.
		if err := syscall.Dup3(int(full.Fd()), fd, syscall.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}

		return func() {
			if err := syscall.Dup3(kept, fd, syscall.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}

			_ = syscall.Close(kept)
		}
	}

	t.Fatalf("%s is not open", path)
	return nil
}

// testingT has the methods that a test and a rapid check share.
type testingT interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// A change that cannot be written is refused at once, and nothing of it is kept. Repetitions are refused until the file
// can be written again.
func TestClockDiskFails(t *testing.T) {
	dir := t.TempDir()
	s := reopen(t, dir)
	u := unread.User{1}
	if err := errors.Join(s.Change(t.Context(), "p", unread.Change{}), s.Writable()); err != nil {
		t.Fatal(err)
	}

	heard := make(chan presence.Publication, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		s.Watch(ctx, []int{unread.LevelTopic("p").Bucket(presence.DefaultBuckets)},
			func(p presence.Publication) { heard <- p })
	})

	<-heard // the watcher has subscribed

	mend := breakFile(t, dir)
	begin := testkit.NewStopwatch(t)
	for range 300 {
		if err := s.Change(t.Context(), "p", unread.Change{Key: "k"}); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("a change that cannot be written: %v, want ErrUnavailable", err)
		}
		follows := unread.Record{Follows: []unread.Follow{{Page: "p"}}}
		_, err := s.Save(t.Context(), u, unread.Record{}, follows)
		if !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("a follow that cannot be written: %v, want ErrUnavailable", err)
		}
	}

	// A refusal does not wait for the disk.
	if took := begin.Elapsed(); took > 10*time.Second {
		t.Errorf("600 refusals took %s, want 10s at most", took)
	}

	if err := s.Writable(); err == nil || !strings.Contains(err.Error(), "the data directory cannot be written: ") {
		t.Errorf("Writable returns %v, want that the directory cannot be written", err)
	}

	state := func() (int64, int) {
		levels, _, _ := s.Levels(t.Context(), u, []string{"p"})
		records, _ := s.Records(t.Context(), []unread.User{u})
		return levels[0].All, len(records[0].Follows)
	}
	if all, follows := state(); all != 1 || follows != 0 {
		t.Errorf("after the refusals there are %d changes and %d follows, want 1 and 0", all, follows)
	}

	mend()
	testkit.Eventually(t, "Writable, as the disk is well", func() bool { return s.Writable() == nil })
	for range 2 {
		if err := s.Change(t.Context(), "p", unread.Change{Key: "k"}); err != nil {
			t.Fatal(err)
		}
	}

	// Watchers have received only the change that was made.
	cancel()
	watching.Wait()
	close(heard)
	for p := range heard {
		if p.Updates[0].Version.Sequence != 2 {
			t.Errorf("a watcher received %+v, want the second change alone", p)
		}
	}

	for range 2 {
		if all, follows := state(); all != 2 || follows != 0 {
			t.Errorf("there are %d changes and %d follows, want 2 and 0", all, follows)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = reopen(t, dir)
	}
	_ = s.Close()
}
