package exactpg

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	// The limit keeps the planner from reading all reservations of a counter.
	readReservations = `select u.key, r.id, r.amount, r.until, r.status, coalesce(r.ended, 'epoch')
		from unnest($1::text[], $2::text[]) u (key, id) join headcount_counters c on c.key = u.key,
			lateral (select * from headcount_reservations r
				where r.key = u.key and r.incarnation = c.incarnation and r.id = u.id limit 1) r
		where c.kind = 'exact' and (r.ended is null or r.ended > clock_timestamp() - $3::interval)`
	writeReservations = `insert into headcount_reservations (key, incarnation, id, amount, until, status, ended)
		select * from unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::timestamptz[], $6::text[],
			$7::timestamptz[])
		on conflict (key, incarnation, id) do update
			set amount = excluded.amount, until = excluded.until, status = excluded.status, ended = excluded.ended`
	readOpen = `select r.id, r.amount, r.until
		from headcount_counters c join headcount_reservations r on r.key = c.key and r.incarnation = c.incarnation
		where c.key = $1 and c.kind = 'exact' and r.status = 'open' and r.id > $2 order by r.id limit $3`
	// Reservations of a deleted counter are swept with its ledger.
	readDue = `select r.key, r.id, r.until
		from headcount_reservations r join headcount_counters c on r.key = c.key and r.incarnation = c.incarnation
		where r.status = 'open' and r.until <= now() order by r.until limit $1`
	forgetReservations = `delete from headcount_reservations where ctid = any(array(
		select ctid from headcount_reservations where ended <= now() - $1::interval limit $2))`
	dropReservations = `delete from headcount_reservations where ctid = any(array(
		select ctid from headcount_reservations where key = $1 and incarnation = $2 limit $3))`
	dropAllReservations = `delete from headcount_reservations r using unnest($1::text[], $2::bigint[]) u (key, incarnation)
		where r.key = u.key and r.incarnation = u.incarnation`
)

// held identifies a reservation.
type held struct{ key, id string }

// Reservation implements counter.Tx.
func (d *draft) Reservation(key, id string) counter.Reservation { return d.reservations[held{key, id}] }

// Keep implements counter.Tx.
func (d *draft) Keep(key string, r counter.Reservation) {
	of := held{key, r.ID}
	d.reservations[of] = r
	if !slices.Contains(d.kept, of) {
		d.kept = append(d.kept, of)
	}
}

// asks records that the transaction needs a reservation.
func (d *draft) asks(key, id string) {
	if d.reservations == nil {
		d.reservations = map[held]counter.Reservation{}
	}
	d.reservations[held{key, id}] = counter.Reservation{}
}

// dropReservations forgets the reservations of a deleted counter: if the counter is created again, it has none of them.
func (d *draft) dropReservations(key string) {
	for of := range d.reservations {
		if of.key == key {
			d.reservations[of] = counter.Reservation{}
		}
	}
	d.kept = slices.DeleteFunc(d.kept, func(of held) bool { return of.key == key })
}

// queueReservations queues the statement that reads the reservations which the operations name.
func (d *draft) queueReservations(b *pgx.Batch) {
	if len(d.reservations) == 0 {
		return
	}

	var keys, ids []string
	for of := range d.reservations {
		keys = append(keys, of.key)
		ids = append(ids, of.id)
	}
	b.Queue(readReservations, keys, ids, counter.EndedKept).Query(func(found pgx.Rows) error {
		var key, status string
		var r counter.Reservation
		var until, ended time.Time
		_, err := pgx.ForEachRow(found, []any{&key, &r.ID, &r.Amount, &until, &status, &ended}, func() error {
			r.Until = until.UnixMilli()
			r.Ended = ended.UnixMilli() // 0 while the reservation is open
			r.Status = counter.Status(slices.Index(counter.Statuses[:], status))
			d.reservations[held{key, r.ID}] = r
			return nil
		})
		return err
	})
}

// queueKept queues the statement that writes changed reservations.
func (d *draft) queueKept(b *pgx.Batch) {
	if len(d.kept) == 0 {
		return
	}

	var keys, ids, statuses []string
	var incarnations, amounts []int64
	var until []time.Time
	var ended []*time.Time
	for _, of := range d.kept {
		r := d.reservations[of]
		keys = append(keys, of.key)
		// Reservations belong to one life of the counter: a deletion ends them.
		incarnations = append(incarnations, int64(d.rows[of.key].Version.Incarnation))
		ids = append(ids, of.id)
		amounts = append(amounts, r.Amount)
		until = append(until, time.UnixMilli(r.Until))
		statuses = append(statuses, counter.Statuses[r.Status])

		// An open one has not ended, which is null.
		var at *time.Time
		if r.Status != counter.Open {
			is := time.UnixMilli(r.Ended)
			at = &is
		}
		ended = append(ended, at)
	}
	b.Queue(writeReservations, keys, incarnations, ids, amounts, until, statuses, ended)
}

// Reservations returns a page of open reservations as counter.Reserver does.
func (s *Store) Reservations(ctx context.Context, key, after string, limit int) (counter.Reservations, error) {
	var page counter.Reservations
	var until time.Time
	r := counter.Reservation{Status: counter.Open}
	each := func() {
		if len(page.Open) == limit {
			page.More = true
			return
		}
		r.Until = until.UnixMilli()
		page.Open = append(page.Open, r)
	}
	// One more than a page has shows whether there are more.
	err := s.query(ctx, "reservations", []any{&r.ID, &r.Amount, &until}, each, readOpen, key, after, limit+1)

	return page, err
}

// Due returns reservations that have expired, by the clock of the server, as counter.Reserver does.
func (s *Store) Due(ctx context.Context) (all []counter.Due, err error) {
	var one counter.Due
	var until time.Time
	each := func() {
		one.Until = until.UnixMilli()
		all = append(all, one)
	}
	err = s.query(ctx, "due", []any{&one.Key, &one.ID, &until}, each, readDue, counter.MaxReservations)

	return all, err
}

// sweepReservations deletes reservations that ended long enough ago.
func (s *Store) sweepReservations(ctx context.Context) error {
	return s.do(ctx, "sweep", func(ctx context.Context, c *pgxpool.Conn) error {
		for {
			// Each statement is a transaction of its own, and short.
			tag, err := c.Exec(ctx, forgetReservations, counter.EndedKept, sweepAtOnce)
			if err != nil || tag.RowsAffected() < sweepAtOnce {
				return err
			}
		}
	})
}
