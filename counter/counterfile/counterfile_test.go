package counterfile

import (
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"headcount/counter"
	"headcount/counter/countertest"
)

func open(t testing.TB, dir string, cfg Config) *Store {
	t.Helper()
	s, err := Open(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// badDisk lets a file be opened and read. While it is cut, the file cannot be written.
type badDisk struct {
	mu   sync.Mutex
	file *os.File // the last opened
	cut  bool
}

func (d *badDisk) open(name string, flag int, perm os.FileMode) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cut {
		flag = os.O_RDONLY
	}
	f, err := os.OpenFile(name, flag, perm)
	d.file = f
	return f, err
}

func (d *badDisk) snap(t testing.TB) (heal func()) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = true
	// The open file loses the right to write, in the middle of everything.
	ro, err := os.Open(d.file.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	if err := unix.Dup2(int(ro.Fd()), int(d.file.Fd())); err != nil {
		t.Fatal(err)
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.cut = false
	}
}

// crashed is a copy of the file that a killed process leaves.
func crashed(t testing.TB, path string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	from, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := os.Create(filepath.Join(dir, File))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func instance(t testing.TB) countertest.Instance {
	d := &badDisk{}
	s := open(t, t.TempDir(), Config{openFile: d.open})
	return countertest.Instance{
		Store: s,
		Crash: func(t testing.TB) counter.Store {
			s = open(t, crashed(t, s.path), Config{openFile: d.open})
			return s
		},
		Cut: func(t testing.TB) func() { return d.snap(t) },
	}
}

func TestContract(t *testing.T) { countertest.RunInBubble(t, instance) }

func TestCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore { return open(t, t.TempDir(), Config{}) })
	})
}
