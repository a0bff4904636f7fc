package owner

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"

	"headcount/internal/rows"
)

// near is a store in the memory of this process. Single rows are looked up when needed, so a turn need not gather them
// for a Read.
type near interface {
	rows.Store
	Get(partition int, name rows.Name) []byte
	Size(partition int, collection string) int
}

// residents keeps the heads of counters instead of a store in memory. The heads are as durable here as there, so they
// stay decoded, and the store has all other rows. Readers see both as one store. Its methods may be called from any
// goroutine, except record and land, which need the owner's turn.
type residents struct {
	near
	partitions [rows.Partitions]resident
}

// resident has the counters of one partition. Changing them needs the lock and the turn; reading them needs one of the
// two.
type resident struct {
	mu      sync.Mutex
	records map[string]*record
}

func newResidents(store near) *residents {
	r := &residents{near: store}
	for id := range r.partitions {
		r.partitions[id].records = map[string]*record{}
	}

	return r
}

// record returns a copy of the record of a counter, the zero record if it does not exist.
func (r *residents) record(partition int, key string) record {
	// Only turns change records, and the caller has the turn, so no lock is needed.
	is := r.partitions[partition].records[key]
	if is == nil {
		return record{}
	}

	own := *is
	own.extent = is.extent.clone()

	return own
}

// land stores the heads that a draft has changed.
func (r *residents) land(partition int, heads []*head) {
	p := &r.partitions[partition]
	p.mu.Lock()
	defer p.mu.Unlock()

	for _, h := range heads {
		if h.changed {
			p.putLocked(h)
		}
	}
}

// putLocked stores the record of a head.
func (p *resident) putLocked(h *head) {
	is := p.records[h.key]
	switch {
	case h.Version.Sequence == 0:
		delete(p.records, h.key)
	case is != nil:
		*is = h.record
	default:
		own := h.record
		p.records[strings.Clone(h.key)] = &own // a copy, because the key may be a part of a request's buffer
	}
}

// appendRow appends the row of a counter, nothing if it does not exist.
func (p *resident) appendRow(b []byte, key string) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()

	is := p.records[key]
	if is == nil {
		return b
	}

	return is.append(b)
}

// after returns the rows whose fields are greater than after, in their order.
func (p *resident) after(after string) []rows.Row {
	p.mu.Lock()
	defer p.mu.Unlock()

	// Records are encoded under the lock, since a turn changes them in place.
	found := make([]rows.Row, 0, len(p.records))
	for key, is := range p.records {
		if key > after {
			found = append(found, rows.Row{Name: headOf(key), Value: is.append(nil)})
		}
	}
	slices.SortFunc(found, func(a, b rows.Row) int { return cmp.Compare(a.Field, b.Field) })

	return found
}

// Get implements near.
func (r *residents) Get(partition int, name rows.Name) []byte {
	if name.Collection == heads {
		return r.partitions[partition].appendRow(nil, name.Field)
	}

	return r.near.Get(partition, name)
}

// aboutRow is the length of the row of a usual counter.
const aboutRow = 48

// Read implements rows.Store.
func (r *residents) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	var room []byte // shared, because a top list reads a thousand heads
	for i, at := range addresses {
		if at.Collection != heads {
			found[i].Value = r.near.Get(at.Partition, at.Name)
			continue
		}

		if room == nil {
			room = make([]byte, 0, aboutRow*len(addresses))
		}
		from := len(room)
		room = r.partitions[at.Partition].appendRow(room, at.Field)
		if len(room) > from {
			// The capacity is cut, so that no append to a value reaches into the next one.
			found[i].Value = room[from:len(room):len(room)]
		}
	}

	return found
}

// Scan implements rows.Store.
func (r *residents) Scan(
	ctx context.Context, partition int, collection, after string, each func(string, []byte) error,
) error {
	if collection != heads {
		return r.near.Scan(ctx, partition, collection, after, each)
	}

	for _, row := range r.partitions[partition].after(after) {
		if err := each(row.Field, row.Value); err != nil {
			return err
		}
	}

	return nil
}
