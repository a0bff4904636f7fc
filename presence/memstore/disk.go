package memstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"headcount/presence"
	"headcount/presence/unread"
)

// What a data directory holds: one file of these buckets.
//
//	meta     format -> 1; id-secret -> the secret of anonymous ids
//	pages    page -> "incarnation all by at"
//	owns     page, a zero byte, 16 bytes of user -> "changes last before"
//	records  16 bytes of user -> "incarnation sequence updated"
//	follows  16 bytes of user, page -> see unread.Follow
//	keys     16 bytes of hash -> 8 bytes: unix seconds when it is forgotten
const dataFile = "headcount.db"

var (
	metaBucket    = []byte("meta")
	pagesBucket   = []byte("pages")
	ownsBucket    = []byte("owns")
	recordsBucket = []byte("records")
	followsBucket = []byte("follows")
	keysBucket    = []byte("keys")

	formatKey = []byte("format")
	secretKey = []byte("id-secret")
	format    = []byte("1")
)

const (
	lockWait  = time.Second // for another process to let go of the file
	flushWait = time.Second // between a flush that failed and the next
)

// disk is the copy in a file. Who changes memory puts the new value, and waits
// with sync until the transaction that has it is on disk. While one is written,
// all that comes gathers for the next. A nil disk keeps nothing.
type disk struct {
	db    *bbolt.DB
	log   zerolog.Logger
	wake  chan struct{} // holds one: dirty has something, or the end has come
	ended chan struct{} // closed when run has returned

	mu sync.Mutex // guards all below
	// dirty has the values that are not on disk and not being written: of one key
	// the newest. It is bounded by the requests under way, and while the disk
	// fails by what changes in memory.
	dirty  map[entry][]byte // nil: the key goes
	next   *flush           // will write dirty
	flying *flush           // is writing; nil: none is
	closed bool
}

type entry struct{ bucket, key string }

// flush is one transaction.
type flush struct {
	done chan struct{} // closed when it is over; then err holds
	err  error
}

func newFlush() *flush { return &flush{done: make(chan struct{})} }

// openDisk opens the file in dir, made when there is none, and fills n with
// what it holds. secret is that of anonymous ids.
func openDisk(dir string, n *notices, log zerolog.Logger) (d *disk, secret string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, "", fmt.Errorf("data directory: %w", err)
	}
	path := filepath.Join(dir, dataFile)
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockWait, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, "", fmt.Errorf("data directory: %s is in use by another process; end that one, or give each its own directory", path)
	case err != nil:
		return nil, "", fmt.Errorf("data directory: %s: %w", path, err)
	}
	if secret, err = load(db, n, time.Now()); err != nil {
		_ = db.Close()
		return nil, "", fmt.Errorf("data directory: %s: %w", path, err)
	}
	d = &disk{
		db: db, log: log, wake: make(chan struct{}, 1), ended: make(chan struct{}),
		dirty: map[entry][]byte{}, next: newFlush(),
	}
	go d.run() // ends with close
	return d, secret, nil
}

// load reads the whole file, and makes what a new one lacks.
func load(db *bbolt.DB, n *notices, now time.Time) (secret string, err error) {
	return secret, db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{metaBucket, pagesBucket, ownsBucket, recordsBucket, followsBucket, keysBucket} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(metaBucket)
		switch is := meta.Get(formatKey); {
		case is == nil:
			if err := errors.Join(meta.Put(formatKey, format), meta.Put(secretKey, []byte(rand.Text()))); err != nil {
				return err
			}
		case !bytes.Equal(is, format):
			return fmt.Errorf("its format is %q, this version knows %q; use the version that wrote it", is, format)
		}
		secret = string(meta.Get(secretKey))
		return n.load(tx, now)
	})
}

func (n *notices) load(tx *bbolt.Tx, now time.Time) error {
	err := tx.Bucket(pagesBucket).ForEach(func(k, v []byte) error {
		f, err := numbers(string(v), 4)
		if err != nil {
			return fmt.Errorf("changes of %q: %w", k, err)
		}
		n.incarnation = max(n.incarnation, uint64(f[0]))
		n.pages[string(k)] = &changed{
			level: unread.Level{Incarnation: uint64(f[0]), All: f[1], By: f[2], At: atTime(f[3])},
			owns:  map[unread.User]unread.Own{},
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = tx.Bucket(ownsBucket).ForEach(func(k, v []byte) error {
		page, user, _ := strings.Cut(string(k), "\x00")
		f, err := numbers(string(v), 3)
		p := n.pages[page]
		if err != nil || len(user) != len(unread.User{}) || p == nil {
			return fmt.Errorf("own changes of %q: %q", page, v)
		}
		p.owns[unread.User([]byte(user))] = unread.Own{Changes: f[0], Last: f[1], Before: atTime(f[2])}
		return nil
	})
	if err != nil {
		return err
	}
	err = tx.Bucket(recordsBucket).ForEach(func(k, v []byte) error {
		f, err := numbers(string(v), 3)
		if err != nil || len(k) != len(unread.User{}) {
			return fmt.Errorf("a record: %q", v)
		}
		n.incarnation = max(n.incarnation, uint64(f[0]))
		n.records[unread.User(k)] = &unread.Record{
			Version: presence.Version{Incarnation: uint64(f[0]), Sequence: uint64(f[1])}, Updated: atTime(f[2]),
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = tx.Bucket(followsBucket).ForEach(func(k, v []byte) error { // sorted by user, then by page
		if len(k) <= len(unread.User{}) {
			return fmt.Errorf("a follow under %q", k)
		}
		r := n.records[unread.User(k[:len(unread.User{})])]
		f, err := unread.ParseFollow(string(k[len(unread.User{}):]), string(v))
		if err != nil || r == nil {
			return fmt.Errorf("a follow without its record: %w", err)
		}
		r.Follows = append(r.Follows, f)
		return nil
	})
	if err != nil {
		return err
	}
	var old [][]byte
	err = tx.Bucket(keysBucket).ForEach(func(k, v []byte) error {
		if len(k) != 16 || len(v) != 8 {
			return fmt.Errorf("a key under %q", k)
		}
		key := rememberedKey{[16]byte(k), int64(binary.BigEndian.Uint64(v))}
		if key.until <= now.Unix() {
			old = append(old, bytes.Clone(k))
			return nil
		}
		n.keys[key.hash] = struct{}{}
		n.oldest = append(n.oldest, key)
		return nil
	})
	for _, k := range old {
		err = errors.Join(err, tx.Bucket(keysBucket).Delete(k))
	}
	slices.SortFunc(n.oldest, func(a, b rememberedKey) int { return int(a.until - b.until) })
	return err
}

// numbers reads n whole numbers, none of them negative.
func numbers(text string, n int) ([]int64, error) {
	fields := strings.Split(text, " ")
	if len(fields) != n {
		return nil, fmt.Errorf("%q has not %d numbers", text, n)
	}
	out := make([]int64, n)
	for i, f := range fields {
		u, err := strconv.ParseUint(f, 10, 63)
		if err != nil {
			return nil, err
		}
		out[i] = int64(u)
	}
	return out, nil
}

// atTime is the time of unix seconds; 0 is none.
func atTime(seconds int64) time.Time {
	if seconds == 0 {
		return time.Time{}
	}
	return time.Unix(seconds, 0).UTC()
}

func seconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.Unix()
}

func (d *disk) put(bucket []byte, key string, value []byte) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dirty[entry{string(bucket), key}] = value
}

func (d *disk) putLevel(page string, l unread.Level) {
	d.put(pagesBucket, page, fmt.Appendf(nil, "%d %d %d %d", l.Incarnation, l.All, l.By, seconds(l.At)))
}

func (d *disk) putOwn(page string, u unread.User, o unread.Own) {
	d.put(ownsBucket, page+"\x00"+string(u[:]), fmt.Appendf(nil, "%d %d %d", o.Changes, o.Last, seconds(o.Before)))
}

func (d *disk) putRecord(u unread.User, r unread.Record) {
	d.put(recordsBucket, string(u[:]), fmt.Appendf(nil, "%d %d %d", r.Version.Incarnation, r.Version.Sequence, seconds(r.Updated)))
}

func (d *disk) putFollow(u unread.User, f unread.Follow) {
	d.put(followsBucket, string(u[:])+f.Page, f.AppendValue(nil))
}

func (d *disk) endFollow(u unread.User, page string) { d.put(followsBucket, string(u[:])+page, nil) }

func (d *disk) putKey(k rememberedKey) {
	d.put(keysBucket, string(k.hash[:]), binary.BigEndian.AppendUint64(nil, uint64(k.until)))
}

func (d *disk) forgetKey(hash [16]byte) { d.put(keysBucket, string(hash[:]), nil) }

// sync returns when all that was put before is on disk. When it fails, or ctx
// ends before, it may or may not get there.
func (d *disk) sync(ctx context.Context) error {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	f := d.flying
	if len(d.dirty) > 0 {
		f = d.next
	}
	closed := d.closed
	d.mu.Unlock()
	switch {
	case f == nil:
		return nil
	case closed:
		return fmt.Errorf("memstore: %w: it is closed", presence.ErrUnavailable)
	}
	d.signal()
	select {
	case <-f.done:
		if f.err != nil {
			return fmt.Errorf("memstore: %w: %w", presence.ErrUnavailable, f.err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("memstore: %w: %w", presence.ErrUnavailable, ctx.Err())
	}
}

func (d *disk) signal() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// run is the one goroutine that writes.
func (d *disk) run() {
	defer close(d.ended)
	for failed := false; ; {
		<-d.wake
		for {
			d.mu.Lock()
			closed := d.closed
			if len(d.dirty) == 0 {
				d.mu.Unlock()
				if closed {
					return
				}
				break
			}
			dirty, f := d.dirty, d.next
			d.dirty, d.next, d.flying = map[entry][]byte{}, newFlush(), f
			d.mu.Unlock()

			f.err = d.write(dirty)
			d.mu.Lock()
			d.flying = nil
			if f.err != nil { // what is newer by now stays
				for e, v := range dirty {
					if _, newer := d.dirty[e]; !newer {
						d.dirty[e] = v
					}
				}
			}
			d.mu.Unlock()
			close(f.done)
			if f.err == nil {
				if failed {
					d.log.Info().Msg("the data directory can be written again")
				}
				failed = false
				continue
			}
			if !failed {
				d.log.Error().Err(f.err).Msg("the data directory cannot be written; changes and follows are refused until it can")
			}
			failed = true
			if closed {
				return
			}
			time.Sleep(flushWait)
		}
	}
}

// write is one transaction, with one fsync.
func (d *disk) write(dirty map[entry][]byte) error {
	entries := make([]entry, 0, len(dirty))
	for e := range dirty {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b entry) int { // neighbours share pages of the file
		if c := strings.Compare(a.bucket, b.bucket); c != 0 {
			return c
		}
		return strings.Compare(a.key, b.key)
	})
	d.mu.Lock()
	db := d.db // tests put a bad one in its place
	d.mu.Unlock()
	return db.Update(func(tx *bbolt.Tx) error {
		for _, e := range entries {
			b, key, value := tx.Bucket([]byte(e.bucket)), []byte(e.key), dirty[e]
			var err error
			if value == nil {
				err = b.Delete(key)
			} else {
				err = b.Put(key, value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// close writes what is left and closes the file.
func (d *disk) close() error {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.signal()
	<-d.ended
	return d.db.Close()
}
