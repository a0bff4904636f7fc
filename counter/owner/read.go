package owner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
	"headcount/internal/rows"
	"headcount/presence"
)

// Reader reads counters from a store of rows. Any process may use it, since an owner acknowledges only what is
// committed. It implements counter.Reader. All methods may be called from any goroutine. Their errors are
// counter.ErrUnavailable or ErrMalformed unless their comment says more.
type Reader struct {
	store rows.Store
	place func(key string) int
}

var _ counter.Reader = (*Reader)(nil)

// NewReader returns a Reader of store. Place returns the partition of a key.
func NewReader(store rows.Store, place func(key string) int) *Reader {
	return &Reader{store: store, place: place}
}

// values returns the values of rows, in order.
func (r *Reader) values(ctx context.Context, addresses []rows.Address) ([][]byte, error) {
	values := make([][]byte, len(addresses))
	if len(addresses) == 0 {
		return values, nil
	}

	for i, found := range r.store.Read(ctx, addresses) {
		if found.Err != nil {
			return nil, unavailable("read", found.Err)
		}
		values[i] = found.Value
	}

	return values, nil
}

// unavailable returns the error of a step that the store of rows could not carry out.
func unavailable(what string, err error) error {
	if errors.Is(err, rows.ErrMalformed) {
		return fmt.Errorf("owner: %s: %w: %w", what, ErrMalformed, err)
	}

	return fmt.Errorf("owner: %s: %w: %w", what, counter.ErrUnavailable, err)
}

// found is the head of a counter, with the partition where it was found.
type found struct {
	head
	partition int
}

// address returns the address of another row of the counter.
func (f *found) address(name rows.Name) rows.Address {
	return rows.Address{Partition: f.partition, Name: name}
}

// heads returns the heads of counters, in order.
func (r *Reader) heads(ctx context.Context, keys []string) ([]found, error) {
	all := make([]found, len(keys))
	each := make([]*found, len(keys))
	for i, key := range keys {
		all[i].key = key
		all[i].partition = r.place(key)
		each[i] = &all[i]
	}
	if err := r.readHeads(ctx, each); err != nil {
		return nil, err
	}

	// If a rule's kind has changed, its older counters may be in the other partition.
	missing := each[:0]
	for _, h := range each {
		if other, ok := otherPlace(h.key, h.partition); ok && h.Kind == 0 {
			h.partition = other
			missing = append(missing, h)
		}
	}

	return all, r.readHeads(ctx, missing)
}

// readHeads reads heads from the partitions where they are expected.
func (r *Reader) readHeads(ctx context.Context, all []*found) error {
	addresses := make([]rows.Address, len(all))
	for i, h := range all {
		addresses[i] = h.address(headOf(h.key))
	}
	values, err := r.values(ctx, addresses)
	if err != nil {
		return err
	}

	for i, h := range all {
		if err := h.decode(values[i]); err != nil {
			return fmt.Errorf("owner: read %q: %w", h.key, err)
		}
	}

	return nil
}

func (r *Reader) head(ctx context.Context, key string) (found, error) {
	all, err := r.heads(ctx, []string{key})
	if err != nil {
		return found{}, err
	}

	return all[0], nil
}

// Read implements counter.Reader. It never returns lagging values.
func (r *Reader) Read(ctx context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	all, err := r.heads(ctx, keys)
	if err != nil {
		return nil, err
	}

	readings := make([]counter.Reading, len(keys))
	for i, key := range keys {
		readings[i].Counter = all[i].Counter(key)
	}
	if member == "" {
		return readings, nil
	}

	return readings, r.findMember(ctx, all, member, readings)
}

// findMember records which sets have a member.
func (r *Reader) findMember(ctx context.Context, all []found, member string, into []counter.Reading) error {
	hash := hashOf(member)
	var sets []int
	for i := range all {
		if all[i].Kind.KnowsMembers() {
			sets = append(sets, i)
		}
	}

	for len(sets) > 0 {
		var addresses []rows.Address
		for _, at := range sets {
			// One row has the answer, however large the set is.
			addresses = append(addresses, all[at].address(all[at].rowOf(hash[:])))
		}
		values, err := r.values(ctx, addresses)
		if err != nil {
			return err
		}

		var missing []int
		for i, at := range sets {
			into[at].Mine = findHash(values[i], hash[:]) >= 0
			if !into[at].Mine {
				missing = append(missing, at)
			}
		}
		sets, err = r.moved(ctx, all, missing, hash[:])
		if err != nil {
			return err
		}
	}

	return nil
}

// moved returns those of some sets that have another row for a hash by now: a set that grew after its head was read may
// have moved the hash there. Their heads are read again.
func (r *Reader) moved(ctx context.Context, all []found, sets []int, hash []byte) (moved []int, err error) {
	again := make([]found, len(sets))
	each := make([]*found, len(sets))
	for i, at := range sets {
		again[i] = found{head: head{key: all[at].key}, partition: all[at].partition}
		each[i] = &again[i]
	}
	if err := r.readHeads(ctx, each); err != nil {
		return nil, err
	}

	for i, at := range sets {
		is := &again[i]
		if is.Kind.KnowsMembers() && is.rowOf(hash) != all[at].rowOf(hash) {
			all[at] = *is
			moved = append(moved, at)
		}
	}

	return moved, nil
}

// Ledger implements counter.Reader.
func (r *Reader) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	h, err := r.head(ctx, key)
	if err != nil {
		return counter.Ledger{}, err
	}

	return r.ledger(ctx, &h, after, limit)
}

// ledger returns at most limit entries of a counter with a Seq greater than after.
func (r *Reader) ledger(ctx context.Context, h *found, after uint64, limit int) (counter.Ledger, error) {
	var page counter.Ledger
	// Each further read is twice as large, because the oldest rows may have expired and yield no entries.
	const atOnce = 16
	for first, n := after/ledgerRow, uint64(atOnce); first*ledgerRow < h.Entries; first, n = first+n, 2*n {
		entries, err := r.entries(ctx, h, first, n)
		if err != nil {
			return counter.Ledger{}, err
		}

		for _, e := range entries {
			switch {
			// The first row that was read may begin earlier.
			case e.Seq <= after:
			case len(page.Entries) == limit:
				page.More = true
				return page, nil
			default:
				page.Entries = append(page.Entries, e)
			}
		}
	}

	return page, nil
}

// entries returns the entries in n rows of a ledger.
func (r *Reader) entries(ctx context.Context, h *found, first, n uint64) ([]counter.Entry, error) {
	last := min(first+n-1, (h.Entries-1)/ledgerRow)
	addresses := make([]rows.Address, 0, last-first+1)
	for row := first; row <= last; row++ {
		addresses = append(addresses, h.address(ledgerName(&h.head, row*ledgerRow+1)))
	}
	values, err := r.values(ctx, addresses)
	if err != nil {
		return nil, err
	}

	var all []counter.Entry
	for i, value := range values {
		read := reader{rest: value}
		all = append(all, read.entries((first+uint64(i))*ledgerRow+1)...)
		if err := read.end("a ledger"); err != nil {
			return nil, fmt.Errorf("owner: ledger of %q: %w", h.key, err)
		}
	}

	return all, nil
}

// Dimension implements counter.Reader.
func (r *Reader) Dimension(ctx context.Context, key, dimension string) (counter.Counter, counter.Counted, error) {
	h, err := r.head(ctx, key)
	if err != nil {
		return counter.Counter{}, counter.Counted{}, err
	}

	counted := counter.Counted{Values: map[string]int64{}}
	each := func(field string, row []byte) error {
		read := reader{rest: row}
		value, ok := strings.CutPrefix(field, dimension+"\x00")
		switch {
		case ok:
			counted.Values[value] = read.int()
		case field == dimension:
			read.uint()
			counted.Other = read.int()
		default:
			// This is a row of another dimension: all dimensions of a counter share a collection.
			return nil
		}
		return read.end("a dimension")
	}
	if h.Version != (counter.Version{}) {
		err = r.store.Scan(ctx, h.partition, dimensionsOf(&h.head), "", each)
	}
	if err != nil {
		return counter.Counter{}, counter.Counted{}, unavailable("dimension", err)
	}

	return h.Counter(key), counted, nil
}

// all calls each with every counter of a site whose name begins with prefix.
func (r *Reader) all(ctx context.Context, prefix string, each func(h *found) error) error {
	for partition := range rows.Partitions {
		err := r.store.Scan(ctx, partition, heads, "", func(key string, row []byte) error {
			if !presence.HasPrefix(key, prefix) {
				return nil
			}
			h := found{head: head{key: key}, partition: partition}
			if err := h.decode(row); err != nil {
				return fmt.Errorf("%q: %w", key, err)
			}
			return each(&h)
		})
		if err != nil {
			return unavailable("scan", err)
		}
	}

	return nil
}

// Aggregate implements counter.Reader.
func (r *Reader) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	var total counter.Total
	if err := r.AddTo(ctx, &total, prefix); err != nil {
		return counter.Aggregate{}, err
	}

	return total.Aggregate(prefix)
}

// AddTo adds all counters of a site whose name begins with prefix to total.
func (r *Reader) AddTo(ctx context.Context, total *counter.Total, prefix string) error {
	var uniques []found
	err := r.all(ctx, prefix, func(h *found) error {
		total.Add(h.State)
		if h.Kind.Estimates() {
			uniques = append(uniques, *h)
		}
		return nil
	})
	if err != nil {
		return err
	}

	// One at a time: with 12 KB each, all at once would take too much memory.
	for i := range uniques {
		registers, err := r.registers(ctx, &uniques[i])
		if err != nil {
			return err
		}
		total.Merge(registers)
	}

	return nil
}

// registers returns the registers of a unique.
func (r *Reader) registers(ctx context.Context, h *found) (hyperloglog.Registers, error) {
	// Most uniques are small. Without ranks all registers are in the first row, and the others are not asked for.
	n := 1
	if h.ranks != nil {
		n = registerRows
	}
	values, err := r.firstRegisters(ctx, h, n)
	// The first row may have been split after the head was read.
	if err == nil && n == 1 && isOneOfMany(values[0]) {
		values, err = r.firstRegisters(ctx, h, registerRows)
	}
	if err != nil {
		return hyperloglog.Registers{}, err
	}

	var all hyperloglog.Union
	for row, value := range values {
		if err := mergeRow(&all, row, value); err != nil {
			return hyperloglog.Registers{}, fmt.Errorf("owner: %q: %w", h.key, err)
		}
	}

	return all.Registers(), nil
}

// firstRegisters returns the first n rows of registers of a unique.
func (r *Reader) firstRegisters(ctx context.Context, h *found, n int) ([][]byte, error) {
	of := registers{collection: setCollection(&h.head)}
	addresses := make([]rows.Address, n)
	for row := range addresses {
		addresses[row] = h.address(of.name(row))
	}

	return r.values(ctx, addresses)
}

// Size implements counter.Reader.
func (r *Reader) Size(ctx context.Context, prefix string) (n int64, err error) {
	err = r.all(ctx, prefix, func(*found) error {
		n++
		return nil
	})

	return n, err
}

// Sets implements counter.Reader. It returns all sets in one page.
func (r *Reader) Sets(ctx context.Context, _ string) (keys []string, next string, err error) {
	for partition := range rows.Partitions {
		err := r.store.Scan(ctx, partition, heads, "", func(key string, row []byte) error {
			// The first byte of a head is its kind, so heads need not be decoded.
			if len(row) > 0 && counter.Kind(row[0]).KnowsMembers() {
				keys = append(keys, key)
			}
			return nil
		})
		if err != nil {
			return nil, "", unavailable("sets", err)
		}
	}

	return keys, "", nil
}

// Running returns for each of the distinct keys its newest slot of a step, or the zero Slot, as counter.TopStore does.
func (r *Reader) Running(ctx context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	all, err := r.heads(ctx, keys)
	if err != nil {
		return nil, err
	}

	slots := make([]counter.Slot, len(keys))
	for i := range all {
		// The newest slot is in the head, so no row of the history is read.
		slots[i] = all[i].Slots.At(step)
	}

	return slots, nil
}
