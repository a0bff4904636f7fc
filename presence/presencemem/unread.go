package presencemem

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/unread"
)

// maxKeys bounds the idempotency keys. Beyond the bound, the oldest key is forgotten before
// unread.KeyFor has passed. A key takes 24 bytes, and as much again in the map: 50 MB in all.
const maxKeys = 1_000_000

// maxEmptyRecords bounds the records without follows. Beyond the bound, the one that has been empty longest is
// forgotten before unread.EmptyFor has passed. A record takes about 200 bytes with its place in the list: 20 MB in all.
const maxEmptyRecords = 100_000

// unreadState has all changes and follows: unread.Store in memory. The memory follows
// the disk: the writer applies operations to a transaction, writes it to the file, and
// only then installs it in memory, notifies the watchers and replies. So a refused
// operation leaves no trace, and a reader never waits for the disk.
//
// There is one writer at a time: the goroutine of disk, or without a disk the goroutine
// that holds turn.
type unreadState struct {
	disk *disk      // nil: all data ends with the process
	turn sync.Mutex // for writers without a disk

	// mu guards all below. The writer holds it to install a transaction, and other
	// goroutines to read. The writer reads without it, since nobody else writes.
	mu          sync.RWMutex
	pages       map[string]*changedPage
	records     map[unread.User]*unread.Record // replaced, never written to
	keys        map[[16]byte]struct{}
	oldest      []idempotencyKey // the keys, in the order in which they are forgotten
	empty       []emptyRecord    // the records without follows, in the order in which they are forgotten
	incarnation uint64           // highest incarnation assigned to a level or record
}

// changedPage is a page that has changed, with the own changes of its authors.
type changedPage struct {
	level unread.Level
	owns  map[unread.User]unread.Own // at most unread.MaxAuthors
	note  unread.Note
}

type idempotencyKey struct {
	hash  [16]byte
	until int64 // unix seconds
}

// emptyRecord is a record that has no follows in this version.
type emptyRecord struct {
	user    unread.User
	version presence.Version
	until   int64 // unix seconds
}

var _ unread.Store = (*Store)(nil)

func newUnreadState() unreadState {
	return unreadState{
		pages:   map[string]*changedPage{},
		records: map[unread.User]*unread.Record{},
		keys:    map[[16]byte]struct{}{},
	}
}

// transaction has the changes that a group of operations makes to base. The writer owns it.
type transaction struct {
	base        *unreadState
	now         time.Time
	pages       map[string]*transactionPage
	records     map[unread.User]*unread.Record // the zero record: it is forgotten
	keys        map[[16]byte]struct{}
	newest      []idempotencyKey      // keys, in their order
	forgotten   int                   // number of keys forgotten from the front of base.oldest
	gone        map[[16]byte]struct{} // these keys, which may be among newest again
	emptied     []emptyRecord         // records that have no follows after the transaction, in no order
	passed      int                   // number of elements taken from the front of base.empty
	incarnation uint64
}

type transactionPage struct {
	level   unread.Level
	owns    map[unread.User]unread.Own // of the authors whose own changes change
	authors int                        // number of all authors, including those in base
	note    unread.Note                // zero: unchanged
}

func newTransaction(was *unreadState, now time.Time) *transaction {
	return &transaction{
		base:        was,
		now:         now,
		incarnation: was.incarnation,
		pages:       map[string]*transactionPage{},
		records:     map[unread.User]*unread.Record{},
		keys:        map[[16]byte]struct{}{},
		gone:        map[[16]byte]struct{}{},
	}
}

func (d *transaction) newIncarnation() uint64 {
	d.incarnation = max(d.incarnation+1, uint64(d.now.UnixMilli()))
	return d.incarnation
}

// change counts a change of the page, unless its key is known.
func (d *transaction) change(page string, c unread.Change) {
	if c.Key != "" {
		fresh := d.remember(unread.KeyHash(page, c.Key))
		if !fresh {
			return
		}
	}

	was := d.base.pages[page]
	p := d.pages[page]
	if p == nil {
		p = &transactionPage{owns: map[unread.User]unread.Own{}}
		// The page as it was before the transaction: base does not change until install.
		if was != nil {
			p.level = was.level
			p.authors = len(was.owns)
		} else {
			p.level.Incarnation = d.newIncarnation()
		}
		d.pages[page] = p
	}

	old := p.level
	p.level.All++
	p.level.At = d.now.UTC().Truncate(time.Second)
	if c.Value() != "" {
		p.note = unread.Note{All: p.level.All, Title: c.Title, URL: c.URL}
	}

	if c.By == nil {
		return
	}

	own, known := p.owns[*c.By]
	if !known && was != nil {
		own, known = was.owns[*c.By]
	}
	// The page has too many authors to remember another one, so the change is unread for its author, too.
	if !known && p.authors >= unread.MaxAuthors {
		return
	}
	if !known {
		p.authors++
	}

	// By counts the changes of remembered authors alone, because a gateway asks who made the changes that By counts.
	p.level.By++
	p.owns[*c.By] = own.Next(old)
}

// remember adds the key and reports whether it is new. It forgets keys of base only: a
// transaction has fewer keys than maxKeys, and lasts less than KeyFor.
func (d *transaction) remember(key [16]byte) bool {
	d.forgetKeys() // also this one, if its time is over
	_, known := d.base.keys[key]
	_, gone := d.gone[key]
	if known && !gone {
		return false
	}
	// Two calls with one key may be in one transaction.
	if _, known := d.keys[key]; known {
		return false
	}

	d.keys[key] = struct{}{}
	d.newest = append(d.newest, idempotencyKey{key, d.now.Add(unread.KeyFor).Unix()})
	d.forgetKeys() // there is one more now

	return true
}

// forgetKeys forgets the keys of base whose time is over, and the oldest beyond maxKeys.
func (d *transaction) forgetKeys() {
	for _, oldest := range d.base.oldest[d.forgotten:] {
		fits := len(d.base.oldest)-d.forgotten+len(d.newest) <= maxKeys
		if fits && oldest.until > d.now.Unix() {
			return
		}

		d.gone[oldest.hash] = struct{}{}
		d.forgotten++
	}
}

// save replaces old with r and returns r's new version.
func (d *transaction) save(user unread.User, old, r unread.Record) (presence.Version, error) {
	is := d.records[user]
	// An operation before it in this transaction may have saved the record already.
	if is == nil {
		is = d.base.records[user]
	}

	version := presence.Version{}
	if is != nil {
		version = is.Version
	}
	// The caller has read another record, and would undo what was saved since.
	if version != old.Version {
		return presence.Version{}, unread.ErrConflict
	}

	if version == (presence.Version{}) {
		version.Incarnation = d.newIncarnation()
	}
	version.Sequence++

	// The caller keeps its own, and readers of the memory must never see it change.
	r = r.Clone()
	r.Version = version
	d.records[user] = &r

	return version, nil
}

// forgetEmpty forgets records that have had no follows for unread.EmptyFor, and those beyond maxEmptyRecords. It comes
// last in a transaction, when it is known which records are empty.
func (d *transaction) forgetEmpty() {
	for user, r := range d.records {
		if len(r.Follows) == 0 {
			d.emptied = append(d.emptied, emptyRecord{user, r.Version, d.now.Add(unread.EmptyFor).Unix()})
		}
	}

	for _, e := range d.base.empty {
		fits := len(d.base.empty)-d.passed+len(d.emptied) <= maxEmptyRecords
		if fits && e.until > d.now.Unix() {
			return
		}
		d.passed++

		is := d.base.records[e.user]
		saved := d.records[e.user] != nil
		// A record that was saved since has another entry, further behind, if it is empty still.
		if is != nil && is.Version == e.version && !saved {
			d.records[e.user] = &unread.Record{}
		}
	}
}

// install applies a transaction that is in the file.
func (n *unreadState) install(d *transaction) {
	n.mu.Lock()
	defer n.mu.Unlock()

	for page, p := range d.pages {
		is := n.pages[page]
		if is == nil {
			is = &changedPage{owns: p.owns}
			n.pages[page] = is
		}

		is.level = p.level
		if p.note != (unread.Note{}) {
			is.note = p.note
		}
		// Under the lock: readers see all of the transaction or nothing.
		for user, own := range p.owns {
			is.owns[user] = own
		}
	}

	for user, r := range d.records {
		if r.Version == (presence.Version{}) {
			delete(n.records, user)
		} else {
			n.records[user] = r
		}
	}

	// In the order of time, since all of a transaction are of the same moment.
	n.empty = append(n.empty[d.passed:], d.emptied...)
	for _, k := range n.oldest[:d.forgotten] {
		delete(n.keys, k.hash)
	}

	n.oldest = append(n.oldest[d.forgotten:], d.newest...)
	for key := range d.keys {
		n.keys[key] = struct{}{}
	}

	n.incarnation = d.incarnation
}

// updates returns the newest update of each topic that the transaction changes, by bucket.
func (d *transaction) updates(buckets int) map[int][]presence.Update {
	all := map[int][]presence.Update{}
	add := func(u presence.Update) {
		b := u.Topic.Bucket(buckets)
		all[b] = append(all[b], u)
	}

	for page, p := range d.pages {
		add(p.level.Update(page))
	}
	for user, r := range d.records {
		if r.Version != (presence.Version{}) { // a record that is forgotten was empty, so nothing changes for its user
			add(r.Update(user))
		}
	}

	return all
}

// op is one write operation.
type op struct {
	do    func(*transaction) error // leaves the transaction unchanged when it fails
	taken atomic.Bool              // by the writer, which carries it out, or by the caller, who gives up
	done  chan struct{}            // closed when err is set; only if the writer took the op
	err   error
}

// claim reports whether this call takes o: only the first one does.
func (o *op) claim() bool { return o.taken.CompareAndSwap(false, true) }

// apply makes the writer run do, and returns nil when its result is stored. A refused
// operation leaves no trace.
func (s *Store) apply(ctx context.Context, do func(*transaction) error) error {
	n := &s.unread
	o := &op{do: do, done: make(chan struct{})}
	if n.disk != nil {
		return n.disk.submit(ctx, o)
	}

	// Without a disk each caller is the writer, in turn.
	n.turn.Lock()
	defer n.turn.Unlock()

	s.commit([]*op{o})
	return o.err
}

// commit carries out ops in one transaction. Only the writer calls it.
func (s *Store) commit(ops []*op) {
	n := &s.unread
	d := newTransaction(n, time.Now())

	taken := ops[:0]
	for _, o := range ops {
		// A caller who gave up has claimed the operation, and was told that it was not made.
		if o.claim() {
			o.err = o.do(d)
			taken = append(taken, o)
		}
	}
	// After all operations, because they decide which records are empty.
	d.forgetEmpty()

	err := n.disk.write(d)
	if err == nil {
		n.install(d)
		// After install: a watcher that reads on a publication must find it.
		s.mu.Lock()
		for b, updates := range d.updates(s.cfg.Buckets) {
			s.notify(presence.Publication{Bucket: b, Updates: updates})
		}
		s.mu.Unlock()
	}

	for _, o := range taken {
		if err != nil {
			o.err = err
		}
		// After the publications, so that nobody is answered before watchers can know.
		close(o.done)
	}
}

// Change implements unread.Store. Of two calls with one key, both return after the
// change is stored.
func (s *Store) Change(ctx context.Context, page string, c unread.Change) error {
	return s.apply(ctx, func(d *transaction) error {
		d.change(page, c)
		return nil
	})
}

// Save implements unread.Store.
func (s *Store) Save(ctx context.Context, user unread.User, old, r unread.Record) (presence.Version, error) {
	saved := make(chan presence.Version, 1) // the writer may go on when the caller has given up
	err := s.apply(ctx, func(d *transaction) error {
		version, err := d.save(user, old, r)
		saved <- version
		return err
	})
	if err != nil {
		return presence.Version{}, err
	}

	return <-saved, nil
}

// Levels implements unread.Store.
func (s *Store) Levels(_ context.Context, user unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	levels := make([]unread.Level, len(pages))
	owns := make([]unread.Own, len(pages))
	for i, page := range pages {
		if p := s.unread.pages[page]; p != nil {
			levels[i] = p.level
			owns[i] = p.owns[user]
		}
	}

	return levels, owns, nil
}

// Notes implements unread.Store.
func (s *Store) Notes(_ context.Context, pages []string) ([]unread.Note, error) {
	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	notes := make([]unread.Note, len(pages))
	for i, page := range pages {
		if p := s.unread.pages[page]; p != nil {
			notes[i] = p.note
		}
	}

	return notes, nil
}

// Authors implements unread.Store.
func (s *Store) Authors(
	_ context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	p := s.unread.pages[page]
	if p == nil {
		return unread.Level{}, nil, nil
	}

	owns := map[unread.User]unread.Own{}
	// Otherwise nobody has changed the page since, and there may be many to look for.
	if p.level.By > since {
		for _, u := range users {
			if own, ok := p.owns[u]; ok {
				owns[u] = own
			}
		}
	}

	return p.level, owns, nil
}

// Records implements unread.Store.
func (s *Store) Records(_ context.Context, users []unread.User) ([]unread.Record, error) {
	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	records := make([]unread.Record, len(users))
	for i, u := range users {
		if r := s.unread.records[u]; r != nil {
			records[i] = *r
		}
	}

	return records, nil
}
