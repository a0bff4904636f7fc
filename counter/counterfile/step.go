package counterfile

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/boltfile"
)

// step is the counter.Step of one transaction. Numbers change in records and
// are put in the end; members, entries and idempotency keys are put at once.
type step struct {
	tx      *bbolt.Tx
	now     time.Time
	records map[string]*record // what was looked at
	before  map[string]record  // how it was; lacks what was not there
	deleted uint64
	was     uint64                            // deleted in the file
	unique  map[string]*hyperloglog.Registers // what was looked at, put in the end
	told    []counter.Notification
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

func (t *step) delete(bucket, key []byte) { t.check(t.tx.Bucket(bucket).Delete(key)) }

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

func (t *step) Deleted() uint64 { return t.deleted }

func (t *step) Remembered(id counter.IdempotencyKey) bool {
	until := t.get(idsBucket, id[:])
	return len(until) == 8 && int64(binary.BigEndian.Uint64(until)) > t.now.Unix()
}

func (t *step) Remember(id counter.IdempotencyKey) {
	until := number(uint64(t.now.Add(counter.IdempotencyKeyKept).Unix()))
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

func (t *step) Registers(key string) counter.Registers {
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
	t.told = append(t.told, counter.Notification{Key: key, Joined: joined, Left: left, All: all})
}

// clear forgets idempotency keys whose day is over and gains that were kept long enough, and takes
// away members, registers, entries and gains that are no counter's, a bounded number of each.
func (t *step) clear(idempotencyKeys int) {
	c := t.tx.Bucket(forgetBucket).Cursor()
	for range idempotencyKeys {
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
