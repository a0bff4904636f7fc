package owner

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"headcount/counter"
	"headcount/counter/share"
	"headcount/hyperloglog"
	"headcount/internal/rows"
)

// If there are other regions, the head of a counter has the total of all regions, and one more row has what this region
// knows of the others (package share). The region's own part is the total minus the others', so a change of the counter
// need not write that row. A deleted counter leaves a row with the number of the deletion for some time.
const (
	shares     = "shares"
	tombstones = "graves"
)

// tombstoneRetention is how long a deletion is remembered. A region that was disconnected for longer may bring the
// counter back.
const tombstoneRetention = 30 * 24 * time.Hour

func shareName(key string) rows.Name     { return rows.Name{Collection: shares, Field: key} }
func tombstoneName(key string) rows.Name { return rows.Name{Collection: tombstones, Field: key} }

// ReceivedShares has shares of some counters that another region has sent.
type ReceivedShares struct {
	From   string // the region that sent them
	Shares []ReceivedShare
}

// ReceivedShare is the share of one counter.
type ReceivedShare struct {
	Key string
	share.Share
	// Repair says that the peer sent the share because this region may have lost data. If it contains anything new,
	// further regions may lack it, too.
	Repair bool
}

// Merged is the result of merging ReceivedShares.
type Merged struct {
	New      int // counters whose shares contained anything new
	Rejected int // counters that could not be merged: their kind is another one here, or the total does not fit 64 bits
}

// known is what a draft knows of a counter in all regions.
type known struct {
	share.Local
	merges uint64 // how many increments of the head's sequence were merges and not changes of this region
}

// known reads what this region knows of a counter in all regions.
func (d *draft) known(h *head) known {
	k := known{Local: share.Local{Region: d.region}}
	// Of a counter that does not exist, all that can be known is its deletion.
	deletion := d.deletionOf(h.key)
	if h.Version == (counter.Version{}) {
		k.Deletion = deletion
		return k
	}

	// Without a row, the total is the region's own part.
	k.Life = h.life
	k.Changed = true
	if err := k.parse(d.get(shareName(h.key)), h); err != nil {
		d.malformed = err
	}

	k.Kind = h.Kind
	k.Updated = h.Updated
	k.Deletion = deletion
	// Merges moved the version of the counter. Other regions go by the changes of this region alone.
	k.SetOwn(h.Version.Sequence-k.merges, k.OwnOf(h.Value, h.size()))

	return k
}

// deletionOf returns the number of a counter's last deletion, 0 if none is remembered.
func (d *draft) deletionOf(key string) uint64 {
	r := reader{rest: d.get(tombstoneName(key))}
	if len(r.rest) == 0 {
		return 0
	}

	return r.uint()
}

// parse reads the row of shares. A row that an earlier life of the counter has left is ignored.
func (k *known) parse(row []byte, h *head) error {
	if len(row) == 0 {
		return nil
	}

	r := reader{rest: row}
	changed := r.byte() == 1
	of := r.uint()
	life := r.uint()
	merges := r.uint()
	s, err := share.Parse(r.rest)
	if r.malformed || err != nil {
		return fmt.Errorf("shares of %q: %w", h.key, ErrMalformed)
	}
	if of != h.life {
		return nil
	}

	k.Changed = changed
	k.Life = life
	k.merges = merges
	k.Share = s

	return nil
}

// putKnown writes the row of shares of a counter that exists.
func (d *draft) putKnown(h *head, k *known) {
	b := []byte{flag(k.Changed)}
	b = binary.AppendUvarint(b, h.life)
	b = binary.AppendUvarint(b, k.Life)
	// Every increment of the version's sequence is a change of this region or a merge.
	b = binary.AppendUvarint(b, h.Version.Sequence-k.Sequence)

	s := k.Share
	s.Seen = hyperloglog.Registers{} // the registers have rows of their own
	d.put(shareName(h.key), s.Append(b))
}

// putTombstone records a deletion. If the counter is created again, its life is greater than the number of the
// deletion.
func (d *draft) putTombstone(key string, deletion uint64) {
	d.put(tombstoneName(key), binary.AppendUvarint(nil, deletion))
	d.expire(tombstoneName(key), tombstoneUntil(deletion))
	if deletion > d.meta.deleted {
		d.meta.deleted = deletion
		d.metaChanged = true
	}
}

func tombstoneUntil(deletion uint64) time.Time {
	return time.UnixMilli(int64(deletion)).Add(tombstoneRetention)
}

// sendShare sends the share of a counter to the other regions, once the draft is committed.
func (d *draft) sendShare(key string) {
	if d.region != "" {
		d.sharesToSend = append(d.sharesToSend, key)
	}
}

// judgeShared is counter.Judge, and also records what the changes mean for other regions.
func (d *draft) judgeShared(op *counter.Op) counter.Result {
	if d.region == "" {
		return counter.Judge(d, op, d.now)
	}
	if conflict := d.ownOverflow(op); conflict != nil {
		return counter.Result{Err: conflict}
	}

	// Judge may reset or delete the counters, so what is known of other regions is read first.
	before := make([]before, len(op.Changes))
	for i := range op.Changes {
		before[i] = d.before(&op.Changes[i])
	}

	result := counter.Judge(d, op, d.now)
	if result.Err != nil || result.Replay {
		return result
	}
	for i := range op.Changes {
		h := d.head(op.Changes[i].Key)
		isShared := !h.Kind.IsExact() && !before[i].kind.IsExact()
		if isShared && h.Version != before[i].version {
			d.changedHere(h, op.Changes[i].Verb, before[i].known)
		}
	}

	return result
}

// before is the state of a counter before a change.
type before struct {
	version counter.Version
	kind    counter.Kind
	known   *known // nil if the change does not depend on other regions
}

func (d *draft) before(c *counter.Change) before {
	h := d.head(c.Key)
	is := before{version: h.Version, kind: h.Kind}
	// An addition to a counter that no other region has needs no look at the parts: the total is this region's.
	ends := c.Verb == counter.Delete || c.Verb == counter.Reset
	if h.Version != (counter.Version{}) && (ends || d.get(shareName(c.Key)) != nil) {
		k := d.known(h)
		is.known = &k
	}

	return is
}

// changedHere records what a change in this region means for the other regions. Before is what was known of the counter
// before the change.
func (d *draft) changedHere(h *head, verb counter.Verb, before *known) {
	now := uint64(d.now.UnixMilli())
	switch verb {
	case counter.Delete:
		d.put(shareName(h.key), nil)
		d.putTombstone(h.key, before.Delete(now))
	case counter.Reset:
		before.Reset(now)
		before.Changed = true
		own := before.Value
		// The part of a sum keeps its value: Reset has recorded that value as the one to subtract. The part of a set
		// has no members left.
		if !before.Kind.Number() {
			own = 0
		}
		before.SetOwn(before.Sequence+1, own)
		d.putKnown(h, before)
	default:
		// Until now the counter had changed only in other regions.
		if before != nil && !before.Changed {
			before.Changed = true
			before.Sequence = h.Version.Sequence - before.merges
			d.putKnown(h, before)
		}
	}

	d.sendShare(h.key)
}

// ownOverflow returns the conflict of additions after which this region's own part would not fit 64 bits, or nil. If
// there are no other regions, the own part is the total, which Judge checks.
func (d *draft) ownOverflow(op *counter.Op) *counter.Conflict {
	var sums map[string]counter.Wide
	for i := range op.Changes {
		c := &op.Changes[i]
		if c.Verb != counter.Add && c.Verb != counter.Adjust || d.get(shareName(c.Key)) == nil {
			continue
		}

		h := d.head(c.Key)
		// A batch may add to one counter several times.
		own, again := sums[c.Key]
		if !again {
			k := d.known(h)
			own = k.WithoutOthers(h.Value)
		}
		own = own.Plus(c.Delta)
		if _, ok := own.Value(); !ok && h.Kind.Number() {
			text := "the part of this region does not fit 64 bits"
			return &counter.Conflict{Is: counter.ErrOverflow, Key: c.Key, Value: h.Value, Text: text}
		}
		if sums == nil {
			sums = map[string]counter.Wide{}
		}
		sums[c.Key] = own
	}

	return nil
}

// makeShares carries out the parts of a call that concern other regions.
func (d *draft) makeShares(m *More, answer *MoreAnswer) {
	for _, key := range m.Shares {
		answer.Shares = append(answer.Shares, d.shareOf(key))
	}
	if m.Received == nil {
		return
	}
	for i := range m.Received.Shares {
		d.mergeShare(m.Received.From, &m.Received.Shares[i], &answer.Merged)
	}
}

// shareOf returns the share of a counter for other regions.
func (d *draft) shareOf(key string) share.Share {
	h := d.head(key)
	if h.err != nil || h.Kind.IsExact() {
		return share.Share{}
	}

	k := d.known(h)
	if h.Kind.Estimates() {
		// A region's part of a unique is all of its registers, since these only rise.
		k.Seen = d.seen(h)
	}

	return k.Share
}

// seen returns the registers of a unique.
func (d *draft) seen(h *head) hyperloglog.Registers {
	all := registers{collection: setCollection(h)}
	var union hyperloglog.Union
	for row := range registerRows {
		if err := mergeRow(&union, row, d.get(all.name(row))); err != nil {
			d.malformed = err
		}
		if row == 0 && h.ranks == nil {
			break // they are all in one row
		}
	}

	return union.Registers()
}

// mergeShare merges a share that another region has sent.
func (d *draft) mergeShare(from string, s *ReceivedShare, merged *Merged) {
	h := d.head(s.Key)
	existed := h.Version != counter.Version{}
	if h.err != nil || h.Kind.IsExact() || !existed && d.misplaced(s.Key) != nil {
		merged.Rejected++
		return
	}

	k := d.known(h)
	deletionBefore := k.Deletion
	e := k.Merge(from, &s.Share, max(h.life, d.incarnation()))
	if k.Deletion > deletionBefore {
		d.putTombstone(s.Key, k.Deletion)
	}
	if !existed {
		// The deletion above may have a greater number than the life that the head got when it was read.
		h.life = d.incarnation()
	}
	if e.Dropped {
		d.dropDeletedElsewhere(h)
	}
	if e.Emptied {
		d.Empty(s.Key)
	}

	d.applyMerge(h, s, &k, &e)

	if e.New {
		merged.New++
	}
	if e.Rejected {
		merged.Rejected++
	}
	if e.Send || s.Repair && (e.New || d.hasMore(h, s)) {
		d.sendShare(s.Key)
	}
}

// hasMore reports whether a unique has registers here that the sender of a share lacks. Registers do not record from
// which region they came, so every region passes them on.
func (d *draft) hasMore(h *head, s *ReceivedShare) bool {
	if !h.Kind.Estimates() || s.Kind != h.Kind {
		return false
	}
	seen := d.seen(h)

	return !bytes.Equal(seen.Bytes(), s.Seen.Bytes())
}

// dropDeletedElsewhere deletes a counter because another region has deleted it.
func (d *draft) dropDeletedElsewhere(h *head) {
	d.put(shareName(h.key), nil)
	d.Drop(h.key, h.Version)
	h.State = counter.State{}
	d.Changed(h.key, nil, nil, true)
	// The share may be of a counter that was created again there.
	h.life = d.incarnation()
}

// applyMerge sets the head to the total of all regions after the merge.
func (d *draft) applyMerge(h *head, s *ReceivedShare, k *known, e *share.Effect) {
	// A share that says only that the counter is deleted, or that cannot be merged at all, leaves the head as it is.
	if k.Kind == 0 || e.Rejected && !e.New {
		return
	}
	h.Kind = k.Kind
	if !h.Kind.Number() {
		h.extend()
	}
	// Registers from before a reset or deletion must not come back.
	isSameLife := s.Kind == k.Kind && s.Emptied == k.Emptied && s.Deletion == k.Deletion
	if isSameLife && s.Kind.Estimates() && d.raiseAll(h, s) {
		e.New = true
	}

	total, fits := k.Total()
	if k.Kind.Estimates() {
		// The parts of a unique have no values; its registers have those of all regions.
		total = unique{d, h}.Count()
	}
	if !fits {
		// The peer sends the share again when the counter changes there.
		*e = share.Effect{Rejected: true, Dropped: e.Dropped}
		// A counter that did not exist here still does not.
		if h.Version == (counter.Version{}) {
			h.Kind = 0
		}
		return
	}
	if !e.New && !e.Begun && !e.Emptied {
		return
	}

	// A new total needs a new version. So does a counter that began a new life, also if its total is the same.
	if total != h.Value || e.Emptied || e.Begun || h.Version == (counter.Version{}) {
		h.Value = total
		h.Updated = max(h.Updated, k.Updated)
		h.Version.Sequence++
		d.Changed(h.key, nil, nil, h.Kind.KnowsMembers() && (e.Emptied || e.Dropped))
	}
	d.putKnown(h, k)
}

// raiseAll raises the registers of a unique to those of a share, and reports whether one changed.
func (d *draft) raiseAll(h *head, s *ReceivedShare) (changed bool) {
	all := registers{d: d, collection: setCollection(h), ranks: h.ranks, counts: true}
	s.Seen.Each(func(index int, rank uint8) {
		if all.raise(index, rank) {
			changed = true
		}
	})
	if changed {
		h.parts |= hasSet
		h.ranks = all.ranks
		d.change(h)
	}

	return changed
}

// Epochs returns the epoch of this process's claim of each partition, 0 for partitions that it does not own. It waits
// for the current turn.
func (o *Owner) Epochs() (epochs [rows.Partitions]uint64) {
	if o.lock(o.ctx) != nil {
		return epochs
	}
	defer o.unlock()

	for _, p := range o.partitions() {
		epochs[p.id] = p.epoch
	}

	return epochs
}

// SharedKeys returns up to most counters of a partition whose shares other regions may need, including deleted ones,
// and the cursor for the next call; after the last counters next is empty. The first call passes "".
func (r *Reader) SharedKeys(
	ctx context.Context, partition int, after string, most int,
) (keys []string, next string, err error) {
	// The cursor is a collection and a field, and heads come before tombstones.
	collection, field, _ := strings.Cut(after, "/")
	if collection == "" {
		collection = heads
	}

	keys, all, err := firstFields(ctx, r.store, partition, collection, field, most)
	switch {
	case err != nil:
		return nil, "", unavailable("scan", err)
	case !all:
		return keys, collection + "/" + keys[len(keys)-1], nil
	case collection == heads:
		return keys, tombstones + "/", nil
	}

	return keys, "", nil
}

// After returns the SharedKeys cursor just after a key, which the call with the cursor after has returned.
func After(after, key string) string {
	collection, _, _ := strings.Cut(after, "/")
	if collection == "" {
		collection = heads
	}

	return collection + "/" + key
}

// regionRow has the name of the region whose counters the store has, so that no process counts or sends under another
// region's name.
var regionRow = rows.Address{Name: rows.Name{Collection: "region", Field: "name"}}

// Region returns the name of the region whose counters the store has, "" if it was never named.
func (r *Reader) Region(ctx context.Context) (string, error) {
	values, err := r.values(ctx, []rows.Address{regionRow})
	if err != nil {
		return "", err
	}

	return string(values[0]), nil
}

// NameRegion returns the call that gives the store the name of a region.
func NameRegion(name string) Call {
	row := rows.Row{Name: regionRow.Name, Value: []byte(name)}

	return Call{Partition: regionRow.Partition, More: &More{Rows: []Expiring{{Row: row}}}}
}

// elsewhere returns what the region knows of other regions, in the form of an export; empty if there are none.
func (r *Reader) elsewhere(ctx context.Context, h *found) (string, error) {
	if h.Kind.IsExact() {
		return "", nil
	}

	values, err := r.values(ctx, []rows.Address{
		h.address(shareName(h.key)), h.address(tombstoneName(h.key)), regionRow,
	})
	if err != nil {
		return "", err
	}

	// A store that was filled by an import has no region's name yet.
	isNamed := len(values[2]) > 0
	if !isNamed && len(values[0]) == 0 {
		return "", nil
	}

	k := known{Local: share.Local{Region: string(values[2]), Life: h.life, Changed: true}}
	if err := k.parse(values[0], &h.head); err != nil {
		return "", err
	}
	tombstone := reader{rest: values[1]}
	if len(values[1]) > 0 {
		k.Deletion = tombstone.uint()
	}
	k.Kind = h.Kind
	if isNamed {
		k.SetOwn(h.Version.Sequence-k.merges, k.OwnOf(h.Value, h.size()))
	}

	return k.Text(k.Changed), nil
}

// restoreShares restores what an export says of other regions. They keep recognizing this region's part by its life.
func (d *draft) restoreShares(h *head, c *counter.Copy) {
	isAlone := d.region == AnyRegion && c.Elsewhere == ""
	if d.region == "" || isAlone || h.Kind.IsExact() {
		return
	}

	k := known{Local: share.Local{Region: d.region, Life: c.Version.Incarnation, Changed: true}}
	k.Sequence = h.Version.Sequence
	if c.Elsewhere != "" {
		s, changed, err := share.ParseText(c.Elsewhere)
		if err != nil {
			d.malformed = err
			return
		}
		k.Share = s
		k.Changed = changed
	}

	k.resumeOwnPart(d.region, h.Version.Sequence)

	k.Kind = h.Kind
	if k.Deletion > 0 {
		d.putTombstone(h.key, k.Deletion)
	}
	d.putKnown(h, &k)
}

// resumeOwnPart makes the region continue its own part, if an export has it. In exports of an earlier release it is
// left out, and its life is the incarnation. If the region has no name yet, its own former life stays among the parts,
// and the counter begins a new life.
func (k *known) resumeOwnPart(region string, sequence uint64) {
	for i := range k.Parts {
		p := &k.Parts[i]
		isOwn := p.Region == region || region == AnyRegion && p.Life == k.Life
		if isOwn && p.Sequence > 0 {
			k.Life = p.Life
			k.Sequence = min(p.Sequence, sequence)
		}
	}
}
