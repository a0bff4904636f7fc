package presencemem

import (
	"bytes"
	"cmp"
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
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/presence"
	"headcount/presence/hashkey"
	"headcount/unread"
)

// A data directory has one file with these buckets:
//
//	meta     format -> 1; id-secret -> the secret of anonymous ids; hash-key -> see HashKey;
//	         probe -> see probe
//	pages    page -> "incarnation all by at"
//	notes    page -> "all title", a line break, URL: see unread.Note
//	owns     page, a zero byte, 16 bytes of user -> "changes last before"
//	records  16 bytes of user -> "incarnation sequence updated"
//	follows  16 bytes of user, page -> see unread.Follow
//	keys     16 bytes of hash -> 8 bytes: unix seconds when the key is forgotten
//	minutes  minutes of pages, see minutes.go
//	days     days of pages, see days.go
//	seen     when users departed, see lastseen.go
const dataFile = "headcount.db"

var (
	pagesBucket   = []byte("pages")
	notesBucket   = []byte("notes")
	ownsBucket    = []byte("owns")
	recordsBucket = []byte("records")
	followsBucket = []byte("follows")
	keysBucket    = []byte("keys")
	minutesBucket = []byte("minutes")
	daysBucket    = []byte("days")
	seenBucket    = []byte("seen")

	buckets = [][]byte{
		pagesBucket, notesBucket, ownsBucket, recordsBucket, followsBucket, keysBucket, minutesBucket, daysBucket,
		seenBucket,
	}

	secretKey = []byte("id-secret")
	probeKey  = []byte("probe")
	hashKey   = []byte("hash-key")
	format    = []byte("1")
)

const (
	probeEvery = time.Second // while the file cannot be written
	probeBytes = 256 << 10   // more than most transactions need
	// maxWaiting is how many operations may wait while a transaction is written. A
	// further operation is refused at once with presence.ErrUnavailable. A transaction
	// also has at most maxWaiting operations.
	maxWaiting = 4096
)

// disk is the data file. Its goroutine is the writer of the unread state: it commits
// all waiting operations in one transaction with one fsync. When a commit fails, disk
// refuses its operations, and all later ones at once, until it could write a probe.
type disk struct {
	db      *bbolt.DB
	log     zerolog.Logger
	waiting chan *op
	closing chan struct{}         // closed by close
	ended   chan struct{}         // closed when run has returned
	failure atomic.Pointer[error] // why the file cannot be written; nil: it can be

	// undo are entries that the next probe also writes, so that the file matches the
	// memory again. Only the writer uses it.
	undo []put
}

// put sets or deletes one entry of the file.
type put struct {
	bucket, key, value []byte // value nil: the key is deleted
}

// openDisk opens the file in dir, or creates it, and fills s from it. secret is the secret of
// anonymous ids. No operation is written before run.
func openDisk(dir string, s *Store) (d *disk, secret string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, "", fmt.Errorf("data directory: %w", err)
	}

	path := filepath.Join(dir, dataFile)
	d = &disk{
		log: s.cfg.Log, waiting: make(chan *op, maxWaiting),
		closing: make(chan struct{}), ended: make(chan struct{}),
	}

	d.db, err = boltfile.Open(path, nil, format, buckets, func(db *bbolt.DB) (err error) {
		// load writes already: a secret, and what has to be dropped.
		d.db = db
		secret, err = d.load(s)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("data directory: %w", err)
	}

	return d, secret, nil
}

// load reads the whole file into s, and drops entries that cannot be read. When they cannot be
// deleted, the file counts as not writable.
func (d *disk) load(s *Store) (secret string, err error) {
	secret, err = d.secret()
	if err != nil {
		return "", err
	}

	// From here on lastSeen notes what the file lacks.
	s.seen.unsaved = map[presence.User]struct{}{}
	l := loader{unread: &s.unread, history: &s.history, days: &s.days, seen: s.seen, now: time.Now()}
	if err := d.db.View(l.load); err != nil {
		return "", err
	}

	if l.dropped > 0 {
		d.log.Warn().Int("entries", l.dropped).AnErr("first", l.first).
			Msg("the data directory had entries that cannot be read; they have been dropped")
	}

	// In a transaction of its own, because the file may not be writable, and can be read all the same.
	if len(l.puts) > 0 {
		if err := d.update(l.puts, nil); err != nil {
			// Tried again with each probe. Until then the file has entries that the memory has dropped.
			d.undo = l.puts
			d.fail(err)
		}
	}

	if s.seen.retention == 0 {
		if err := d.dropSeen(); err != nil {
			d.log.Warn().Err(err).
				Msg("the times when users were last here could not be deleted from the data directory; " +
					"retrying at the next start")
		}
	}

	return secret, nil
}

// secret returns the stored secret of anonymous ids. If there is none, it stores a new one.
func (d *disk) secret() (secret string, err error) {
	read := func(tx *bbolt.Tx) error {
		secret = string(tx.Bucket(boltfile.Meta).Get(secretKey))
		return nil
	}
	err = d.db.View(read) // reading works on a full disk too
	if err != nil || secret != "" {
		return secret, err
	}

	// Stored before it is used: ids that it signs must be valid after a restart.
	secret = rand.Text()
	return secret, d.update([]put{{boltfile.Meta, secretKey, []byte(secret)}}, nil)
}

// loader fills the unread state and the histories from a file, and collects the entries that
// must be deleted.
type loader struct {
	unread  *unreadState
	history *pageHistory
	days    *dayHistory
	seen    *lastSeen
	now     time.Time
	puts    []put
	dropped int   // entries that cannot be read
	first   error // says what is wrong with the first of them
}

// each passes the entries of a bucket to read, and drops those about which it returns an error.
func (l *loader) each(tx *bbolt.Tx, bucket []byte, read func(k, v []byte) error) {
	_ = tx.Bucket(bucket).ForEach(func(k, v []byte) error { // has no error of its own
		if err := read(k, v); err != nil {
			// The memory of bbolt is valid within the transaction alone.
			l.puts = append(l.puts, put{bucket, bytes.Clone(k), nil})
			l.first = cmp.Or(l.first, err)
			l.dropped++
		}
		return nil
	})
}

func (l *loader) load(tx *bbolt.Tx) error {
	// Pages before their notes and authors, records before their follows: each needs the one before.
	l.each(tx, pagesBucket, l.page)
	l.each(tx, notesBucket, l.note)
	l.each(tx, ownsBucket, l.own)
	l.each(tx, recordsBucket, l.record)
	l.each(tx, followsBucket, l.follow)
	l.each(tx, keysBucket, l.key)

	if l.history.retention > 0 {
		l.loadMinutes(tx)
	}
	if l.days.retention > 0 {
		l.loadDays(tx)
	}
	if l.seen.retention > 0 {
		l.loadSeen(tx)
	}

	l.noteEmpty()
	slices.SortFunc(l.unread.oldest, func(a, b idempotencyKey) int { return int(a.until - b.until) })

	return nil
}

func (l *loader) page(k, v []byte) error {
	f, err := numbers(string(v), 4)
	if err != nil {
		return fmt.Errorf("the changes of %q: %w", k, err)
	}

	// New incarnations must be greater than all that were ever assigned.
	l.unread.incarnation = max(l.unread.incarnation, uint64(f[0]))
	l.unread.pages[string(k)] = &changedPage{
		level: unread.Level{Incarnation: uint64(f[0]), All: f[1], By: f[2], At: presence.TimeOf(f[3])},
		owns:  map[unread.User]unread.Own{},
	}

	return nil
}

func (l *loader) note(k, v []byte) error {
	p := l.unread.pages[string(k)]
	if p == nil {
		return fmt.Errorf("a note of %q without its page", k)
	}

	p.note = unread.NoteOf(string(v))
	return nil
}

func (l *loader) own(k, v []byte) error {
	page, user, _ := strings.Cut(string(k), "\x00")
	f, err := numbers(string(v), 3)
	p := l.unread.pages[page]
	if err != nil || len(user) != len(unread.User{}) || p == nil {
		return fmt.Errorf("own changes of %q, without their page or with other text: %q", page, v)
	}

	p.owns[unread.User([]byte(user))] = unread.Own{Changes: f[0], Last: f[1], Before: presence.TimeOf(f[2])}
	return nil
}

func (l *loader) record(k, v []byte) error {
	f, err := numbers(string(v), 3)
	if err != nil || len(k) != len(unread.User{}) {
		return fmt.Errorf("a record: %q", v)
	}

	l.unread.incarnation = max(l.unread.incarnation, uint64(f[0]))
	l.unread.records[unread.User(k)] = &unread.Record{
		Version: presence.Version{Incarnation: uint64(f[0]), Sequence: uint64(f[1])},
		Updated: presence.TimeOf(f[2]),
	}

	return nil
}

// follow reads one follow. The follows come after all records, sorted by user and
// then by page.
func (l *loader) follow(k, v []byte) error {
	if len(k) <= len(unread.User{}) {
		return fmt.Errorf("a follow of nobody: %q", v)
	}
	user := unread.User(k[:len(unread.User{})])
	f, err := unread.ParseFollow(string(k[len(user):]), string(v))
	if err != nil {
		return err
	}

	// The user's record has been read already, because records come first.
	r := l.unread.records[user]
	if r == nil {
		return fmt.Errorf("a follow of %q without its record", f.Page)
	}

	r.Follows = append(r.Follows, f)
	return nil
}

// noteEmpty notes the records without follows. The file does not say since when they have none.
func (l *loader) noteEmpty() {
	for user, r := range l.unread.records {
		if len(r.Follows) == 0 {
			l.unread.empty = append(l.unread.empty, emptyRecord{user, r.Version, l.now.Add(unread.EmptyFor).Unix()})
		}
	}
}

func (l *loader) key(k, v []byte) error {
	if len(k) != 16 || len(v) != 8 {
		return fmt.Errorf("an idempotency key: %q", k)
	}

	key := idempotencyKey{[16]byte(k), int64(binary.BigEndian.Uint64(v))}
	// Expired while no process ran.
	if key.until <= l.now.Unix() {
		l.puts = append(l.puts, put{keysBucket, bytes.Clone(k), nil})
		return nil
	}

	l.unread.keys[key.hash] = struct{}{}
	l.unread.oldest = append(l.unread.oldest, key)
	return nil
}

// hashKey returns the stored key. If there is none, it stores a new one, unless the file has users.
func (d *disk) hashKey() (key []byte, err error) {
	err = d.db.View(func(tx *bbolt.Tx) error { // reading works on a full disk too
		key = bytes.Clone(tx.Bucket(boltfile.Meta).Get(hashKey))
		return nil
	})
	if err != nil || key != nil {
		return key, err
	}

	// With a new key no user would be found again, so a file that has users gets none.
	return key, d.db.Update(func(tx *bbolt.Tx) error {
		for _, users := range [][]byte{recordsBucket, ownsBucket} {
			first, _ := tx.Bucket(users).Cursor().First()
			if first != nil {
				return errors.New("it has users and no key: start the release before this one on it once")
			}
		}

		key = hashkey.New()
		return tx.Bucket(boltfile.Meta).Put(hashKey, key)
	})
}

// numbers parses n whole numbers, none of them negative.
func numbers(text string, n int) ([]int64, error) {
	fields := strings.Split(text, " ")
	if len(fields) != n {
		return nil, fmt.Errorf("%q does not have %d numbers", text, n)
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

// puts returns the transaction's changes of the file.
func (d *transaction) puts() []put {
	var all []put
	add := func(bucket []byte, key string, value []byte) { all = append(all, put{bucket, []byte(key), value}) }

	for page, p := range d.pages {
		l := p.level
		add(pagesBucket, page, fmt.Appendf(nil, "%d %d %d %d", l.Incarnation, l.All, l.By, presence.Seconds(l.At)))
		if p.note != (unread.Note{}) {
			add(notesBucket, page, fmt.Appendf(nil, "%d %s\n%s", p.note.All, p.note.Title, p.note.URL))
		}
		for user, o := range p.owns {
			value := fmt.Appendf(nil, "%d %d %d", o.Changes, o.Last, presence.Seconds(o.Before))
			add(ownsBucket, page+"\x00"+string(user[:]), value)
		}
	}

	for user, r := range d.records {
		value := fmt.Appendf(nil, "%d %d %d", r.Version.Incarnation, r.Version.Sequence, presence.Seconds(r.Updated))
		if len(r.Follows) == 0 && r.Updated.IsZero() {
			value = nil // an empty record: only its version is lost, and the next process assigns greater ones
		}

		add(recordsBucket, string(user[:]), value)
		// Only what differs is written: a record may have a thousand follows.
		old := unread.Record{}
		if is := d.base.records[user]; is != nil {
			old = *is
		}

		set, gone := r.Differences(old)
		for _, f := range set {
			add(followsBucket, string(user[:])+f.Page, f.AppendValue(nil))
		}
		for _, page := range gone {
			add(followsBucket, string(user[:])+page, nil)
		}
	}

	for _, k := range d.newest {
		add(keysBucket, string(k.hash[:]), binary.BigEndian.AppendUint64(nil, uint64(k.until)))
	}
	for hash := range d.gone {
		_, again := d.keys[hash]
		if !again {
			add(keysBucket, string(hash[:]), nil)
		}
	}

	// In the order of the file, so that neighbours are written together.
	slices.SortFunc(all, func(a, b put) int {
		if c := bytes.Compare(a.bucket, b.bucket); c != 0 {
			return c
		}
		return bytes.Compare(a.key, b.key)
	})

	return all
}

// submit passes o to the writer and waits for its outcome.
func (d *disk) submit(ctx context.Context, o *op) error {
	select {
	case <-d.closing:
		return errClosed
	default:
	}

	// Refused at once while the file cannot be written, so that nobody waits for the next probe.
	if err := d.writable(); err != nil {
		return refused(err)
	}

	select {
	// Never waits for room: the disk is too slow by then, and the caller is better off with an answer.
	case d.waiting <- o:
	default:
		return refused(fmt.Errorf("%d operations wait for the disk already", maxWaiting))
	}

	select {
	case <-o.done:
		return o.err
	case <-d.ended:
		if o.claim() {
			return errClosed
		}
		<-o.done
		return o.err
	case <-ctx.Done():
		if o.claim() {
			return refused(fmt.Errorf("the operation was not carried out: %w", ctx.Err()))
		}
		return refused(fmt.Errorf("the operation is being written and may succeed: %w", ctx.Err()))
	}
}

var errClosed = refused(errors.New("the data directory is closed"))

// writable returns nil if the file can be written, or else the reason why not. A nil disk
// is always writable.
func (d *disk) writable() error {
	if d == nil {
		return nil
	}

	if err := d.failure.Load(); err != nil {
		return *err
	}

	return nil
}

// run is the writer. It ends with close, after it has carried out the waiting operations.
func (d *disk) run(commit func([]*op)) {
	defer close(d.ended)

	for {
		// nil, hence never ready, while the file can be written.
		var probe <-chan time.Time
		if d.writable() != nil {
			probe = time.After(probeEvery)
		}

		select {
		case o := <-d.waiting:
			commit(d.batch(o))
		case <-probe:
			d.probe()
		case <-d.closing:
			// The callers of the waiting operations have no answer yet.
			if rest := d.batch(); len(rest) > 0 {
				commit(rest)
			}
			return
		}
	}
}

// batch returns ops together with the waiting operations.
func (d *disk) batch(ops ...*op) []*op {
	// What came during the last write goes together, with one sync of the disk.
	for len(ops) < maxWaiting {
		select {
		case o := <-d.waiting:
			ops = append(ops, o)
		default:

			return ops
		}
	}
	return ops
}

// write writes tx to the file, all of it or nothing. Its error is
// presence.ErrUnavailable. A nil disk does nothing.
func (d *disk) write(tx *transaction) error {
	if d == nil {
		return nil
	}

	// A write may have failed since these operations were queued.
	if err := d.writable(); err != nil {
		return refused(err)
	}

	puts := tx.puts()
	if len(puts) == 0 {
		return nil
	}

	var before []put
	if err := d.update(puts, &before); err != nil {
		d.undo = before
		d.fail(err)
		return refused(err)
	}

	return nil
}

func refused(err error) error { return fmt.Errorf("presencemem: %w: %w", presence.ErrUnavailable, err) }

// fail records that the file cannot be written.
func (d *disk) fail(err error) {
	d.log.Error().Err(err).Msg("the data directory cannot be written; changes and follows are refused until it can")

	err = fmt.Errorf("the data directory cannot be written: %w", err)
	// From here on submit refuses, and run probes.
	d.failure.Store(&err)
}

// probe tests whether the file can be written again, with room for further
// transactions. A transaction that failed at its very end may be in the file all the
// same, so the probe also restores the entries from before it (undo).
func (d *disk) probe() {
	filler := put{boltfile.Meta, probeKey, make([]byte, probeBytes)}
	if d.update(append([]put{filler}, d.undo...), nil) != nil {
		return
	}

	// The filler showed that there is room for a transaction, and must not take that room.
	filler.value = nil
	if d.update([]put{filler}, nil) != nil {
		return
	}

	d.undo = nil
	d.failure.Store(nil)

	d.log.Info().Msg("the data directory can be written again")
}

// update writes puts in one transaction. Unless before is nil, it appends the former
// entries to before.
func (d *disk) update(puts []put, before *[]put) error {
	return d.db.Update(func(tx *bbolt.Tx) error {
		for _, p := range puts {
			b := tx.Bucket(p.bucket)
			if before != nil {
				// A commit that fails at its very end may be in the file after a restart, see probe.
				*before = append(*before, put{p.bucket, p.key, bytes.Clone(b.Get(p.key))})
			}

			var err error
			if p.value == nil {
				err = b.Delete(p.key)
			} else {
				err = b.Put(p.key, p.value)
			}
			if err != nil {
				return err
			}
		}

		return nil
	})
}

// close carries out the waiting operations and closes the file.
func (d *disk) close() error {
	if d == nil {
		return nil
	}

	// The writer ends first, because it uses the file.
	close(d.closing)
	<-d.ended
	return d.db.Close()
}
