// Package counterfile keeps counters in one file of a data directory.
//
// The file is read on demand: a counter that nobody asks for costs no memory
// but what the kernel likes to cache. All operations that come together are one
// transaction; one transaction is written at a time. What is acknowledged is
// on disk.
//
// When a transaction fails (a full disk, a disk that is gone) nothing of it is
// told to anybody: the file is opened anew, which shows what is in it and
// nothing else. Whether the failed transaction is in it is unknown to its
// callers; they repeat it under the same identities.
package counterfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/boltfile"
	"headcount/presence"
)

// File is the name of the file in the data directory.
const File = "counters.db"

// What the file holds. Numbers are big-endian.
//
//	meta      format -> "1"; deleted -> 8 bytes: the highest incarnation ever deleted
//	counters  key -> see record; its sequence numbers sets and ledgers
//	members   8 bytes: set, member -> nothing
//	registers 8 bytes: set -> registers, see package hyperloglog
//	ledgers   8 bytes: ledger, 8 bytes: seq -> see appendEntry
//	gains     8 bytes: history, 4 bytes: seconds of a step, 8 bytes: its number -> 8 bytes: gained in it; of a
//	          unique registers
//	counted   8 bytes: history, 1 byte: length of a dimension's name, the name, a value -> 8 bytes: what was
//	          counted under it; without a value all that are not kept, and 8 bytes: how many are
//	kept      8 bytes: history, 4 bytes: seconds of a step -> 8 bytes: how long gains are kept, seconds,
//	          8 bytes: when somebody looks for those to forget, unix seconds
//	due       8 bytes: unix seconds, 8 bytes: history, 4 bytes: seconds of a step -> nothing
//	marks     2 bytes: length of a match, the match, 8 bytes: number of a step, key -> nothing
//	tops      2 bytes: length of a match, the match, 4 bytes: seconds of a step, 8 bytes: its number -> JSON: what
//	          gained most
//	ids       16 bytes: identity -> 8 bytes: unix seconds when it is forgotten
//	forget    8 bytes: unix seconds, 16 bytes: identity -> nothing
//	garbage   8 bytes: a set, ledger or history that is no counter's any more -> nothing
//	limits    algorithm, 8 bytes: window in ms, key -> its state, as package limit writes it
//	limitends 8 bytes: unix ms when somebody looks whether it has ended, key in limits -> nothing
var (
	countersBucket  = []byte("counters")
	membersBucket   = []byte("members")
	registersBucket = []byte("registers")
	ledgersBucket   = []byte("ledgers")
	gainsBucket     = []byte("gains")
	countedBucket   = []byte("counted")
	keptBucket      = []byte("kept")
	dueBucket       = []byte("due")
	marksBucket     = []byte("marks")
	topsBucket      = []byte("tops")
	idsBucket       = []byte("ids")
	forgetBucket    = []byte("forget")
	garbageBucket   = []byte("garbage")
	limitsBucket    = []byte("limits")
	limitEndsBucket = []byte("limitends")

	buckets = [][]byte{
		countersBucket, membersBucket, registersBucket, ledgersBucket, gainsBucket, countedBucket, keptBucket, dueBucket, marksBucket, topsBucket, idsBucket, forgetBucket,
		garbageBucket, limitsBucket, limitEndsBucket,
	}

	deletedKey = []byte("deleted")
	format     = []byte("1")
)

const (
	healWait = 100 * time.Millisecond // after a transaction that failed, until the next is tried
	calm     = 5 * time.Second        // without one that failed, until the file counts as mended: on a full disk small ones still fit
	// What a transaction clears away beside its own work: so much at most, and
	// more than operations can bring, so that it stays ahead of them.
	forgetPerOp     = 2
	forgetAtMost    = 4096
	garbageAtOnce   = 512
	entriesPerEntry = 4
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Log zerolog.Logger
	Now func() time.Time // default time.Now; tests put another

	openFile func(name string, flag int, perm os.FileMode) (*os.File, error) // tests put one that fails
}

// Store is a counter.Store in a file. All methods may be called from any goroutine.
type Store struct {
	path string
	cfg  Config
	hub  counter.Hub

	write  sync.Mutex // held by the one transaction under way; guards failed and next
	failed bool       // a transaction, not long ago; it was logged
	next   time.Time  // before it no transaction is tried

	mu     sync.RWMutex // guards db and closed; taken after write, held while db is read
	db     *bbolt.DB    // nil: the file could not be opened again
	closed bool
}

var _ counter.Store = (*Store)(nil)

// Open opens the file in dir, and makes both when there are none.
func Open(dir string, cfg Config) (*Store, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	s := &Store{path: filepath.Join(dir, File), cfg: cfg}
	var err error
	if s.db, err = s.open(); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if err := syncDir(dir); err != nil { // a file whose name is lost is lost
		return nil, errors.Join(fmt.Errorf("data directory: %w", err), s.db.Close())
	}
	return s, nil
}

// Holds reports whether the file in dir has counters. It makes no file.
func Holds(dir string) (holds bool, err error) {
	if _, err := os.Stat(filepath.Join(dir, File)); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	s, err := Open(dir, Config{})
	if err != nil {
		return false, err
	}
	err = s.db.View(func(tx *bbolt.Tx) error {
		key, _ := tx.Bucket(countersBucket).Cursor().First()
		holds = key != nil
		return nil
	})
	return holds, errors.Join(err, s.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (s *Store) open() (*bbolt.DB, error) {
	return boltfile.Open(s.path, s.cfg.openFile, format, buckets, func(*bbolt.DB) error { return nil })
}

// Close waits for the transaction under way and closes the file.
func (s *Store) Close() error {
	s.write.Lock()
	defer s.write.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	db := s.db
	s.db = nil
	if db == nil {
		return nil
	}
	return db.Close()
}

// Apply is as counter.Writer says: one transaction. It waits for the disk,
// whatever becomes of ctx: what is being written is not called back.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	s.write.Lock() // watchers are told before the next transaction
	defer s.write.Unlock()
	var t *step
	results := make([]counter.Result, len(ops))
	err := s.transact(ctx, "apply", func(tx *bbolt.Tx) error {
		t = s.begin(tx)
		for i := range ops {
			results[i] = counter.Judge(t, &ops[i], t.now)
		}
		return t.end(len(ops))
	})
	if err != nil {
		for i := range results {
			results[i] = counter.Result{Err: err}
		}
		return results
	}
	s.hub.Tell(t.told, func(key string) counter.Counter { return t.records[key].Counter(key) })
	return results
}

var (
	errClosed  = errors.New("it is closed")
	errPause   = errors.New("the file could not be written a moment ago")
	errNothing = errors.New("nothing is to be written")
)

// update makes a transaction. One that ends with errNothing is given up, and nothing is wrong.
func (s *Store) update(ctx context.Context, what string, transaction func(tx *bbolt.Tx) error) error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.transact(ctx, what, transaction)
}

// transact is update, with write held.
func (s *Store) transact(ctx context.Context, what string, transaction func(tx *bbolt.Tx) error) error {
	err := context.Cause(ctx) // while it waited for others
	if err == nil {
		err = s.ready()
	}
	if err != nil {
		return unavailable(what, err)
	}
	switch err := s.db.Update(transaction); {
	case errors.Is(err, errNothing):
		return nil
	case err != nil:
		s.fail(err)
		return unavailable(what, err)
	}
	if s.failed && time.Since(s.next) >= calm {
		s.cfg.Log.Info().Msg("counters: the data directory can be written again")
		s.failed = false
	}
	return nil
}

// ready opens the file again when that is due. It is called with write.
func (s *Store) ready() error {
	switch {
	case s.closed:
		return errClosed
	case time.Now().Before(s.next):
		return errPause
	case s.db != nil:
		return nil
	}
	db, err := s.open()
	if err != nil {
		s.next = time.Now().Add(healWait)
		return err
	}
	s.mu.Lock()
	s.db = db
	s.mu.Unlock()
	return nil
}

// fail is called with write after a transaction failed. A page that says which
// transaction holds may be half written by now, so the file is opened anew: it
// tells by checksums what holds.
func (s *Store) fail(err error) {
	if !s.failed {
		s.cfg.Log.Error().Err(err).Msg("counters: the data directory cannot be written; changes are refused until it can")
	}
	s.failed, s.next = true, time.Now().Add(healWait)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.db.Close(); err != nil {
		s.cfg.Log.Warn().Err(err).Msg("counters: closing a file that could not be written")
	}
	if s.db, err = s.open(); err != nil {
		s.db = nil
		s.cfg.Log.Error().Err(err).Msg("counters: the data directory cannot be read")
	}
}

func unavailable(what string, err error) error {
	return fmt.Errorf("counterfile: %s: %w: %w", what, counter.ErrUnavailable, err)
}

// view reads what is on disk.
func (s *Store) view(what string, read func(tx *bbolt.Tx) error) error {
	s.mu.RLock()
	if s.db == nil && !s.closed {
		s.mu.RUnlock()
		s.write.Lock()
		err := s.ready()
		s.write.Unlock()
		if err != nil {
			return unavailable(what, err)
		}
		s.mu.RLock()
	}
	defer s.mu.RUnlock()
	err := errClosed
	if s.db != nil {
		err = s.db.View(read)
	}
	var refused *counter.Conflict
	if err != nil && !errors.As(err, &refused) {
		return unavailable(what, err)
	}
	return err
}

// Read is as counter.Reader says; no answer lags.
func (s *Store) Read(_ context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	out := make([]counter.Reading, len(keys))
	err := s.view("read", func(tx *bbolt.Tx) error {
		counters, members := tx.Bucket(countersBucket), tx.Bucket(membersBucket)
		for i, key := range keys {
			var r record
			if err := r.load(counters, key); err != nil {
				return err
			}
			out[i].Counter = r.Counter(key)
			out[i].Mine = member != "" && r.set != 0 && members.Get(within(r.set, member)) != nil
		}
		return nil
	})
	return out, err
}

// Ledger is as counter.Reader says.
func (s *Store) Ledger(_ context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	var page counter.Ledger
	err := s.view("ledger", func(tx *bbolt.Tx) error {
		page = counter.Ledger{}
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil || r.ledger == 0 || after >= r.Entries {
			return err
		}
		c := tx.Bucket(ledgersBucket).Cursor()
		prefix := number(r.ledger)
		for k, v := c.Seek(binary.BigEndian.AppendUint64(prefix, after+1)); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			if len(page.Entries) == limit {
				page.More = true
				return nil
			}
			e, err := parseEntry(k[8:], v)
			if err != nil {
				return fmt.Errorf("the ledger of %q: %w", key, err)
			}
			page.Entries = append(page.Entries, e)
		}
		return nil
	})
	return page, err
}

// History is as counter.Reader says.
func (s *Store) History(_ context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	var out counter.Counter
	var gains []counter.Gain
	err := s.view("history", func(tx *bbolt.Tx) error {
		gains = nil
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil {
			return err
		}
		out = r.Counter(key)
		if r.history != 0 {
			prefix := historyKey(r.history, uint32(step/time.Second))
			c := tx.Bucket(gainsBucket).Cursor()
			for k, v := c.Seek(binary.BigEndian.AppendUint64(prefix, uint64(max(from, 0)))); bytes.HasPrefix(k, prefix); k, v = c.Next() {
				number := int64(binary.BigEndian.Uint64(k[len(prefix):]))
				if number >= to {
					break
				}
				g, err := parseGain(number, v)
				if err != nil {
					return fmt.Errorf("the history of %q: %w", key, err)
				}
				gains = append(gains, g)
			}
		}
		gains = r.With(gains, step, from, to)
		return nil
	})
	return out, gains, err
}

// Dimension is as counter.Reader says.
func (s *Store) Dimension(_ context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	var out counter.Counter
	var counted counter.Counted
	err := s.view("dimension", func(tx *bbolt.Tx) error {
		counted = counter.Counted{Values: map[string]int64{}}
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil {
			return err
		}
		if out = r.Counter(key); r.history == 0 {
			return nil
		}
		prefix := dimensionKey(r.history, name)
		c := tx.Bucket(countedBucket).Cursor()
		for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			switch {
			case len(k) == len(prefix) && len(v) == 16:
				counted.Other = int64(binary.BigEndian.Uint64(v))
			case len(v) == 8:
				counted.Values[string(k[len(prefix):])] = int64(binary.BigEndian.Uint64(v))
			default:
				return fmt.Errorf("the dimension %q of %q: a count of %d bytes", name, key, len(v))
			}
		}
		return nil
	})
	return out, counted, err
}

// parseGain reads a value of the bucket gains.
func parseGain(number int64, v []byte) (counter.Gain, error) {
	if len(v) == 8 {
		return counter.Gain{Number: number, Value: int64(binary.BigEndian.Uint64(v))}, nil
	}
	seen, err := hyperloglog.Parse(bytes.Clone(v))
	return counter.Gain{Number: number, Seen: &seen}, err
}

// historyKey is the beginning of the keys of what was gained in steps of one length.
func historyKey(history uint64, seconds uint32) []byte {
	return binary.BigEndian.AppendUint32(within(history, ""), seconds)
}

// Size is as counter.Reader says.
func (s *Store) Size(_ context.Context, prefix string) (n int64, err error) {
	err = s.view("size", func(tx *bbolt.Tx) error {
		c := tx.Bucket(countersBucket).Cursor()
		for k, _ := c.Seek([]byte(presence.FirstWith(prefix))); bytes.HasPrefix(k, []byte(prefix)) && k != nil; k, _ = c.Next() {
			n++
		}
		return nil
	})
	return n, err
}

// Aggregate is as counter.Reader says. It reads each counter with the prefix
// once; writes go on meanwhile.
func (s *Store) Aggregate(_ context.Context, prefix string) (a counter.Aggregate, err error) {
	err = s.view("aggregate", func(tx *bbolt.Tx) error {
		var total counter.Total
		registers := tx.Bucket(registersBucket)
		c := tx.Bucket(countersBucket).Cursor()
		for k, v := c.Seek([]byte(presence.FirstWith(prefix))); bytes.HasPrefix(k, []byte(prefix)) && k != nil; k, v = c.Next() {
			var r record
			if err := r.parse(v); err != nil {
				return fmt.Errorf("counter %q: %w", k, err)
			}
			total.Add(r.State)
			if r.Kind == counter.Unique {
				u, err := r.registers(registers)
				if err != nil {
					return fmt.Errorf("counter %q: %w", k, err)
				}
				total.Merge(u)
			}
		}
		a, err = total.Aggregate(prefix)
		return err
	})
	return a, err
}

// setsAtOnce is how many counters one call of Sets looks at.
const setsAtOnce = 10_000

// Sets is as counter.Reader says. The cursor is the key that comes next.
func (s *Store) Sets(_ context.Context, cursor string) (keys []string, next string, err error) {
	err = s.view("sets", func(tx *bbolt.Tx) error {
		c := tx.Bucket(countersBucket).Cursor()
		n := 0
		for k, v := c.Seek([]byte(cursor)); k != nil; k, v = c.Next() {
			if n++; n > setsAtOnce {
				next = string(k)
				return nil
			}
			var r record
			if err := r.parse(v); err != nil {
				return fmt.Errorf("counter %q: %w", k, err)
			}
			if r.Kind == counter.Members {
				keys = append(keys, string(k))
			}
		}
		return nil
	})
	return keys, next, err
}

// Watch is as counter.Feed says.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return s.hub.Watch(told, lost)
}

// record is a counter in the file: kind, then seven numbers of 8 bytes. One with a history has
// its number and its slots as text, too.
type record struct {
	counter.State
	set     uint64 // its members or registers; 0: it never had any
	ledger  uint64 // 0: it never had one
	history uint64 // also of its dimensions; 0: it never had one
}

const recordSize = 1 + 7*8

func (r *record) append(b []byte) []byte {
	b = append(b, byte(r.Kind))
	for _, n := range [...]uint64{uint64(r.Value), uint64(r.Updated), r.Version.Incarnation, r.Version.Sequence, r.Entries, r.set, r.ledger} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	if r.Slots == (counter.Slots{}) && r.history == 0 {
		return b
	}
	return r.Slots.Append(binary.BigEndian.AppendUint64(b, r.history))
}

func (r *record) parse(b []byte) (err error) {
	if len(b) < recordSize || len(b) > recordSize && len(b) < recordSize+8 {
		return fmt.Errorf("a record of %d bytes, want %d", len(b), recordSize)
	}
	n := func(i int) uint64 { return binary.BigEndian.Uint64(b[1+8*i:]) }
	*r = record{counter.State{
		Kind: counter.Kind(b[0]), Value: int64(n(0)), Updated: int64(n(1)),
		Version: counter.Version{Incarnation: n(2), Sequence: n(3)}, Entries: n(4),
	}, n(5), n(6), 0}
	if len(b) > recordSize {
		r.history = n(7)
		r.Slots, err = counter.ParseSlots(string(b[recordSize+8:]))
	}
	return err
}

// load leaves r zero when there is no counter.
func (r *record) load(counters *bbolt.Bucket, key string) error {
	b := counters.Get([]byte(key))
	if b == nil {
		*r = record{}
		return nil
	}
	if err := r.parse(b); err != nil {
		return fmt.Errorf("counter %q: %w", key, err)
	}
	return nil
}

// registers are those in the file, not to be changed.
func (r *record) registers(in *bbolt.Bucket) (hyperloglog.Registers, error) {
	if r.set == 0 {
		return hyperloglog.Registers{}, nil
	}
	return hyperloglog.Parse(in.Get(within(r.set, "")))
}

// within is the key of a thing in a set or a ledger.
func within(id uint64, thing string) []byte { return append(number(id), thing...) }

// number is n in 8 bytes.
func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// appendEntry writes op, at in unix milliseconds, delta, before, the length of
// the reason, the reason and the author.
func appendEntry(b []byte, e counter.Entry) []byte {
	b = append(b, byte(e.Op))
	for _, n := range [...]int64{e.At.UnixMilli(), e.Delta, e.Before} {
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	b = binary.BigEndian.AppendUint16(b, uint16(len(e.Reason)))
	b = append(b, e.Reason...)
	return append(b, e.By...)
}

func parseEntry(seq, b []byte) (counter.Entry, error) {
	const fixed = 1 + 3*8 + 2
	if len(seq) != 8 || len(b) < fixed {
		return counter.Entry{}, fmt.Errorf("an entry of %d bytes", len(b))
	}
	n := func(i int) int64 { return int64(binary.BigEndian.Uint64(b[1+8*i:])) }
	reason := int(binary.BigEndian.Uint16(b[fixed-2:]))
	if len(b) < fixed+reason {
		return counter.Entry{}, fmt.Errorf("an entry of %d bytes with a reason of %d", len(b), reason)
	}
	return counter.Entry{
		Seq: binary.BigEndian.Uint64(seq), At: time.UnixMilli(n(0)).UTC(), Op: counter.LedgerOp(b[0]),
		Delta: n(1), Before: n(2), After: n(1) + n(2), Reason: string(b[fixed : fixed+reason]), By: string(b[fixed+reason:]),
	}, nil
}

// step is the counter.Step of one transaction. Numbers change in records and
// are put in the end; members, entries and identities are put at once.
type step struct {
	tx      *bbolt.Tx
	now     time.Time
	records map[string]*record // what was looked at
	before  map[string]record  // how it was; lacks what was not there
	deleted uint64
	was     uint64                            // deleted in the file
	unique  map[string]*hyperloglog.Registers // what was looked at, put in the end
	told    []counter.Told
	fault   error // the first; the transaction is not committed then
}

func (s *Store) begin(tx *bbolt.Tx) *step {
	deleted := deletedIn(tx)
	return &step{
		tx: tx, now: s.cfg.Now(), deleted: deleted, was: deleted,
		records: map[string]*record{}, before: map[string]record{}, unique: map[string]*hyperloglog.Registers{},
	}
}

// deletedIn is the highest incarnation that was ever deleted.
func deletedIn(tx *bbolt.Tx) uint64 {
	if b := tx.Bucket(boltfile.Meta).Get(deletedKey); len(b) == 8 {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// get and put are of a bucket of the file.
func (t *step) get(bucket, key []byte) []byte { return t.tx.Bucket(bucket).Get(key) }
func (t *step) put(bucket, key, value []byte) { t.check(t.tx.Bucket(bucket).Put(key, value)) }
func (t *step) delete(bucket, key []byte)     { t.check(t.tx.Bucket(bucket).Delete(key)) }

func (t *step) check(err error) {
	if err != nil && t.fault == nil {
		t.fault = err
	}
}

// end puts what changed in records, and clears away.
func (t *step) end(ops int) error {
	for _, key := range slices.Sorted(maps.Keys(t.records)) { // neighbours share pages of the file
		r := t.records[key]
		before, was := t.before[key]
		if u := t.unique[key]; u != nil && !u.Empty() && *r != before {
			if r.set == 0 {
				r.set = t.newID()
			}
			t.put(registersBucket, within(r.set, ""), u.Bytes())
		}
		switch {
		case *r == before:
		case r.State != counter.State{}:
			t.put(countersBucket, []byte(key), r.append(nil))
		case was:
			t.delete(countersBucket, []byte(key))
		}
	}
	if t.deleted != t.was {
		t.put(boltfile.Meta, deletedKey, number(t.deleted))
	}
	t.clear(min(forgetPerOp*ops+16, forgetAtMost))
	return t.fault
}

func (t *step) record(key string) *record {
	r := t.records[key]
	if r == nil {
		r = &record{}
		t.check(r.load(t.tx.Bucket(countersBucket), key))
		t.records[key] = r
		if r.State != (counter.State{}) {
			t.before[key] = *r
		}
	}
	return r
}

func (t *step) State(key string) *counter.State { return &t.record(key).State }
func (t *step) Deleted() uint64                 { return t.deleted }

func (t *step) Remembered(id counter.Identity) bool {
	until := t.get(idsBucket, id[:])
	return len(until) == 8 && int64(binary.BigEndian.Uint64(until)) > t.now.Unix()
}

func (t *step) Remember(id counter.Identity) {
	until := number(uint64(t.now.Add(counter.IdentityKept).Unix()))
	t.put(idsBucket, id[:], until)
	t.put(forgetBucket, append(until[:8:8], id[:]...), nil)
}

// newID is that of a set, a ledger or a history.
func (t *step) newID() uint64 {
	n, err := t.tx.Bucket(countersBucket).NextSequence()
	t.check(err)
	return n
}

func (t *step) Join(key, member string) bool {
	r := t.record(key)
	if r.set == 0 {
		r.set = t.newID()
	}
	k := within(r.set, member)
	if t.get(membersBucket, k) != nil {
		return false
	}
	t.put(membersBucket, k, []byte{})
	return true
}

func (t *step) Leave(key, member string) bool {
	r := t.record(key)
	if r.set == 0 {
		return false
	}
	k := within(r.set, member)
	if t.get(membersBucket, k) == nil {
		return false
	}
	t.delete(membersBucket, k)
	return true
}

func (t *step) Registers(key string) *hyperloglog.Registers {
	u := t.unique[key]
	if u == nil {
		in, err := t.record(key).registers(t.tx.Bucket(registersBucket))
		t.check(err)
		own := in.Clone()
		u = &own
		t.unique[key] = u
	}
	return u
}

// Empty costs the same for a large set: its members are cleared away later.
func (t *step) Empty(key string) {
	r := t.record(key)
	t.discard(&r.set)
	delete(t.unique, key)
}

func (t *step) discard(id *uint64) {
	if *id != 0 {
		t.put(garbageBucket, within(*id, ""), nil)
		*id = 0
	}
}

// Enter also clears away some entries that were kept long enough.
func (t *step) Enter(key string, e counter.Entry, kept time.Duration) {
	r := t.record(key)
	if r.ledger == 0 {
		r.ledger = t.newID()
	}
	prefix := within(r.ledger, "")
	if kept > 0 {
		c := t.tx.Bucket(ledgersBucket).Cursor()
		for range entriesPerEntry {
			k, v := c.Seek(prefix)
			if !bytes.HasPrefix(k, prefix) {
				break
			}
			old, err := parseEntry(k[8:], v)
			if t.check(err); err != nil || old.At.Add(kept).After(t.now) {
				break
			}
			t.check(c.Delete())
		}
	}
	t.put(ledgersBucket, binary.BigEndian.AppendUint64(prefix, e.Seq), appendEntry(nil, e))
}

func (t *step) Past(key string, s counter.Slot, kept time.Duration) {
	t.keep(t.gainKey(key, s), number(uint64(s.Value)), s, kept)
}

func (t *step) See(key string, s counter.Slot, members []string, kept time.Duration) {
	at := t.gainKey(key, s)
	seen, err := hyperloglog.Parse(bytes.Clone(t.get(gainsBucket, at)))
	if t.check(err); seen.Add(members...) {
		t.keep(at, seen.Bytes(), s, kept)
	}
}

// gainKey is where the gains of a step are.
func (t *step) gainKey(key string, s counter.Slot) []byte {
	return binary.BigEndian.AppendUint64(historyKey(t.history(key), s.Step), uint64(s.Number))
}

// history is the number of a counter's history, which may be new.
func (t *step) history(key string) uint64 {
	r := t.record(key)
	if r.history == 0 {
		r.history = t.newID()
	}
	return r.history
}

// dimensionKey is the beginning of the keys of what was counted under a dimension.
func dimensionKey(history uint64, name string) []byte {
	return append(append(within(history, ""), byte(len(name))), name...)
}

func (t *step) Count(key, name, value string, delta int64) {
	of := dimensionKey(t.history(key), name)
	at := append(of[:len(of):len(of)], value...)
	if is := t.get(countedBucket, at); len(is) == 8 {
		t.put(countedBucket, at, number(uint64(counter.Saturated(int64(binary.BigEndian.Uint64(is)), delta))))
		return
	}
	other, kept := int64(0), uint64(0)
	if is := t.get(countedBucket, of); len(is) == 16 {
		other, kept = int64(binary.BigEndian.Uint64(is)), binary.BigEndian.Uint64(is[8:])
	}
	if kept < counter.MaxValues {
		t.put(countedBucket, at, number(uint64(delta)))
		kept++
	} else {
		other = counter.Saturated(other, delta)
	}
	t.put(countedBucket, of, binary.BigEndian.AppendUint64(number(uint64(other)), kept))
}

// keep puts what was gained, and has somebody look for what was kept long enough, once for each
// history and step.
func (t *step) keep(at, value []byte, s counter.Slot, kept time.Duration) {
	t.put(gainsBucket, at, value)
	prefix := at[: len(at)-8 : len(at)-8]
	if is := t.get(keptBucket, prefix); len(is) != 16 || binary.BigEndian.Uint64(is) != uint64(kept/time.Second) {
		t.await(prefix, int64(s.Number), time.Duration(s.Step)*time.Second, kept)
	}
}

// await has somebody look at a history whose oldest gain is that of a number.
func (t *step) await(prefix []byte, oldest int64, step, kept time.Duration) {
	due := uint64(counter.LookAgain(oldest, step, kept, t.now).Unix())
	t.put(keptBucket, prefix, binary.BigEndian.AppendUint64(number(uint64(kept/time.Second)), due))
	t.put(dueBucket, append(number(due), prefix...), nil)
}

// outdated forgets gains that were kept long enough, at most so many.
func (t *step) outdated(left int) {
	for left > 0 && t.fault == nil {
		k, _ := t.tx.Bucket(dueBucket).Cursor().First()
		if len(k) != 8+12 || int64(binary.BigEndian.Uint64(k)) > t.now.Unix() {
			return
		}
		left--
		k = bytes.Clone(k)
		prefix := k[8:]
		is := t.get(keptBucket, prefix)
		if len(is) != 16 || !bytes.Equal(is[8:], k[:8]) { // it is gone, or kept differently since
			t.delete(dueBucket, k)
			continue
		}
		kept := time.Duration(binary.BigEndian.Uint64(is)) * time.Second
		step := time.Duration(binary.BigEndian.Uint32(prefix[8:])) * time.Second
		c := t.tx.Bucket(gainsBucket).Cursor()
		next, _ := c.Seek(prefix)
		for ; left > 0 && bytes.HasPrefix(next, prefix); next, _ = c.Seek(prefix) {
			if !counter.Over(int64(binary.BigEndian.Uint64(next[12:])), step, kept, t.now) {
				break
			}
			t.check(c.Delete())
			left--
		}
		switch {
		case left == 0: // the rest another time
			return
		case bytes.HasPrefix(next, prefix):
			t.await(prefix, int64(binary.BigEndian.Uint64(next[12:])), step, kept)
		default:
			t.delete(keptBucket, prefix)
		}
		t.delete(dueBucket, k)
	}
}

func (t *step) Drop(key string, v counter.Version) {
	t.deleted = max(t.deleted, v.Incarnation)
	r := t.record(key)
	t.discard(&r.set)
	t.discard(&r.ledger)
	t.discard(&r.history)
	delete(t.unique, key)
}

func (t *step) Changed(key string, joined, left []string, all bool) {
	t.told = append(t.told, counter.Told{Key: key, Joined: joined, Left: left, All: all})
}

// clear forgets identities whose day is over and gains that were kept long enough, and takes
// away members, registers, entries and gains that are no counter's, a bounded number of each.
func (t *step) clear(identities int) {
	c := t.tx.Bucket(forgetBucket).Cursor()
	for range identities {
		k, _ := c.First()
		if len(k) != 8+16 || int64(binary.BigEndian.Uint64(k)) > t.now.Unix() {
			break
		}
		// One that was remembered anew since has a later end.
		if until := t.get(idsBucket, k[8:]); bytes.Equal(until, k[:8]) {
			t.delete(idsBucket, k[8:])
		}
		t.check(c.Delete())
	}
	t.outdated(garbageAtOnce)
	left := garbageAtOnce
	for left > 0 {
		id, _ := t.tx.Bucket(garbageBucket).Cursor().First()
		if id == nil {
			return
		}
		id = bytes.Clone(id)
		for _, b := range [][]byte{membersBucket, registersBucket, ledgersBucket, gainsBucket, countedBucket, keptBucket} {
			c := t.tx.Bucket(b).Cursor()
			for k, _ := c.Seek(id); bytes.HasPrefix(k, id) && left > 0; k, _ = c.Seek(id) {
				t.check(c.Delete())
				left--
			}
		}
		if left > 0 {
			t.delete(garbageBucket, id)
			left--
		}
		if t.fault != nil {
			return
		}
	}
}
