package owner

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// The reservations of a counter are in two collections: the open ones, which are few, and those that ended within the
// last day. In addition, each open reservation has a row in the collection of the second in which it expires, and the
// collection due lists these seconds. So finding the due reservations takes few reads, however many reservations there
// are.
const (
	due   = "due"  // fields: the seconds in which reservations expire or expired
	dueAt = "due:" // followed by a second; fields: keys and IDs
	ended = "ended:"
)

func openCollection(h *head) string {
	return "open:" + strconv.FormatUint(h.life, 36) + ":" + h.key
}

func endedCollection(h *head) string {
	return ended + strconv.FormatUint(h.life, 36) + ":" + h.key
}

// markOf returns the field in due that marks a second in which reservations expire. Fields sort like the seconds.
func markOf(second int64) rows.Name {
	return rows.Name{Collection: due, Field: fmt.Sprintf("%016x", second)}
}

func dueName(key, id string, until int64) rows.Name {
	return rows.Name{Collection: dueAt + strconv.FormatInt(until/1000, 10), Field: key + "\x00" + id}
}

// Reservation implements counter.Tx.
func (d *draft) Reservation(key, id string) counter.Reservation {
	h := d.head(key)
	if h.parts&hasReservations == 0 {
		return counter.Reservation{}
	}

	row := d.get(rows.Name{Collection: openCollection(h), Field: id})
	// An ID may be used again a day after its reservation ended, while a late sweep has left the old row.
	if row == nil {
		row = d.get(rows.Name{Collection: endedCollection(h), Field: id})
	}
	r, err := decodeReservation(id, row)
	if err != nil {
		d.malformed = err
	}

	// Sweeps may delete the row late, so its age is checked here.
	isForgotten := r.Ended != 0 && !forgottenAt(r).After(d.now)
	if isForgotten {
		return counter.Reservation{}
	}

	return r
}

func forgottenAt(r counter.Reservation) time.Time {
	return time.UnixMilli(r.Ended).Add(counter.EndedKept)
}

// Keep implements counter.Tx.
func (d *draft) Keep(key string, r counter.Reservation) {
	h := d.head(key)
	h.parts |= hasReservations
	open := rows.Name{Collection: openCollection(h), Field: r.ID}
	expires := dueName(key, r.ID, r.Until)
	if r.Status == counter.Open {
		d.put(open, encodeReservation(r))
		d.put(expires, binary.AppendVarint(nil, r.Until))
		d.markDue(r.Until)
		return
	}

	// The mark of its second stays, because other reservations may expire then as well.
	d.put(open, nil)
	d.put(expires, nil)
	has := rows.Name{Collection: endedCollection(h), Field: r.ID}
	d.put(has, encodeReservation(r))
	d.expire(has, forgottenAt(r))
}

// markDue marks the second in which a reservation expires.
func (d *draft) markDue(until int64) {
	mark := markOf(until / 1000)
	if d.get(mark) == nil {
		d.put(mark, []byte{1})
	}
}

// discardDue deletes the marks of a due reservation that is not open any more, because its counter was deleted.
func (d *draft) discardDue(c *counter.Change) {
	r := d.Reservation(c.Key, c.Hold.ID)
	// The ID may have been used again for a reservation with another end, which has marks of its own.
	isOpen := r.Status == counter.Open && r.Until == c.Hold.Until
	if !isOpen {
		d.put(dueName(c.Key, c.Hold.ID, c.Hold.Until), nil)
	}
}

// restoreReservations writes open reservations. One that has expired already expires now instead, because Dues may not
// look that far back.
func (d *draft) restoreReservations(h *head, all []counter.Reservation) {
	for _, r := range all {
		r.Until = max(r.Until, d.now.UnixMilli())
		d.Keep(h.key, r)
	}
}

func encodeReservation(r counter.Reservation) []byte {
	return appendReservation(make([]byte, 0, 24), r)
}

func appendReservation(b []byte, r counter.Reservation) []byte {
	b = append(b, byte(r.Status))
	b = binary.AppendVarint(b, r.Amount)
	b = binary.AppendVarint(b, r.Until)

	return binary.AppendVarint(b, r.Ended)
}

// reservation reads a reservation.
func (r *reader) reservation(id string) counter.Reservation {
	is := counter.Reservation{ID: id, Status: counter.Status(r.byte())}
	is.Amount = r.int()
	is.Until = r.int()
	is.Ended = r.int()

	return is
}

// decodeReservation returns the reservation in a row, the zero one if there is no row.
func decodeReservation(id string, row []byte) (counter.Reservation, error) {
	if len(row) == 0 {
		return counter.Reservation{}, nil
	}

	r := reader{rest: row}
	is := r.reservation(id)

	return is, r.end("a reservation")
}

// Reservations implements counter.Reserver.
func (r *Reader) Reservations(ctx context.Context, key, after string, limit int) (counter.Reservations, error) {
	h, err := r.head(ctx, key)
	if err != nil {
		return counter.Reservations{}, err
	}

	return r.reservations(ctx, &h, after, limit)
}

func (r *Reader) reservations(ctx context.Context, h *found, after string, limit int) (counter.Reservations, error) {
	var page counter.Reservations
	if h.parts&hasReservations == 0 {
		return page, nil
	}

	err := r.store.Scan(ctx, h.partition, openCollection(&h.head), after, func(id string, row []byte) error {
		if len(page.Open) == limit {
			page.More = true
			return errEnough
		}

		one, err := decodeReservation(id, row)
		page.Open = append(page.Open, one)
		return err
	})
	if err != nil && !errors.Is(err, errEnough) {
		return counter.Reservations{}, unavailable("reservations", err)
	}

	return page, nil
}

// Dues finds the reservations of exact counters that have expired. Only one goroutine may use it.
type Dues struct {
	store rows.Store
	// from is the first second that may have due reservations. The clocks of a cluster differ by less than dueMargin,
	// so no new reservation expires in an earlier second.
	from  int64
	known bool // from is known
}

// dueMargin bounds the difference between two clocks of the cluster, in seconds.
const dueMargin = 32

// NewDues returns the Dues of a store.
func NewDues(store rows.Store) *Dues { return &Dues{store: store} }

// Next returns reservations that are due, and the marks of seconds without any, which can be deleted.
func (d *Dues) Next(ctx context.Context) (all []counter.Due, done []Expiring, err error) {
	now := time.Now()
	// Owners with slower clocks may still add reservations to the seconds since then.
	past := now.Unix() - dueMargin
	// After the clock has gone back, from would be in the future, and until then nothing would be due.
	if !d.known || d.from > past {
		if err := d.begin(ctx, now); err != nil {
			return nil, nil, err
		}
	}

	for first := d.from; first <= now.Unix(); first += dueSeconds {
		marked, err := d.marked(ctx, first, min(now.Unix(), first+dueSeconds-1))
		if err != nil {
			return nil, nil, err
		}

		for _, second := range marked {
			before := len(all)
			all, err = d.due(ctx, second, now, all)
			if err != nil {
				return nil, nil, err
			}

			isDone := second < past && len(all) == before
			if isDone {
				done = append(done, Expiring{Row: rows.Row{Name: markOf(second)}})
			}
			// The page is full. d.from stays, so the next call begins with what is left of this second.
			if len(all) == counter.MaxReservations || len(done) == counter.MaxReservations {
				return all, done, nil
			}
		}

		// An empty second that has passed can be skipped from now on: no reservation can be added to it.
		if len(all) == 0 {
			d.from = max(d.from, min(past, first+dueSeconds))
		}
	}

	return all, done, nil
}

// begin finds the first marked second, which may be long ago if no process has looked for a while.
func (d *Dues) begin(ctx context.Context, now time.Time) error {
	fields, _, err := firstFields(ctx, d.store, ExactPartition, due, "", 1)
	if err != nil {
		return unavailable("due", err)
	}

	d.from = now.Unix() - dueMargin
	for _, field := range fields {
		first, err := strconv.ParseInt(field, 16, 64)
		if err != nil {
			return unavailable("due", rows.ErrMalformed)
		}
		d.from = min(d.from, first)
	}
	d.known = true

	return nil
}

// dueSeconds is how many seconds one read looks at.
const dueSeconds = 4096

// marked returns the seconds from first to last in which reservations expire.
func (d *Dues) marked(ctx context.Context, first, last int64) (seconds []int64, err error) {
	var addresses []rows.Address
	for second := first; second <= last; second++ {
		addresses = append(addresses, rows.Address{Partition: ExactPartition, Name: markOf(second)})
	}

	for i, found := range d.store.Read(ctx, addresses) {
		if found.Err != nil {
			return nil, unavailable("due", found.Err)
		}
		if found.Value != nil {
			seconds = append(seconds, first+int64(i))
		}
	}

	return seconds, nil
}

// due appends the reservations that expire in one second and not later than now.
func (d *Dues) due(ctx context.Context, second int64, now time.Time, all []counter.Due) ([]counter.Due, error) {
	collection := dueAt + strconv.FormatInt(second, 10)
	err := d.store.Scan(ctx, ExactPartition, collection, "", func(field string, row []byte) error {
		r := reader{rest: row}
		key, id, _ := strings.Cut(field, "\x00")
		one := counter.Due{Key: key, ID: id, Until: r.int()}
		// Some reservations of the running second expire later in it.
		if one.Until <= now.UnixMilli() {
			all = append(all, one)
		}
		if len(all) == counter.MaxReservations {
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, unavailable("due", err)
	}

	return all, nil
}
