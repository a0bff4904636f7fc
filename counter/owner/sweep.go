package owner

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/counter/limit"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

// The owner of a partition deletes rows that belong to no counter any more, and rows that expire, a limited number at a
// time.
const (
	garbage   = "garbage" // its fields are collections to delete
	expiry    = "expiry:" // followed by a minute; fields: names of rows that expire in that minute
	sweepRows = 256       // rows that one call of a sweep deletes
)

// streamKept is how long the answer to a stream's last call is kept. No sender repeats a call for so long.
const streamKept = time.Hour

// meta is a row that each partition has once.
type meta struct {
	loaded  bool   // it was read
	deleted uint64 // the highest incarnation of all counters that were deleted
	swept   int64  // everything that expired until the end of this minute is deleted; 0: no row ever expired
}

var metaRow = rows.Name{Collection: "meta", Field: "partition"}

func (m *meta) encode() []byte {
	return binary.AppendVarint(binary.AppendUvarint(nil, m.deleted), m.swept)
}

func decodeMeta(b []byte) (meta, error) {
	m := meta{loaded: true}
	if len(b) == 0 {
		return m, nil
	}

	r := reader{rest: b}
	m.deleted = r.uint()
	m.swept = r.int()

	return m, r.end("a partition")
}

// loadMeta takes the meta row from memory, or from the rows that were read.
func (d *draft) loadMeta() {
	d.meta = d.p.meta
	if d.meta.loaded {
		return
	}

	var err error
	d.meta, err = decodeMeta(d.get(metaRow))
	if err != nil {
		d.malformed = err
	}
}

// discard schedules the deletion of a collection.
func (d *draft) discard(collection string) {
	d.put(rows.Name{Collection: garbage, Field: collection}, []byte{1})
}

// expire schedules the deletion of a row for some time after the given one.
func (d *draft) expire(name rows.Name, after time.Time) {
	now := d.now.Unix() / 60
	// Nothing has expired before now, so sweeps begin with this minute. They begin anew with it after the clock was
	// ahead and was set: everything until swept is deleted, and a row would have to wait until then.
	if d.meta.swept == 0 || d.meta.swept > now+sweptAhead {
		d.meta.swept = now
		d.metaChanged = true
	}

	// A sweep may be finishing earlier minutes, so the row must go into a later one.
	minute := max(after.Unix()/60, now, d.meta.swept) + 1
	d.put(rows.Name{Collection: expiryOf(minute), Field: joinName(name)}, []byte{1})
}

// sweptAhead is how far meta.swept may be ahead of the clock, in minutes: the clocks of two owners differ by less.
const sweptAhead = 2

func expiryOf(minute int64) string { return expiry + strconv.FormatInt(minute, 10) }

// joinName returns a name as one text.
func joinName(name rows.Name) string {
	return strconv.Itoa(len(name.Collection)) + " " + name.Collection + name.Field
}

// splitName returns the name that joinName joined.
func splitName(text string) (rows.Name, error) {
	length, rest, _ := strings.Cut(text, " ")
	n, err := strconv.Atoi(length)
	if err != nil || n > len(rest) {
		return rows.Name{}, fmt.Errorf("%w: %q is no name of a row", ErrMalformed, text)
	}

	return rows.Name{Collection: rest[:n], Field: rest[n:]}, nil
}

// swept is what one call of a sweep deletes.
type swept struct {
	expired []rows.Name // rows of expiry
	garbage []rows.Name
	until   int64 // the minute that is finished; 0: none yet
}

// sweep carries out one call of a sweep.
func (d *draft) sweep(s *swept) {
	for _, name := range s.garbage {
		d.put(name, nil)
	}
	// The entry is deleted in any case. A row that is still in use gets a new entry.
	for _, name := range s.expired {
		d.put(name, nil)
		d.sweepExpired(name.Field)
	}

	if s.until > d.meta.swept {
		d.meta.swept = s.until
		d.metaChanged = true
		d.writes++
	}
}

// sweepExpired deletes a row that has expired, unless it was used since.
func (d *draft) sweepExpired(field string) {
	name, err := splitName(field)
	if err != nil {
		return // a malformed entry names no row
	}

	// The entry has the expiry that was expected when it was made.
	until := d.usedUntil(name)
	if until.After(d.now) {
		d.expire(name, until)
	} else {
		d.put(name, nil)
	}
}

// usedUntil returns the expiry of a row that may have been used since its expiry was scheduled, or the zero time.
func (d *draft) usedUntil(name rows.Name) time.Time {
	if strings.HasPrefix(name.Collection, ended) {
		// A row that cannot be read gives the zero reservation, which is old enough to go.
		r, _ := decodeReservation("", d.get(name))
		return forgottenAt(r)
	}

	switch name.Collection {
	case limits:
		state, err := limit.Parse(d.get(name))
		if err == nil {
			return time.UnixMilli(state.End(limitOf(name.Field)))
		}
	case streams:
		return lastCall(d.get(name)).Add(streamKept)
	case tombstones:
		return tombstoneUntil(d.deletionOf(name.Field))
	}

	return time.Time{}
}

// sweep deletes expired rows at intervals.
func (o *Owner) sweep() {
	done := map[*partition]int64{} // the minute until which each partition is swept, even if no row had expired
	for wake.Wait(o.ctx, o.cfg.SweepEvery, nil) {
		// Copying only owned partitions forgets the others.
		before := done
		done = map[*partition]int64{}
		now := time.Now().Unix() / 60
		for _, p := range o.partitions() {
			// After the clock has gone back, the minutes until now come again.
			if before[p] <= now {
				done[p] = before[p]
			}

			// Whatever fails is left to the next sweep.
			errGarbage := o.sweepGarbage(p.id)
			errExpired := o.sweepExpired(p.id, done[p], now)
			if errGarbage == nil && errExpired == nil {
				done[p] = now
			}
		}
	}
}

// errEnough ends a scan early.
var errEnough = errors.New("enough")

// some returns the first rows of a collection, and whether these are all.
func (o *Owner) some(partition int, collection string) (names []rows.Name, all bool, err error) {
	ctx, cancel := o.limited()
	defer cancel()

	fields, all, err := firstFields(ctx, o.store, partition, collection, "", sweepRows)
	for _, field := range fields {
		names = append(names, rows.Name{Collection: collection, Field: field})
	}

	return names, all, err
}

// firstFields returns up to most fields of a collection that are greater than after, and whether these are all the
// remaining ones.
func firstFields(
	ctx context.Context, store rows.Store, partition int, collection, after string, most int,
) (fields []string, all bool, err error) {
	err = store.Scan(ctx, partition, collection, after, func(field string, _ []byte) error {
		fields = append(fields, field)
		if len(fields) == most {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		return fields, false, nil
	}

	return fields, true, err
}

// sweepGarbage deletes the collections of a partition that belong to no counter any more.
func (o *Owner) sweepGarbage(partition int) error {
	// Collections beyond the first ones wait for the next sweep.
	collections, _, err := o.some(partition, garbage)
	if err != nil {
		return err
	}

	for _, collection := range collections {
		for all := false; !all; {
			var names []rows.Name
			names, all, err = o.some(partition, collection.Field)
			if err != nil {
				return err
			}
			// The collection's entry goes last, so that an interrupted sweep is continued.
			if all {
				names = append(names, collection)
			}

			err = o.doSweep(partition, &swept{garbage: names})
			if err != nil {
				return err
			}
		}
	}

	return nil
}

// sweepExpired deletes the rows of a partition that expired after one minute and until the end of another.
func (o *Owner) sweepExpired(partition int, after, until int64) error {
	// The memory of the partition belongs to the turn, so the row comes from the store.
	found := o.store.Read(o.ctx, []rows.Address{{Partition: partition, Name: metaRow}})[0]
	m, err := decodeMeta(found.Value)
	if found.Err != nil || err != nil || m.swept == 0 {
		return errors.Join(found.Err, err)
	}

	for minute := max(after, m.swept) + 1; minute <= until; minute++ {
		deleted, err := o.sweepMinute(partition, minute)
		if err != nil {
			return err
		}

		// Skip commits for minutes in which no row expired, up to an hour.
		if deleted || minute-m.swept >= 60 {
			m.swept = minute
			err = o.doSweep(partition, &swept{until: minute})
			if err != nil {
				return err
			}
		}
	}

	return nil
}

// sweepMinute deletes the rows that have expired in one minute, and reports whether there were any.
func (o *Owner) sweepMinute(partition int, minute int64) (deleted bool, err error) {
	for all := false; !all; {
		var names []rows.Name
		// A part at a time, so that no commit grows with what expires in a minute.
		names, all, err = o.some(partition, expiryOf(minute))
		if err != nil || len(names) == 0 {
			return deleted, err
		}

		deleted = true
		err = o.doSweep(partition, &swept{expired: names})
		if err != nil {
			return true, err
		}
	}

	return deleted, nil
}

// doSweep has a turn carry out one part of a sweep.
func (o *Owner) doSweep(partition int, part *swept) error {
	// A sweep is not urgent, so it may wait for long behind the calls of clients.
	ctx, cancel := context.WithTimeout(o.ctx, time.Minute)
	defer cancel()

	_, err := o.Do(ctx, Call{Partition: partition, More: &More{sweep: part}})

	return err
}
