// Package local opens the counters that one process owns alone: in its memory or in a file. A change is a function call
// there, without a way to another process.
package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/internal/boltfile"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsfile"
	"headcount/internal/rows/rowsmem"
)

// File is the name of the file in a directory.
const File = rowsfile.File

// Store is a counter.Store of one process. All methods may be called from any goroutine.
type Store struct {
	*call.Store
	file *rowsfile.Store // nil: in memory
}

var (
	_ counter.Store    = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// InMemory returns a Store that ends with this process.
func InMemory(rules *counter.Rules) *Store {
	// A store in memory waits for nothing, so the claims need no context and cannot fail.
	s, err := call.NewLocal(context.Background(), rowsmem.New(rowsmem.Config{}), rules, owner.InMemory)
	if err != nil {
		panic(err)
	}

	return &Store{Store: s}
}

// inFile tunes the owner in front of a file. What a file has acknowledged it does not lose, so nobody looks for that.
var inFile = owner.Config{Name: "only", WriteTimeout: -1, VerifyEvery: -1}

// Open returns a Store in a file of a directory, and makes both if they are missing. Only one process at a time can
// have the file open. The error says what to do.
func Open(ctx context.Context, dir string, rules *counter.Rules, log zerolog.Logger) (*Store, error) {
	file, err := openFile(dir, log)
	if err != nil {
		return nil, err
	}

	s, err := call.NewLocal(ctx, file, rules, inFile)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data directory: %w", err), file.Close())
	}

	return &Store{Store: s, file: file}, nil
}

// Close implements counter.Store.
func (s *Store) Close() error {
	// The owner first, because its last turn writes to the file.
	err := s.Store.Close()
	if s.file != nil {
		err = errors.Join(err, s.file.Close())
	}

	return err
}

// Writable returns nil if changes can be written now, or the reason why not.
func (s *Store) Writable() error {
	if s.file == nil {
		return nil
	}

	return s.file.Writable()
}

// Holds reports whether the file in dir has counters. It makes no file.
func Holds(dir string) (bool, error) {
	d, err := OpenDump(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}

	// One counter is enough, so the dump is ended by an error at the first.
	err = d.Dump(context.Background(), "", func(counter.Copy) error { return errHolds })
	holds := errors.Is(err, errHolds)
	if holds {
		err = nil
	}

	return holds, errors.Join(err, d.Close())
}

var errHolds = errors.New("found a counter")

// Dump reads everything that the file in a directory has, and writes nothing, so that it also works on a full disk.
type Dump struct {
	*owner.Reader
	file *rowsfile.Store
}

// OpenDump opens the file in dir. Its error is fs.ErrNotExist if there is none.
func OpenDump(dir string) (*Dump, error) {
	// To open it would make it.
	if _, err := os.Stat(filepath.Join(dir, File)); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there are no counters to export: %w", err)
	}

	file, err := openFile(dir, zerolog.Nop())
	if err != nil {
		return nil, err
	}

	return &Dump{Reader: owner.NewReader(file, rows.PartitionOf), file: file}, nil
}

// Close closes the file.
func (d *Dump) Close() error { return d.file.Close() }

// openFile opens the file of a directory.
func openFile(dir string, log zerolog.Logger) (*rowsfile.Store, error) {
	file, err := rowsfile.Open(dir, rowsfile.Config{Log: log})
	var other *boltfile.FormatError
	if errors.As(err, &other) && other.Is == former {
		path := filepath.Join(dir, rowsfile.File)
		return nil, fmt.Errorf("%s is of an older release; export its counters with that one "+
			"(headcount export --data-dir %s --file FILE), move %s away, and import them with this one "+
			"(headcount import --data-dir %s --file FILE)", path, dir, path, dir)
	}

	return file, err
}

// former is the format of files before counters had owners.
const former = "1"
