package owner

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

var _ counter.Dumper = (*Reader)(nil)

const (
	// dumpPage is how many keys of each partition an export reads at a time. For each page Redis, whose hashes have no
	// order, is asked for all heads of the partition.
	dumpPage = 4096
	// dumpTries is how often an export reads a counter that keeps changing during the read. From the last try it leaves
	// out what is newer than the head.
	dumpTries = 5
	// memberText is the length of a member's hash as exports have it, see counter.MemberHash.
	memberText = 14
)

// Deleted implements counter.Dumper.
func (r *Reader) Deleted(ctx context.Context) (deleted uint64, err error) {
	addresses := make([]rows.Address, rows.Partitions)
	for id := range addresses {
		addresses[id] = rows.Address{Partition: id, Name: metaRow}
	}
	values, err := r.values(ctx, addresses)
	if err != nil {
		return 0, err
	}

	for id, value := range values {
		m, err := decodeMeta(value)
		if err != nil {
			return 0, fmt.Errorf("owner: partition %d: %w", id, err)
		}
		// The highest of all partitions, since the target of the export may place a counter in another partition.
		deleted = max(deleted, m.deleted)
	}

	return deleted, nil
}

// Dump implements counter.Dumper.
func (r *Reader) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	var pages [rows.Partitions]dumpedKeys
	for id := range pages {
		pages[id] = dumpedKeys{partition: id, after: after}
	}

	for {
		// An export is in the order of keys, so the partitions are merged.
		next, err := r.firstKey(ctx, &pages)
		if err != nil || next == nil {
			return err
		}

		is, err := r.dump(ctx, next.partition, next.take())
		if err != nil {
			return err
		}
		if is.Version == (counter.Version{}) {
			continue // it was deleted meanwhile
		}
		if err := each(is); err != nil {
			return err
		}
	}
}

// DumpExact calls each with the exact counters of ExactPartition. It is used to move them to another store.
func (r *Reader) DumpExact(ctx context.Context, each func(counter.Copy) error) error {
	var keys []string
	err := r.store.Scan(ctx, ExactPartition, heads, "", func(key string, row []byte) error {
		h := head{key: key}
		err := h.decode(row)
		if err == nil && h.Kind.IsExact() {
			keys = append(keys, key)
		}
		return err
	})
	if err != nil {
		return unavailable("dump", err)
	}

	for _, key := range keys {
		is, err := r.dump(ctx, ExactPartition, key)
		// The counter may have been deleted since the scan.
		if err == nil && is.Version != (counter.Version{}) {
			err = each(is)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// dumpedKeys is a page of keys of one partition, in order.
type dumpedKeys struct {
	partition int
	keys      []string
	after     string // the last key that was read
	all       bool   // true after the last page
}

func (p *dumpedKeys) take() string {
	key := p.keys[0]
	p.keys = p.keys[1:]

	return key
}

// firstKey returns the page whose next key is the first one of all partitions, nil if no keys are left.
func (r *Reader) firstKey(ctx context.Context, pages *[rows.Partitions]dumpedKeys) (first *dumpedKeys, err error) {
	for id := range pages {
		p := &pages[id]
		if len(p.keys) == 0 && !p.all {
			err = r.nextPage(ctx, p)
		}
		if err != nil {
			return nil, err
		}
		if len(p.keys) > 0 && (first == nil || p.keys[0] < first.keys[0]) {
			first = p
		}
	}

	return first, nil
}

// nextPage reads the next page of keys of a partition.
func (r *Reader) nextPage(ctx context.Context, p *dumpedKeys) error {
	keys, all, err := firstFields(ctx, r.store, p.partition, heads, p.after, dumpPage)
	if err != nil {
		return unavailable("dump", err)
	}

	p.keys = keys
	p.all = all
	if len(keys) > 0 {
		p.after = keys[len(keys)-1]
	}

	return nil
}

// dump returns everything about one counter, as of one moment, or a Copy without a version if it does not exist.
func (r *Reader) dump(ctx context.Context, partition int, key string) (is counter.Copy, err error) {
	// Read the counter where it was found, even if the rules place it elsewhere by now.
	at := []rows.Address{{Partition: partition, Name: headOf(key)}}

	before, err := r.values(ctx, at)
	for range dumpTries {
		if err != nil {
			return counter.Copy{}, err
		}
		is, err = r.copyOf(ctx, partition, key, before[0])
		if err != nil {
			return counter.Copy{}, fmt.Errorf("owner: dump of %q: %w", key, err)
		}

		// If the head is still the same, the rows that were read in between belong to it.
		var now [][]byte
		now, err = r.values(ctx, at)
		if err == nil && bytes.Equal(now[0], before[0]) {
			return is, nil
		}
		before = now
	}

	settle(&is)

	return is, err
}

// settle makes a counter whose other rows may be newer than its head one that could have been read at one moment. An
// import refuses a set whose value is not the number of its members. In an imported ledger with more entries than the
// counter knows of, later ones would get wrong numbers, and in an imported history a time bucket would count twice.
func settle(c *counter.Copy) {
	isLater := func(e counter.Entry) bool { return e.Seq > c.Entries }
	c.Ledger = slices.DeleteFunc(c.Ledger, isLater)

	// The running time bucket of a sum, and all after it, were not over yet.
	wasRunning := func(s counter.StepCopy) bool {
		slot := c.Slots.At(time.Duration(s.Step) * time.Second)
		return s.Seen == nil && slot.Step != 0 && s.Number >= int64(slot.Number)
	}
	c.Steps = slices.DeleteFunc(c.Steps, wasRunning)

	// With other regions the value includes their members, and may be greater.
	own := int64(len(c.Hashes))
	if c.Kind.KnowsMembers() && (c.Elsewhere == "" || c.Value < own) {
		c.Value = own
	}
}

// copyOf returns everything about the counter with that head.
func (r *Reader) copyOf(ctx context.Context, partition int, key string, row []byte) (is counter.Copy, err error) {
	h := found{head: head{key: key}, partition: partition}
	if err := h.decode(row); err != nil {
		return counter.Copy{}, err
	}
	is.Key = key
	is.State = h.State
	if h.Version == (counter.Version{}) {
		return is, nil
	}

	if h.parts&hasSet != 0 && h.Kind.KnowsMembers() {
		is.Hashes, err = r.hashes(ctx, &h)
	}
	if err == nil && h.parts&hasSet != 0 && h.Kind.Estimates() {
		is.Registers, err = r.registers(ctx, &h)
	}
	if err == nil && h.parts&hasDimensions != 0 {
		err = r.dumpDimensions(ctx, &h, &is)
	}
	for _, step := range counter.ResolutionSteps {
		if err == nil && h.parts&historyPart(uint32(step/time.Second)) != 0 {
			err = r.dumpHistory(ctx, &h, step, &is)
		}
	}
	if err == nil {
		var page counter.Reservations
		// One page has all of them: no counter has more open ones.
		page, err = r.reservations(ctx, &h, "", counter.MaxOpen)
		is.Reservations = page.Open
	}
	if err == nil {
		is.Elsewhere, err = r.elsewhere(ctx, &h)
	}
	if err != nil || h.Entries == 0 {
		return is, err
	}

	page, err := r.ledger(ctx, &h, 0, math.MaxInt)
	is.Ledger = page.Entries

	return is, err
}

// hashes returns the members of a set.
func (r *Reader) hashes(ctx context.Context, h *found) ([]string, error) {
	s := set{h: &h.head}
	addresses := make([]rows.Address, s.shards())
	for shard := range addresses {
		addresses[shard] = h.address(s.row(uint64(shard)))
	}
	values, err := r.values(ctx, addresses)
	if err != nil {
		return nil, err
	}

	var all []string
	for _, row := range values {
		for at := 0; at+hashSize <= len(row); at += hashSize {
			text := base64.RawURLEncoding.EncodeToString(row[at : at+hashSize])
			all = append(all, text[:memberText])
		}
	}
	slices.Sort(all) // as other stores do, so that exports can be compared

	return all, nil
}

func (r *Reader) dumpHistory(ctx context.Context, h *found, step time.Duration, into *counter.Copy) error {
	read := r.gains
	if h.Kind.Estimates() {
		read = r.uniqueGains
	}
	gains, err := read(ctx, h, step, 0, math.MaxUint32)
	if err != nil {
		return err
	}

	for _, g := range gains {
		one := counter.StepCopy{Step: uint32(step / time.Second), Number: g.Number, Value: g.Value, Seen: g.Seen}
		into.Steps = append(into.Steps, one)
	}

	return nil
}

func (r *Reader) dumpDimensions(ctx context.Context, h *found, into *counter.Copy) error {
	// The row of a dimension comes before those of its values, whose fields begin with its name.
	return r.store.Scan(ctx, h.partition, dimensionsOf(&h.head), "", func(field string, row []byte) error {
		read := reader{rest: row}
		name, value, isValue := strings.Cut(field, "\x00")
		counted := into.Dimension(name)
		if isValue {
			counted.Values[value] = read.int()
		} else {
			read.uint()
			counted.Other = read.int()
		}
		return read.end("a dimension")
	})
}
