// Package boltfile opens the bbolt files of a data directory. It permits one process at a time,
// checks the format of each file, and returns an error for a damaged file, where bbolt itself
// would end the program.
package boltfile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// Every file has a bucket Meta, with the number of the file's format under FormatKey.
var (
	Meta      = []byte("meta")
	FormatKey = []byte("format")
)

const lockWait = time.Second // how long to wait for another process to close the file

// ErrInUse means that another process has the file open.
var ErrInUse = errors.New("it is in use by another process; end that one, or give each its own directory")

// FormatError is the error of a file that another version of the program wrote. Is is the file's format, Known this
// version's.
type FormatError struct{ Is, Known string }

// Error implements error.
func (e *FormatError) Error() string {
	return fmt.Sprintf("its format is %q, this version knows %q; use the version that wrote it", e.Is, e.Known)
}

// Opener opens the file for bbolt. A nil Opener is os.OpenFile; tests have one that fails.
type Opener func(name string, flag int, perm os.FileMode) (*os.File, error)

// Open opens the file at path, creates it if it is missing, and creates missing buckets, including
// Meta. Then it calls load. It waits for a second while another process has the file open. Errors name
// the path and, if possible, a remedy; after an error the file is closed.
//
// Open reads every page before bbolt opens the file for writing, because bbolt would end the program
// at a damaged page.
func Open(path string, open Opener, format []byte, buckets [][]byte, load func(db *bbolt.DB) error) (*bbolt.DB, error) {
	// A missing file is created below. After any other error the file must stay as it is.
	if err := Check(path, open); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}

	db, err := openFile(path, &bbolt.Options{
		Timeout:        lockWait,
		NoFreelistSync: true,
		FreelistType:   bbolt.FreelistMapType,
		OpenFile:       open,
	})
	if err != nil {
		return nil, err
	}

	err = guarded(func() error { return prepare(db, format, buckets) })
	if err == nil {
		err = guarded(func() error { return load(db) })
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), db.Close())
	}

	return db, nil
}

func openFile(path string, options *bbolt.Options) (db *bbolt.DB, err error) {
	err = guarded(func() (err error) {
		db, err = bbolt.Open(path, 0o600, options)

		// An error that neither another process nor the system has caused comes from the contents.
		system := syscall.Errno(0)
		if err == nil || errors.Is(err, berrors.ErrTimeout) || errors.As(err, &system) {
			return err
		}
		return damaged(err)
	})

	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("%s: %w", path, ErrInUse)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	return db, nil
}

// CheckDir returns an error if the program cannot write files in a directory or, if it does not exist yet, cannot
// create it. It leaves nothing behind.
func CheckDir(dir string) error {
	// A missing directory will be created below its nearest existing ancestor, so that one is checked.
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}

	// The file is written and synced, because an empty one can be created even on a full disk.
	file, err := os.CreateTemp(dir, ".check-*")
	if err == nil {
		_, err = file.WriteString("headcount check\n")
		// All of these run even if an earlier one fails, so that no file is left.
		err = errors.Join(err, file.Sync(), file.Close(), os.Remove(file.Name()))
	}
	if err != nil {
		return fmt.Errorf("it cannot be made or written: %w; give a directory that the server may write, on a disk "+
			"with room", err)
	}

	return nil
}

// Check reads the whole file at path, and changes nothing. Its error names the path and a remedy; it is ErrInUse while
// another process has the file open.
func Check(path string, open Opener) error {
	is, err := os.Stat(path)
	if err != nil {
		return err
	}

	if is.Size() == 0 { // bbolt would treat it as a new file
		return fmt.Errorf("%s is empty; put a copy of it in its place, or remove it to begin anew", path)
	}
	db, err := openFile(path, &bbolt.Options{ReadOnly: true, Timeout: lockWait, OpenFile: open})
	if err != nil {
		return err
	}

	err = guarded(func() error {
		return db.View(func(tx *bbolt.Tx) error {
			// A truncated copy may still have all pages that walk reads.
			if end := tx.Size(); end > is.Size() {
				return damaged(fmt.Sprintf("it has %d bytes of %d", is.Size(), end))
			}
			return tx.ForEach(func(_ []byte, b *bbolt.Bucket) error { return walk(b) })
		})
	})

	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return errors.Join(err, db.Close())
}

// walk reads every key of a bucket.
func walk(b *bbolt.Bucket) error {
	var last []byte
	return b.ForEach(func(key, value []byte) error {
		// A page that another one has overwritten often parses, but its keys are out of order.
		if last != nil && bytes.Compare(last, key) >= 0 {
			return damaged("its keys are in no order")
		}

		last = key

		if value == nil {
			return walk(b.Bucket(key))
		}
		return nil
	})
}

func damaged(how any) error {
	return fmt.Errorf("the file is damaged (%v); put a copy of it in its place, or move it away to begin anew", how)
}

// guarded runs fn. It returns an error if bbolt panics at a damaged page, or reads beyond the end of a truncated file.
func guarded(fn func() error) (err error) {
	// A fault in mapped memory is a signal that ends the program, unless the runtime turns it into a panic.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))

	defer func() {
		if p := recover(); p != nil {
			err = damaged(p)
		}
	}()
	return fn()
}

// prepare refuses a file of another format or program, and creates the buckets that a new or older file lacks.
func prepare(db *bbolt.DB, format []byte, buckets [][]byte) error {
	whole := false

	// A read-only transaction first, so that another program's file stays as it is.
	err := db.View(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(Meta)
		if meta == nil {
			if name, _ := tx.Cursor().First(); name != nil {
				return errors.New("it is another program's file; give a directory of its own")
			}
			return nil
		}

		if is := meta.Get(FormatKey); !bytes.Equal(is, format) {
			return &FormatError{Is: string(is), Known: string(format)}
		}

		missing := func(name []byte) bool { return tx.Bucket(name) == nil }
		whole = !slices.ContainsFunc(buckets, missing)
		return nil
	})

	// A transaction costs an fsync, which each start would otherwise pay.
	if err != nil || whole {
		return err
	}

	return db.Update(func(tx *bbolt.Tx) error {
		for _, name := range append([][]byte{Meta}, buckets...) {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return tx.Bucket(Meta).Put(FormatKey, format)
	})
}
