package rowstier

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
	"headcount/internal/rows/rowstest"
	"headcount/internal/testkit"
)

var histories = flag.Int("histories", 300, "random histories of faults")

func TestMain(m *testing.M) { testkit.Main(m) }

func TestContract(t *testing.T) {
	rowstest.RunInBubble(t, func(t *testing.T) rows.Store {
		s := New(newFast(), newDurable(), Config{})
		t.Cleanup(func() {
			if err := s.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})

		return s
	})
}

// fastStore is a store that can lose its newest commits, or everything.
type fastStore struct {
	*rowsmem.Store
	away     atomic.Bool   // set while drains and claims run
	distance time.Duration // time of a scan, there and back

	mu  sync.Mutex // guards log
	log []event    // all that the store has, in order
}

// event is a commit or a claim.
type event struct {
	rows.Commit
	owner string // of a claim
	at    time.Time
}

func newFast() *fastStore { return &fastStore{Store: rowsmem.New(rowsmem.Config{})} }

func (f *fastStore) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	if f.away.Load() {
		return nil, rows.ErrUnavailable
	}

	// The lock covers the claim and its place in the log: what lose makes again has to be in the order of the store.
	f.mu.Lock()
	defer f.mu.Unlock()

	claims, err := f.Store.Claim(ctx, owner, partitions)
	for i, claim := range claims {
		if claim.Epoch != 0 {
			of := rows.Commit{Partition: partitions[i].Partition}
			f.log = append(f.log, event{owner: owner, at: time.Now(), Commit: of})
		}
	}

	return claims, err
}

func (f *fastStore) Commit(ctx context.Context, commits []rows.Commit) []error {
	if f.away.Load() {
		return slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	}

	f.mu.Lock()
	defer f.mu.Unlock()

	errs := f.Store.Commit(ctx, commits)
	for i := range commits {
		if errs[i] == nil {
			f.log = append(f.log, event{Commit: commits[i]})
		}
	}

	return errs
}

func (f *fastStore) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	if f.away.Load() {
		return slices.Repeat([]rows.Found{{Err: rows.ErrUnavailable}}, len(addresses))
	}

	return f.Store.Read(ctx, addresses)
}

func (f *fastStore) Scan(ctx context.Context, partition int, of, after string, each func(string, []byte) error) error {
	time.Sleep(f.distance)

	return f.Store.Scan(ctx, partition, of, after, each)
}

// Contents implements Lister. It lists everything that was ever written.
func (f *fastStore) Contents(
	_ context.Context, each func(partition int, collections []string, ids []rows.ID) error,
) error {
	f.mu.Lock()
	log := slices.Clone(f.log)
	f.mu.Unlock()

	for _, e := range log {
		var collections []string
		for _, row := range e.Rows {
			collections = append(collections, row.Collection)
		}
		if err := each(e.Partition, collections, e.IDs); err != nil {
			return err
		}
	}

	return nil
}

// lose forgets the last n events.
func (f *fastStore) lose(n int) {
	f.log = f.log[:max(len(f.log)-n, 0)]

	// The other events are made again at their times, so that claims get the same epochs.
	var now time.Time
	f.Store = rowsmem.New(rowsmem.Config{Now: func() time.Time {
		if now.IsZero() {
			return time.Now()
		}

		return now
	}})

	for _, e := range f.log {
		if e.owner == "" {
			f.Store.Commit(context.Background(), []rows.Commit{e.Commit})
			continue
		}

		now = e.at
		_, _ = f.Store.Claim(context.Background(), e.owner, []rows.Former{{Partition: e.Partition}})
	}
	now = time.Time{}
}

// durableStore is a durable store that can be away.
type durableStore struct {
	*rowsmem.Store
	away     atomic.Bool   // set while drains and claims run
	distance time.Duration // time of a call, there and back
	examines time.Duration // time that Changed takes for a row
	claiming func()        // called before the next claim

	mu      sync.Mutex              // guards the fields below: two tiers may share a durable store
	numbers map[rows.Address]uint64 // number of the last commit that changed a row
	ids     map[[16]byte]time.Time
}

func newDurable() *durableStore {
	return &durableStore{
		Store: rowsmem.New(rowsmem.Config{}), numbers: map[rows.Address]uint64{}, ids: map[[16]byte]time.Time{},
	}
}

// isAway waits for the time of a call, and reports whether the store cannot answer. It cannot if ctx ends before that.
func (d *durableStore) isAway(ctx context.Context) bool {
	time.Sleep(d.distance)

	return d.away.Load() || ctx.Err() != nil
}

func (d *durableStore) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	if before := d.claiming; before != nil {
		d.claiming = nil
		before()
	}
	if d.isAway(ctx) {
		return nil, rows.ErrUnavailable
	}

	return d.Store.Claim(ctx, owner, partitions)
}

func (d *durableStore) Commit(ctx context.Context, commits []rows.Commit) []error {
	if d.isAway(ctx) {
		return slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	errs := d.Store.Commit(ctx, commits)
	for i, c := range commits {
		if errs[i] != nil {
			continue
		}

		for _, row := range c.Rows {
			d.numbers[rows.Address{Partition: c.Partition, Name: row.Name}] = c.Number
		}
		for _, id := range c.IDs {
			d.ids[id.Bytes] = id.Until
		}
	}

	return errs
}

func (d *durableStore) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	if d.isAway(ctx) {
		return slices.Repeat([]rows.Found{{Err: rows.ErrUnavailable}}, len(addresses))
	}

	return d.Store.Read(ctx, addresses)
}

func (d *durableStore) Scan(
	ctx context.Context, partition int, of, after string, each func(string, []byte) error,
) error {
	if d.isAway(ctx) {
		return rows.ErrUnavailable
	}

	return d.Store.Scan(ctx, partition, of, after, each)
}

// Changed examines one row at a time. A place has the number of rows before it.
func (d *durableStore) Changed(
	ctx context.Context, partition int, after uint64, from rows.Place,
) (some []rows.Row, next rows.Place, err error) {
	time.Sleep(d.examines)
	if d.isAway(ctx) {
		return nil, from, rows.ErrUnavailable
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	var all []rows.Name
	for at := range d.numbers {
		if at.Partition == partition {
			all = append(all, at.Name)
		}
	}
	slices.SortFunc(all, func(a, b rows.Name) int {
		return cmp.Or(cmp.Compare(a.Collection, b.Collection), cmp.Compare(a.Field, b.Field))
	})

	if from.Table >= len(all) {
		return nil, rows.Place{End: true}, nil
	}
	next = rows.Place{Table: from.Table + 1}
	at := rows.Address{Partition: partition, Name: all[from.Table]}
	if d.numbers[at] > after {
		some = []rows.Row{{Name: at.Name, Value: d.Store.Read(ctx, []rows.Address{at})[0].Value}}
	}

	return some, next, nil
}

func (d *durableStore) Remembered(ctx context.Context, _ int, ids []rows.ID) ([]rows.ID, error) {
	if d.isAway(ctx) {
		return nil, rows.ErrUnavailable
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	var known []rows.ID
	for _, id := range ids {
		if until, is := d.ids[id.Bytes]; is {
			known = append(known, rows.ID{Bytes: id.Bytes, Until: until})
		}
	}

	return known, nil
}

// writer is an owner of one partition. It remembers all that it has written, and heals the store.
type writer struct {
	store         *Store
	name          string
	epoch, number uint64
	rows          map[rows.Name]written
	ids           map[[16]byte]uint64 // ID -> number of its commit
}

type written struct {
	value  []byte
	number uint64
}

const part = 7 // the partition of all tests

func (w *writer) claim() error {
	claims, err := w.store.Claim(context.Background(), w.name, []rows.Former{{Partition: part, Epoch: w.epoch}})
	if err != nil {
		return err
	}
	if claims[0].Epoch == 0 {
		return errors.New("another process has claimed the partition")
	}

	if w.epoch != 0 && claims[0].Number < w.number {
		w.epoch = claims[0].Epoch
		return w.heal(claims[0])
	}
	w.epoch = claims[0].Epoch
	w.number = claims[0].Number

	return nil
}

// heal writes again what the store may lack.
func (w *writer) heal(claim rows.Claim) error {
	c := rows.Commit{
		Partition: part, Epoch: claim.Epoch, After: claim.Number, Number: max(w.number, claim.Number) + 1,
		At: time.Now(),
	}

	for name, is := range w.rows {
		if is.number > claim.Number {
			c.Rows = append(c.Rows, rows.Row{Name: name, Value: is.value})
		}
	}

	for id, number := range w.ids {
		if number > claim.Number {
			c.IDs = append(c.IDs, rows.ID{Bytes: id, Until: c.At.Add(time.Hour)})
		}
	}

	err := w.store.Commit(context.Background(), []rows.Commit{c})[0]
	if err == nil {
		w.number = c.Number
	}

	return err
}

// commit makes a commit, and heals the store as often as necessary.
func (w *writer) commit(changed []rows.Row, ids []rows.ID) error {
	for {
		c := rows.Commit{
			Partition: part, Epoch: w.epoch, After: w.number, Number: w.number + 1, At: time.Now(),
			Rows: changed, IDs: ids,
		}

		err := w.store.Commit(context.Background(), []rows.Commit{c})[0]

		var fenced *rows.Fenced
		var lost *rows.Lost
		switch {
		case err == nil:
			w.number = c.Number
			for _, row := range changed {
				w.rows[row.Name] = written{row.Value, c.Number}
			}

			for _, id := range ids {
				w.ids[id.Bytes] = c.Number
			}

			return nil

		case errors.As(err, &fenced), errors.As(err, &lost):
			if err := w.claim(); err != nil {
				return err
			}

		default:
			return err
		}
	}
}

// world is the state of a history: the acknowledged changes, and the stores.
type world struct {
	*testing.T
	random  *rand.Rand
	fast    *fastStore
	durable *durableStore
	writer  *writer
	reader  *Store // of another process
	model   map[rows.Name][]byte
	used    [][16]byte
	n       int
}

func (w *world) open() *Store {
	return New(w.fast, w.durable, Config{DrainEvery: 1000 * time.Hour, Lists: 2})
}

func (w *world) close(s *Store) {
	s.stop()
	s.wg.Wait()
}

// TestHistories: whatever is lost, evicted or away, reads return what was acknowledged, and in the end the durable
// store has all of it.
func TestHistories(t *testing.T) {
	for seed := range uint64(*histories) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { history(t, seed) })
		})
	}
}

func history(t *testing.T, seed uint64) {
	w := &world{
		T:       t,
		random:  rand.New(rand.NewPCG(seed, 0)),
		fast:    newFast(),
		durable: newDurable(),
		model:   map[rows.Name][]byte{},
	}
	w.reader = w.open()
	w.begin()

	for range 150 {
		w.step()
		time.Sleep(time.Duration(w.random.IntN(2000)) * time.Millisecond)
	}

	// The durable store is back, so nothing excuses a missing row from here on.
	w.durable.away.Store(false)
	w.check()
	for left := 1; left > 0; {
		var err error
		left, err = w.writer.store.drain(t.Context())
		if err != nil {
			t.Logf("drain: %v", err)
		}
	}
	w.checkDurable()

	w.close(w.reader)
	w.close(w.writer.store)
}

// begin starts a process that takes over the partition.
func (w *world) begin() {
	w.n++
	// A new process remembers nothing. The step that ends the former one makes it heal all losses before.
	w.writer = &writer{
		store: w.open(),
		name:  fmt.Sprint("process ", w.n),
		rows:  map[rows.Name]written{},
		ids:   map[[16]byte]uint64{},
	}
	if err := w.writer.claim(); err != nil {
		w.Fatalf("claim: %v", err)
	}
}

func (w *world) step() {
	switch w.random.IntN(16) {
	default:
		w.change()
	case 0, 1, 2:
		_, _ = w.writer.store.drain(context.Background())
	case 3:
		w.writer.store.Evict(part, w.names())
	case 4:
		w.durable.away.Store(!w.durable.away.Load())
	case 5:
		w.fast.lose(w.random.IntN(6))
	case 6:
		// Seldom: an empty fast store is treated like a new one, so what smaller losses break would not show.
		if w.random.IntN(3) == 0 {
			w.fast.lose(len(w.fast.log))
		}
	case 7:
		w.check()
	case 8: // the process ends, after it has healed all losses of the fast store
		w.durable.away.Store(false)
		w.heal()
		w.close(w.writer.store)
		w.begin()
	}
}

func (w *world) names() []rows.Name {
	var names []rows.Name
	for range 1 + w.random.IntN(4) {
		name := rows.Name{Collection: fmt.Sprint("c", w.random.IntN(3)), Field: fmt.Sprint("f", w.random.IntN(8))}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}

	return names
}

func (w *world) change() {
	var changed []rows.Row
	for _, name := range w.names() {
		value := fmt.Appendf(nil, "%d", w.random.IntN(1000))
		if w.random.IntN(4) == 0 {
			value = nil
		}
		changed = append(changed, rows.Row{Name: name, Value: value})
	}

	var ids []rows.ID
	if w.random.IntN(3) == 0 {
		id := rows.ID{Until: time.Now().Add(time.Hour)}
		for i := range id.Bytes {
			id.Bytes[i] = byte(w.random.IntN(256))
		}
		ids = append(ids, id)
	}

	if err := w.writer.commit(changed, ids); err != nil {
		if !w.durable.away.Load() {
			w.Fatalf("commit: %v", err)
		}
		return // no commit was made: the fast store had lost too much
	}

	for _, row := range changed {
		w.model[row.Name] = row.Value
	}
	for _, id := range ids {
		w.used = append(w.used, id.Bytes)
	}
}

// heal makes the owner notice what the fast store has lost.
func (w *world) heal() bool {
	// The store refuses even an empty commit if it has lost those before it, and then the owner claims again.
	err := w.writer.commit(nil, nil)
	if err != nil && !w.durable.away.Load() {
		w.Fatalf("heal: %v", err)
	}

	return err == nil
}

// check compares what another process reads with what was acknowledged.
func (w *world) check() {
	w.Helper()
	// Until the owner has noticed a loss, another process may read the older values that the fast store has.
	if !w.heal() {
		return
	}

	for c := range 3 {
		of := fmt.Sprint("c", c)
		found := map[string][]byte{}
		last := ""
		err := w.reader.Scan(context.Background(), part, of, "", func(field string, value []byte) error {
			if field <= last {
				w.Fatalf("a scan returns %q after %q", field, last)
			}
			last = field
			found[field] = value

			return nil
		})
		if err != nil && !w.durable.away.Load() {
			w.Fatalf("scan: %v", err)
		}

		for f := range 8 {
			name := rows.Name{Collection: of, Field: fmt.Sprint("f", f)}
			w.checkRow(name)
			if err == nil && !bytes.Equal(found[name.Field], w.model[name]) {
				w.Fatalf("a scan returns %q for %v, want %q", found[name.Field], name, w.model[name])
			}
		}
	}
	w.checkIDs()
}

// checkRow compares a row that another process reads. While the durable store is away it may be unavailable.
func (w *world) checkRow(name rows.Name) {
	w.Helper()
	is := w.reader.Read(context.Background(), []rows.Address{{Partition: part, Name: name}})[0]
	if is.Err == nil && !bytes.Equal(is.Value, w.model[name]) {
		w.Fatalf("%v is %q, want %q", name, is.Value, w.model[name])
	}
	if is.Err != nil && !w.durable.away.Load() {
		w.Fatalf("%v: %v", name, is.Err)
	}
}

// checkIDs repeats an ID that must still be remembered.
func (w *world) checkIDs() {
	if len(w.used) == 0 {
		return
	}

	id := rows.ID{Bytes: w.used[w.random.IntN(len(w.used))], Until: time.Now().Add(time.Hour)}
	err := w.writer.commit(nil, []rows.ID{id})
	var known *rows.Known
	if !errors.As(err, &known) && !w.durable.away.Load() {
		w.Fatalf("a repeated ID was accepted: %v", err)
	}
}

func (w *world) checkDurable() {
	is := map[rows.Name][]byte{}
	for at := range w.durable.numbers {
		if at.Collection == collection {
			continue
		}
		if value := w.durable.Store.Read(context.Background(), []rows.Address{at})[0].Value; value != nil {
			is[at.Name] = value
		}
	}

	maps.DeleteFunc(w.model, func(_ rows.Name, value []byte) bool { return value == nil })
	if !maps.EqualFunc(is, w.model, bytes.Equal) {
		w.Errorf("the durable store has\n%q\nwant\n%q", is, w.model)
	}
}

// TestOlderFastStore: an older fast store lists rows that were not drained when it was new. The durable store has newer
// values of them, which stay.
func TestOlderFastStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		durable := newDurable()
		first := newOwned(t, "first", fast, durable)
		first.must(t, first.next("1"))
		first.must(t, first.next("2"))
		first.close(t)

		// The fast store loses the second commit, which was drained already.
		fast.lose(1)
		second := newOwned(t, "second", fast, durable)
		at := rows.Address{Partition: 7, Name: first.name}
		if got := second.Read(t.Context(), []rows.Address{at})[0]; string(got.Value) != "2" {
			t.Errorf("the tier reads %q, %v; want \"2\"", got.Value, got.Err)
		}

		// Close drains whatever the second process takes for undrained. If that were the first commit, which is still
		// listed, the durable store would have "1" again.
		second.close(t)
		if got := durable.Read(t.Context(), []rows.Address{at})[0]; string(got.Value) != "2" {
			t.Errorf("the durable store has %q, %v; want \"2\"", got.Value, got.Err)
		}
	})
}

// TestALongComparison: the fast store has lost what was drained, and the durable store needs longer to find that than a
// claim may take. The claims that follow go on with what was found, and one of them gets the partition.
func TestALongComparison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		durable := newDurable()
		first := newOwned(t, "first", fast, durable)
		c := first.next("1")
		for i := range 20 {
			name := rows.Name{Collection: "many", Field: fmt.Sprintf("%02d", i)}
			c.Rows = append(c.Rows, rows.Row{Name: name, Value: []byte("1")})
		}
		first.must(t, c)
		first.must(t, first.next("2"))
		first.close(t)

		// A claim of 3 s examines two or three of more than twenty rows. One that began anew each time would never get
		// to the end.
		fast.lose(1)
		durable.examines = time.Second
		s := New(fast, durable, Config{})
		defer func() { _ = s.Close(t.Context()) }()
		claim := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			_, err := s.Claim(ctx, "second", []rows.Former{{Partition: part}})

			return err
		}

		claims := 1
		for err := claim(); err != nil; err = claim() {
			claims++
			if claims > 20 {
				t.Fatalf("%d claims have failed, the last one with: %v", claims, err)
			}
		}

		at := rows.Address{Partition: part, Name: first.name}
		if got := s.Read(t.Context(), []rows.Address{at})[0]; string(got.Value) != "2" {
			t.Errorf("the tier reads %q, %v; want \"2\"", got.Value, got.Err)
		}
	})
}

// TestDirtyRows: Dirty counts the rows that only the fast store has. A row that changes twice counts once.
func TestDirtyRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		s := New(newFast(), shared, Config{DrainEvery: time.Hour})
		claims, err := s.Claim(t.Context(), "owner", []rows.Former{{Partition: part}})
		if err != nil {
			t.Fatal(err)
		}

		o := owned{Store: s, name: rows.Name{Collection: "c", Field: "f"}, claim: claims[0]}
		shared.away.Store(true)
		o.must(t, o.next("1"))
		if left, err := s.drain(t.Context()); left == 0 || err == nil {
			t.Errorf("without the durable store %d rows are left, %v; want some, and an error", left, err)
		}

		o.must(t, o.next("2"))
		withID := o.next("3")
		withID.Rows[0].Field = "g"
		withID.IDs = []rows.ID{{Bytes: [16]byte{1}, Until: time.Now().Add(time.Hour)}}
		o.must(t, withID)

		// A drain is under way with f and the row that records the drain; f again, g and the ID wait for it.
		if is := s.Dirty(); is != 2+3 {
			t.Errorf("%d rows and IDs are dirty, want 5", is)
		}
		if is := s.Lag(); is != 3*time.Second {
			t.Errorf("the oldest dirty row has waited for %s, want 3s", is)
		}

		shared.away.Store(false)
		o.close(t)
		if s.Dirty() != 0 || s.Lag() != 0 {
			t.Errorf("in the end %d rows and IDs are dirty, for %s; want none", s.Dirty(), s.Lag())
		}
	})
}

// TestAScanWithoutTheFastStore: it fails at once, however long the caller would wait, because only the fast store knows
// which rows the durable store lacks.
func TestAScanWithoutTheFastStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		own := newOwned(t, "owner", fast, newDurable())
		own.must(t, own.next("1"))
		// The goroutines of the tier are at rest, so that away changes between two of their calls.
		synctest.Wait()
		fast.away.Store(true)

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()

		begun := time.Now()
		err := own.Scan(ctx, 7, own.name.Collection, "", func(string, []byte) error { return nil })
		if took := time.Since(begun); !errors.Is(err, rows.ErrUnavailable) || took > 0 {
			t.Errorf("without the fast store a scan returns %v after %s, want ErrUnavailable at once", err, took)
		}

		synctest.Wait()
		fast.away.Store(false)
		own.close(t)
	})
}

// TestTwoFastStores: a fast store that was used with another durable store is refused. An empty one takes the durable
// store over. Later writes of the former fast store are refused, and so not lost.
func TestTwoFastStores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		first := newFast()
		own := newOwned(t, "first", first, shared)
		own.must(t, own.next("1"))

		elsewhere := newFast()
		before := newOwned(t, "before", elsewhere, newDurable())
		before.must(t, before.next("1"))
		before.close(t)

		s := New(elsewhere, shared, Config{})
		_, err := s.Claim(t.Context(), "other", []rows.Former{{Partition: 7}})
		if !errors.Is(err, ErrOtherFast) || !errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("the claim with another fast store returns %v, want ErrOtherFast", err)
		}
		_ = s.Close(t.Context())

		// The refused claim must not have taken the durable store away from its owner, or this change would never be
		// drained.
		own.must(t, own.next("2"))
		empty := newOwned(t, "second", newFast(), shared)
		if got := empty.Read(t.Context(), []rows.Address{{Partition: 7, Name: own.name}})[0]; string(got.Value) != "2" {
			t.Errorf("the tier with an empty fast store reads %q, %v; want \"2\"", got.Value, got.Err)
		}

		own.must(t, own.next("3")) // before the former one notices
		// By then a drain of the former owner was refused, so further changes of it would never be drained.
		time.Sleep(time.Minute)
		if err := own.commit(t, own.next("4")); !errors.Is(err, rows.ErrFull) {
			t.Errorf("a commit with the former fast store returns %v, want ErrFull", err)
		}

		// Empty commits still succeed: by them an owner finds out that the fast store has another owner.
		nothing := own.next("")
		nothing.Rows = nil
		own.must(t, nothing)
		if _, err := own.Claim(t.Context(), "first", []rows.Former{{Partition: 7}}); !errors.Is(err, ErrOtherFast) {
			t.Errorf("a claim with the former fast store returns %v, want ErrOtherFast", err)
		}

		own.close(t)
		empty.close(t)
	})
}

// TestBothHaveRows: a fast and a durable store that both have rows, and were never used together, are refused.
func TestBothHaveRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		between := newFast()
		for _, alone := range []rows.Store{shared, between} {
			claims, err := alone.Claim(t.Context(), "alone", []rows.Former{{Partition: part}})
			if err != nil {
				t.Fatal(err)
			}

			o := owned{claim: claims[0]}
			if err := alone.Commit(t.Context(), []rows.Commit{o.next("1")})[0]; err != nil {
				t.Fatal(err)
			}
		}

		s := New(between, shared, Config{})
		_, err := s.Claim(t.Context(), "owner", []rows.Former{{Partition: part}})
		if !errors.Is(err, ErrBoth) || !errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("the claim returns %v, want ErrBoth", err)
		}

		_ = s.Close(t.Context())
	})
}

// TestTwoProcessesBegin: a process claims a new partition. Before it reaches the durable store, another process claims
// the partition too, and goes on. Afterwards any process can claim it.
func TestTwoProcessesBegin(t *testing.T) {
	for name, isDrained := range map[string]bool{
		"before anything is drained": false, "after something is drained": true,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := newDurable()
				between := newFast()
				var second *owned
				// The first process has its claim in the fast store and is about to claim the durable one: its claim
				// there is the later of the two, though it is no longer the owner.
				shared.claiming = func() {
					second = newOwned(t, "second", between, shared)
					if err := second.commit(t, second.next("1")); err != nil {
						t.Error(err)
					}
					if !isDrained {
						return
					}
					if left, err := second.drain(t.Context()); left > 0 {
						t.Errorf("%d rows are left, want none: %v", left, err)
					}
				}

				first := New(between, shared, Config{})
				claims, err := first.Claim(t.Context(), "first", []rows.Former{{Partition: 7}})
				if err == nil {
					late := owned{Store: first, claim: claims[0]}
					err = late.commit(t, late.next("2"))
				}
				if !errors.As(err, new(*rows.Fenced)) {
					t.Errorf("a commit of the first process returns %v, want it fenced", err)
				}

				_ = first.Close(t.Context())
				second.close(t)

				// Both processes may have made a token. If they differed, every later process would be refused as one
				// with another fast store.
				third := newOwned(t, "third", between, shared)
				third.must(t, third.next("3"))
				third.close(t)

				// With an empty fast store only the durable one can have the row, so the drains of the third process
				// have arrived.
				fourth := newOwned(t, "fourth", newFast(), shared)
				got := fourth.Read(t.Context(), []rows.Address{{Partition: 7, Name: fourth.name}})[0]
				if string(got.Value) != "3" {
					t.Errorf("the tier with an empty fast store reads %q, %v; want \"3\"", got.Value, got.Err)
				}

				fourth.close(t)
			})
		})
	}
}

// TestASlowProcessTakesTheDurableStore: a slow process claims a partition in the fast store before its owner, and in
// the durable store after it. The owner claims again and goes on, and nothing is lost.
func TestASlowProcessTakesTheDurableStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		between := newFast()
		var o *owned
		shared.claiming = func() {
			o = newOwned(t, "owner", between, shared)
			if err := o.commit(t, o.next("1")); err != nil {
				t.Error(err)
			}
		}

		slow := newOwned(t, "slow", between, shared)
		time.Sleep(5 * time.Second) // until a drain of the owner notices it

		// Lost makes an owner claim again. An error that it would wait out, or an acknowledgement, would leave its
		// changes in the fast store alone.
		if err := o.commit(t, o.next("2")); !errors.As(err, new(*rows.Lost)) {
			t.Fatalf("a commit of the owner returns %v, want Lost", err)
		}

		claims, err := o.Claim(t.Context(), "owner", []rows.Former{{Partition: 7, Epoch: o.claim.Epoch}})
		if err != nil || claims[0].Epoch == 0 || claims[0].Number != o.claim.Number {
			t.Fatalf("the new claim of the owner is %v, %v; want the number of its last commit", claims, err)
		}

		o.claim = claims[0]
		o.must(t, o.next("2"))
		slow.close(t)
		o.close(t)

		got := shared.Read(t.Context(), []rows.Address{{Partition: 7, Name: o.name}})[0]
		if string(got.Value) != "2" {
			t.Errorf("the durable store has %q, %v; want \"2\"", got.Value, got.Err)
		}
	})
}

// TestTheStateChangesDuringACommit: the fast store gets the changed state with the next commit, also if it may have an
// earlier form of that commit.
func TestTheStateChangesDuringACommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOwned(t, "owner", newFast(), newDurable())
		p := &o.partitions[7]
		p.state.adopts = true

		c := o.next("1")
		under := p.prepare(&c)
		p.adopted(o.claim.Epoch)
		p.acknowledge(&c, &under)
		if !p.stateChanged {
			t.Error("a state that changed during a commit counts as written to the fast store")
		}

		// The same number prepared twice is a repetition. The fast store may have made its first form, whose state may
		// be another.
		c = o.next("2")
		c.Number++
		_ = p.prepare(&c)
		again := p.prepare(&c)
		p.acknowledge(&c, &again)
		if !p.stateChanged {
			t.Error("a repeated commit counts as written with the state, though the store may have its earlier form")
		}

		// These commits were never made, and Close would try to drain them.
		p.dirty.rows = nil
		o.close(t)
	})
}

// TestARowEvictedDuringACommit: a row whose eviction is decided during a commit is evicted by the next one.
func TestARowEvictedDuringACommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOwned(t, "owner", newFast(), newDurable())
		p := &o.partitions[7]
		first := []rows.Name{{Collection: "c", Field: "first"}}
		second := []rows.Name{{Collection: "c", Field: "second"}}

		o.Evict(7, first)
		c := o.next("1")
		under := p.prepare(&c)
		o.Evict(7, second)
		p.acknowledge(&c, &under)
		// A row that is taken off the list and was in no commit would stay in the fast store.
		if !slices.Equal(p.removals.evicted, second) {
			t.Errorf("%v are left to evict, want %v", p.removals.evicted, second)
		}

		p.dirty.rows = nil
		o.close(t)
	})
}

// scanned is a fast store in which something happens directly after a scan.
type scanned struct {
	*fastStore
	after func()
}

func (s *scanned) Scan(ctx context.Context, id int, of, after string, each func(string, []byte) error) error {
	err := s.fastStore.Scan(ctx, id, of, after, each)
	s.after()

	return err
}

// TestACommitDuringAdoption: a row that changes while its collection is adopted reaches the durable store with its new
// value.
func TestACommitDuringAdoption(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between := &scanned{fastStore: newFast(), after: func() {}}
		shared := newDurable()
		o := newOwned(t, "owner", between, shared)
		o.must(t, o.next("older"))

		between.after = func() {
			if err := o.commit(t, o.next("newer")); err != nil {
				t.Error(err)
			}
		}

		if err := o.adoptCollection(t.Context(), 7, o.claim.Epoch, o.name.Collection); err != nil {
			t.Fatal(err)
		}

		// The drain that follows has both values in its reach: the one that was scanned, and the one that is newer.
		time.Sleep(time.Second)

		at := []rows.Address{{Partition: 7, Name: o.name}}
		if is := shared.Store.Read(t.Context(), at)[0]; string(is.Value) != "newer" {
			t.Errorf("the durable store has %q, want \"newer\"", is.Value)
		}

		o.close(t)
	})
}

// TestAdoptionIsKilled: an adoption is killed at any moment, again and again. A process that lives long enough brings
// all that only the fast store had to the durable store.
func TestAdoptionIsKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between := newFast()
		want, ids := fillAlone(t, between)
		shared := newDurable()
		shared.distance = 30 * time.Millisecond
		between.distance = 30 * time.Millisecond
		adopted := false
		kills := 0
		for ; !adopted && kills < 100; kills++ {
			s := New(between, shared, Config{DrainEvery: 200 * time.Millisecond})
			claims, err := s.Claim(t.Context(), fmt.Sprint("process ", kills), everyPartition())
			if err != nil {
				t.Fatal(err)
			}

			// Each process has a little more time than the one before.
			for turn := range kills {
				time.Sleep(50 * time.Millisecond)
				if turn%4 == 0 {
					verify(t, s, claims)
				}
			}

			adopted, err = s.Adopted(t.Context(), 0, 1, 2)
			if err != nil {
				t.Error(err)
			}

			// Close would drain, and a process that is killed does not.
			s.stop()
			s.wg.Wait()
		}

		if kills < 5 {
			t.Errorf("the adoption took only %d processes, want at least 5, so that some were killed in the middle",
				kills)
		}

		for at, value := range want {
			if is := shared.Store.Read(t.Context(), []rows.Address{at})[0]; string(is.Value) != value {
				t.Errorf("the durable store has %q of %v, want %q", is.Value, at, value)
			}
		}

		// An ID that the durable store lacks would let a repeated call count twice once the fast store has lost it.
		for _, id := range ids {
			if _, is := shared.ids[id.Bytes]; !is {
				t.Errorf("the durable store does not remember %v", id.Bytes)
			}
		}
	})
}

// fillAlone writes rows and IDs to three partitions of a fast store without a durable store, and returns them.
func fillAlone(t *testing.T, between *fastStore) (want map[rows.Address]string, ids []rows.ID) {
	t.Helper()
	const partitions, collections, fields = 3, 2, 4
	want = map[rows.Address]string{}
	for partition := range partitions {
		claims, err := between.Claim(t.Context(), "alone", []rows.Former{{Partition: partition}})
		if err != nil {
			t.Fatal(err)
		}

		c := rows.Commit{Partition: partition, Epoch: claims[0].Epoch, Number: 1, At: time.Now()}
		c.IDs = []rows.ID{{Bytes: [16]byte{byte(partition)}, Until: time.Now().Add(24 * time.Hour)}}
		for i := range collections * fields {
			name := rows.Name{Collection: fmt.Sprint("c", i%collections), Field: fmt.Sprint("f", i)}
			value := fmt.Sprint(partition, " ", i)
			want[rows.Address{Partition: partition, Name: name}] = value
			c.Rows = append(c.Rows, rows.Row{Name: name, Value: []byte(value)})
		}

		if err := between.Commit(t.Context(), []rows.Commit{c})[0]; err != nil {
			t.Fatal(err)
		}

		ids = append(ids, c.IDs...)
	}

	return want, ids
}

// verify makes an empty commit in each partition, as an owner does now and then to make sure that it still owns them.
func verify(t *testing.T, s *Store, claims []rows.Claim) {
	t.Helper()
	for id := range claims {
		o := owned{Store: s, claim: claims[id]}
		c := o.next("")
		c.Partition = id
		c.Rows = nil
		if err := o.commit(t, c); err != nil {
			t.Errorf("partition %d: %v, %v", id, err, claims[id].Err)
		}
		claims[id] = o.claim
	}
}

// everyPartition returns all partitions, to claim them.
func everyPartition() []rows.Former {
	all := make([]rows.Former, rows.Partitions)
	for id := range all {
		all[id].Partition = id
	}

	return all
}

// TestClaimsTogether: a process has claimed all partitions soon, however far away the durable store is, even after the
// fast store has lost all of them.
func TestClaimsTogether(t *testing.T) {
	const distance = 30 * time.Millisecond
	for name, tc := range map[string]struct {
		loses bool
		limit time.Duration
	}{
		"new partitions":       {false, 6 * distance},
		"partitions that lost": {true, 20 * distance},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := newDurable()
				between := newFast()
				if tc.loses {
					fillAndLose(t, between, shared)
				}

				shared.distance = distance
				s := New(between, shared, Config{DrainEvery: time.Hour})
				defer func() { _ = s.Close(t.Context()) }()
				begun := time.Now()
				claims, err := s.Claim(t.Context(), "owner", everyPartition())
				if err != nil {
					t.Fatal(err)
				}

				for id, claim := range claims {
					if claim.Err != nil || claim.Epoch == 0 {
						t.Errorf("the claim of partition %d is %+v, want an epoch", id, claim)
					}
				}

				// One call for each partition would need as many round trips as there are partitions, and counters
				// cannot change meanwhile.
				if took := time.Since(begun); took > tc.limit {
					t.Errorf("the claims took %s, or %d round trips to the durable store, which is too long",
						took, took/distance)
				}
			})
		})
	}
}

// fillAndLose writes a row to each partition of the durable store, and none to the fast store.
func fillAndLose(t *testing.T, between *fastStore, shared *durableStore) {
	t.Helper()
	s := New(between, shared, Config{})
	claims, err := s.Claim(t.Context(), "first", everyPartition())
	if err != nil {
		t.Fatal(err)
	}

	for id, claim := range claims {
		o := owned{Store: s, claim: claim}
		c := o.next("1")
		c.Partition = id
		if err := o.commit(t, c); err != nil {
			t.Fatal(err)
		}
	}

	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	between.lose(rows.Partitions)
}

// TestSomeClaimsFail: a partition that cannot be claimed does not keep the others from being claimed.
func TestSomeClaimsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		former := newOwned(t, "former", newFast(), shared)
		former.must(t, former.next("1"))
		former.close(t)

		elsewhere := newFast()
		before := newOwned(t, "before", elsewhere, newDurable())
		before.must(t, before.next("1"))
		before.close(t)

		// Partition 7 has a token in both stores, and they differ. The other partitions are new in both.
		s := New(elsewhere, shared, Config{})
		defer func() { _ = s.Close(t.Context()) }()
		claims, err := s.Claim(t.Context(), "owner", everyPartition())
		if err != nil {
			t.Fatal(err)
		}

		for id, claim := range claims {
			isOurs := claim.Err == nil && claim.Epoch != 0
			isRefused := errors.Is(claim.Err, ErrOtherFast) && claim.Epoch == 0
			if id == 7 && !isRefused || id != 7 && !isOurs {
				t.Errorf("the claim of partition %d is %+v, want only that of 7 refused", id, claim)
			}
		}
	})
}

// TestClaimsWithoutTheDurableStore: the durable store goes away during a claim. A partition can be claimed if the fast
// store records how far it was drained; a new partition cannot.
func TestClaimsWithoutTheDurableStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newDurable()
		between := newFast()
		known := newOwned(t, "known", between, shared)
		known.must(t, known.next("1"))
		known.must(t, known.next("2")) // this writes the state to the fast store
		known.close(t)

		// At this moment the claims of the fast store are made, and the first read of the durable store has succeeded.
		shared.claiming = func() { shared.away.Store(true) }
		s := New(between, shared, Config{})
		claims, err := s.Claim(t.Context(), "owner", everyPartition())
		if err != nil {
			t.Fatal(err)
		}

		for id, claim := range claims {
			isOurs := claim.Err == nil && claim.Epoch != 0
			isAway := errors.Is(claim.Err, rows.ErrUnavailable) && claim.Epoch == 0
			if id == 7 && !isOurs || id != 7 && !isAway {
				t.Errorf("the claim of partition %d is %+v, want only that of 7 granted", id, claim)
			}
		}

		s.stop()
		s.wg.Wait()
	})
}

// owned is a Store whose partition 7 is claimed.
type owned struct {
	*Store
	name  rows.Name
	claim rows.Claim
}

func newOwned(t *testing.T, name string, fast rows.Store, durable Durable) *owned {
	t.Helper()
	s := New(fast, durable, Config{})
	claims, err := s.Claim(t.Context(), name, []rows.Former{{Partition: 7}})
	if err != nil {
		t.Fatal(err)
	}

	return &owned{Store: s, name: rows.Name{Collection: "c", Field: "f"}, claim: claims[0]}
}

func (o *owned) next(value string) rows.Commit {
	return rows.Commit{
		Partition: 7, Epoch: o.claim.Epoch, After: o.claim.Number, Number: o.claim.Number + 1, At: time.Now(),
		Rows: []rows.Row{{Name: o.name, Value: []byte(value)}},
	}
}

func (o *owned) commit(t *testing.T, c rows.Commit) error {
	err := o.Commit(t.Context(), []rows.Commit{c})[0]
	if err == nil {
		o.claim.Number = c.Number
	}

	return err
}

// must makes a commit, and waits until it is drained.
func (o *owned) must(t *testing.T, c rows.Commit) {
	t.Helper()
	if err := o.commit(t, c); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
}

// wants checks the owner's row in a store.
func (o *owned) wants(t *testing.T, store rows.Store, value string) {
	t.Helper()
	got := store.Read(t.Context(), []rows.Address{{Partition: 7, Name: o.name}})[0]
	if string(got.Value) != value {
		t.Errorf("the store has %q, %v, want %q", got.Value, got.Err, value)
	}
}

func (o *owned) close(t *testing.T) { _ = o.Close(t.Context()) }

// laborious is a durable store that takes time for each row, as PostgreSQL does.
type laborious struct{ *durableStore }

// Commit implements rows.Store.
func (l laborious) Commit(ctx context.Context, commits []rows.Commit) []error {
	n := 0
	for i := range commits {
		n += len(commits[i].Rows)
	}

	select {
	case <-time.After(time.Duration(n) * 100 * time.Microsecond):
	case <-ctx.Done():
	}

	return l.durableStore.Commit(ctx, commits)
}

// TestALongOutage: while the durable store was away, rows of many partitions have changed, and very many of one. When
// it is back they are drained, although one transaction with all of them would take too long.
func TestALongOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		durable := newDurable()
		s := New(newFast(), laborious{durable}, Config{})
		var all []rows.Former
		for id := range 20 {
			all = append(all, rows.Former{Partition: id})
		}
		claims, err := s.Claim(t.Context(), "owner", all)
		if err != nil {
			t.Fatal(err)
		}

		durable.away.Store(true)
		for id, claim := range claims {
			// Together the small partitions fill several transactions, and the large one alone takes longer than the
			// timeout of a call.
			n := 5_000
			if id == part {
				n = 110_000
			}
			c := rows.Commit{
				Partition: id, Epoch: claim.Epoch, After: claim.Number, Number: claim.Number + 1, At: time.Now(),
			}
			for field := range n {
				name := rows.Name{Collection: "c", Field: fmt.Sprint(field)}
				c.Rows = append(c.Rows, rows.Row{Name: name, Value: []byte{1}})
			}
			if err := s.Commit(t.Context(), []rows.Commit{c})[0]; err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		durable.away.Store(false)

		time.Sleep(5 * time.Minute)
		if is := s.Dirty(); is != 0 {
			t.Errorf("five minutes after the outage %d rows are not drained, want none", is)
		}
		// If rows are left, the test has failed above, and Close need not go on trying.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_ = s.Close(ctx)
	})
}
