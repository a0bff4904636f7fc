package counterpg

import (
	"math"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

func (w *step) State(key string) *counter.State { return &w.records[key].State }

func (w *step) Deleted() uint64 { return uint64(w.deleted) }

func (w *step) Remembered(id counter.IdempotencyKey) bool { return !w.fresh[id] || w.taken[id] }

func (w *step) Remember(id counter.IdempotencyKey) {
	w.taken[id] = true
	w.changed = true
}

func (w *step) id() int64 {
	if w.nextID == w.lastID { // somebody else has the next one
		panic("counterpg: a step gives out more ids than it took")
	}
	id := w.nextID
	w.nextID++
	return id
}

func (w *step) Join(key, member string) bool {
	r := w.records[key]
	if r.members[member] || r.members[nameless(member)] {
		return false
	}
	if r.set == 0 {
		r.set = w.id()
	}
	if r.members == nil {
		r.members = map[string]bool{}
	}
	r.members[member] = true
	return true
}

func (w *step) Leave(key, member string) bool {
	r := w.records[key]
	for _, form := range []string{member, nameless(member)} {
		if r.members[form] {
			delete(r.members, form)
			return true
		}
	}

	return false
}

// nameless is how a member stands in the table whose name is unknown.
func nameless(member string) string { return counter.Nameless(counter.MemberHash(member)) }

func (w *step) Registers(key string) counter.Registers { return &w.records[key].unique }

// Empty costs the same for a large set: its members are swept away later.
func (w *step) Empty(key string) {
	r := w.records[key]
	w.discard(r.set, r.was.set)
	r.set, r.members, r.unique = 0, nil, hyperloglog.Registers{}
}

// discard has the set or ledger id swept away, when the tables have any of it.
func (w *step) discard(id, was int64) {
	if id != 0 && id == was {
		w.sweep(id, sweepRow{garbage: true})
	} else {
		delete(w.sweeps, id)
	}
}

func (w *step) sweep(id int64, r sweepRow) {
	if w.sweeps == nil {
		w.sweeps = map[int64]sweepRow{}
	}
	w.sweeps[id] = r
}

// Enter also has the ledger swept when its first entries have been kept long
// enough, or at once when that time has changed.
func (w *step) Enter(key string, e counter.Entry, kept time.Duration) {
	r := w.records[key]
	millis := kept.Milliseconds()
	isNew := r.ledger == 0
	if isNew {
		r.ledger = w.id()
	}
	if isNew && kept > 0 {
		w.sweep(r.ledger, sweepRow{due: w.now.UnixMilli() + millis, kept: millis})
	} else if !isNew && r.kept != millis {
		due := w.now.UnixMilli()
		if kept == 0 {
			due = math.MaxInt64
		}
		w.sweep(r.ledger, sweepRow{due: due, kept: millis})
	}
	r.kept = millis
	r.entries = append(r.entries, e)
}

func (w *step) Past(key string, s counter.Slot, kept time.Duration) {
	w.past(key, counter.Past{Slot: s, Kept: kept})
}

func (w *step) past(key string, p counter.Past) {
	r := w.records[key]
	if r.history == 0 {
		r.history = w.id()
	}
	r.past = append(r.past, p)
}

func (w *step) See(key string, s counter.Slot, members []string, kept time.Duration) {
	if seen := w.records[key].step(s, &seen{}); seen.registers.Add(members...) {
		w.keep(key, s, seen, kept)
	}
}

// keep writes whom a unique saw in a step.
func (w *step) keep(key string, s counter.Slot, seen *seen, kept time.Duration) {
	w.changed = true
	if !seen.changed {
		seen.changed = true
		w.past(key, counter.Past{Slot: s, Kept: kept, Seen: &seen.registers})
	}
}

func (w *step) Count(key, name, value string, delta int64) {
	r := w.records[key]
	if r.history == 0 {
		r.history = w.id()
	}
	all := counter.Dimension{Name: name}
	other := r.counted[all]
	if other == nil {
		other = &counted{}
		r.count(all, other)
	}
	is := other
	if value != "" {
		d := counter.Dimension{Name: name, Value: value}
		if is = r.counted[d]; is == nil && other.kept < counter.MaxValues {
			is = &counted{}
			r.count(d, is)
			other.kept, other.changed = other.kept+1, true
		} else if is == nil {
			is = other
		}
	}
	is.count, is.changed = counter.Saturated(is.count, delta), true
}

func (w *step) Drop(key string, v counter.Version) {
	w.deleted = max(w.deleted, int64(v.Incarnation))
	r := w.records[key]
	w.discard(r.set, r.was.set)
	w.discard(r.ledger, r.was.ledger)
	w.discard(r.history, r.was.history)
	r.history, r.past, r.seen, r.counted = 0, nil, nil, nil
	r.set, r.members, r.unique, r.ledger, r.kept, r.entries = 0, nil, hyperloglog.Registers{}, 0, 0, nil
}

func (w *step) Changed(key string, joined, left []string, all bool) {
	w.changed = true
	if w.told == nil {
		w.told = changes{}
	}
	var moved []string
	if !all {
		moved = slices.Concat(joined, left)
	}
	w.told.add(key, moved)
}
