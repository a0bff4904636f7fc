package exactpg

import (
	"context"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/internal/rows"
	"headcount/presence"
)

const (
	readCounters = `select ` + columns + ` from headcount_counters c where c.key = any($1::text[]) and c.kind = 'exact'`
	readEntries  = `select l.seq, l.at, l.op, l.delta, l.before, l.after, l.reason, l.author
		from headcount_counters c join headcount_ledger l on l.key = c.key and l.incarnation = c.incarnation
		where c.key = $1 and c.kind = 'exact' and l.seq > $2 order by l.seq limit $3`
	// All keys with a prefix are a range of the key's index: no key is longer than MaxKeyLength, and no character is
	// greater than the one repeated.
	// The values are summed in halves, because the sum may exceed 64 bits.
	readSum = `select count(*), coalesce(sum(value >> 32), 0)::bigint, coalesce(sum(value & 4294967295), 0)::bigint
		from headcount_counters where key >= $1 and key <= $2 and kind = 'exact'`
)

var afterAll = strings.Repeat("\U0010FFFF", counter.MaxKeyLength)

// Read returns the counters of distinct keys, in order, as counter.Reader does. It never returns lagging values.
func (s *Store) Read(ctx context.Context, keys []string) ([]counter.Counter, error) {
	states, err := s.States(ctx, keys)
	if err != nil {
		return nil, err
	}

	out := make([]counter.Counter, len(keys))
	for i, key := range keys {
		out[i].Key = key
		if is, ok := states[key]; ok {
			out[i] = is.Counter(key)
		}
	}

	return out, nil
}

// States returns the exact counters among keys.
func (s *Store) States(ctx context.Context, keys []string) (map[string]counter.State, error) {
	states := make(map[string]counter.State, len(keys))
	var r scanned
	err := s.query(ctx, "read", r.to(), func() { states[r.key] = r.record().State }, readCounters, keys)

	return states, err
}

// Ledger returns a page of a ledger as counter.Reader does.
func (s *Store) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	var page counter.Ledger
	var e scannedEntry
	// The number comes from a client, and may exceed a bigint.
	from := int64(min(after, math.MaxInt64))
	each := func() {
		if len(page.Entries) == limit {
			page.More = true
			return
		}
		page.Entries = append(page.Entries, e.entry())
	}
	// One entry more than asked for shows that there is another page.
	err := s.query(ctx, "ledger", e.to(), each, readEntries, key, from, limit+1)
	if err != nil {
		return counter.Ledger{}, err
	}

	return page, nil
}

// scannedEntry is a row of headcount_ledger as a query returns it.
type scannedEntry struct {
	seq, delta, before, after int64
	at                        time.Time
	op, reason, author        string
}

func (e *scannedEntry) to(more ...any) []any {
	return append([]any{&e.seq, &e.at, &e.op, &e.delta, &e.before, &e.after, &e.reason, &e.author}, more...)
}

func (e *scannedEntry) entry() counter.Entry {
	return counter.Entry{
		Seq:    uint64(e.seq),
		At:     e.at.UTC(),
		Op:     counter.ParseLedgerOp(e.op),
		Delta:  e.delta,
		Before: e.before,
		After:  e.after,
		Reason: e.reason,
		By:     e.author,
	}
}

// AddTo adds the counters of one site whose names begin with prefix, as of one moment, to total. It returns their
// number.
func (s *Store) AddTo(ctx context.Context, total *counter.Total, prefix string) (n int64, err error) {
	var upper, lower int64
	err = s.do(ctx, "aggregate", func(ctx context.Context, c *pgxpool.Conn) error {
		row := c.QueryRow(ctx, readSum, presence.FirstWith(prefix), prefix+afterAll)
		return row.Scan(&n, &upper, &lower)
	})
	if err != nil {
		return 0, err
	}
	total.AddSum(n, upper, lower)

	return n, nil
}

const (
	dumpPage  = 500    // counters read at once
	entryPage = 10_000 // entries of a ledger read at once

	// One statement, so that reservations match the state of their counter.
	dumpCounters = `select ` + columns + `, case when c.open > 0 then (
			select json_agg(json_build_object('ID', r.id, 'Amount', r.amount, 'Status', $3::int,
				'Until', (extract(epoch from r.until) * 1000)::bigint) order by r.id)
			from headcount_reservations r
			where r.key = c.key and r.incarnation = c.incarnation and r.status = 'open') end
		from headcount_counters c where c.key > $1 and c.kind = 'exact' order by c.key limit $2`
	dumpEntries = `select seq, at, op, delta, before, after, reason, author from headcount_ledger
		where key = $1 and incarnation = $2 and seq > $3 and seq <= $4 order by seq limit $5`
)

// Dump calls each with every counter whose key is greater than after, as counter.Dumper does.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	for {
		copies, err := s.dumpSome(ctx, after)
		if err != nil || len(copies) == 0 {
			return err
		}

		for i := range copies {
			is := &copies[i]
			after = is.Key
			// A ledger may be long, so each is read on its own.
			is.Ledger, err = s.dumpLedger(ctx, is)
			if err != nil {
				return err
			}
			if err := each(*is); err != nil {
				return err
			}
		}
	}
}

// dumpSome returns the next counters after a key, without their ledgers.
func (s *Store) dumpSome(ctx context.Context, after string) (copies []counter.Copy, err error) {
	var r scanned
	var open []counter.Reservation
	each := func() {
		copies = append(copies, counter.Copy{Key: r.key, State: r.record().State, Reservations: open})
		open = nil // a new slice for the next counter
	}
	err = s.query(ctx, "dump", r.to(&open), each, dumpCounters, after, dumpPage, int(counter.Open))

	return copies, err
}

// dumpLedger returns the entries that a counter had when it was read.
func (s *Store) dumpLedger(ctx context.Context, of *counter.Copy) (entries []counter.Entry, err error) {
	var e scannedEntry
	after := int64(0)
	for n := entryPage; n == entryPage && err == nil; {
		n = 0
		each := func() {
			entries = append(entries, e.entry())
			after = e.seq
			n++
		}
		// Entries that were added since the counter was read are left out.
		err = s.query(ctx, "dump", e.to(), each, dumpEntries,
			of.Key, int64(of.Version.Incarnation), after, int64(of.Entries), entryPage)
	}

	return entries, err
}

// Deleted returns the highest incarnation of all exact counters that were ever deleted.
func (s *Store) Deleted(ctx context.Context) (uint64, error) {
	var deleted int64
	err := s.query(ctx, "dump", []any{&deleted}, func() {}, `select deleted from headcount_meta`)

	return uint64(deleted), err
}

// dropLedgers deletes the ledgers that copies replace.
const dropLedgers = `delete from headcount_ledger l using unnest($1::text[], $2::bigint[]) u (key, incarnation)
	where l.key = u.key and l.incarnation = u.incarnation`

// Restore puts exact counters into the store as counter.Restorer does: one transaction.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	n := 0
	for i := range copies {
		n += 1 + len(copies[i].Ledger) + len(copies[i].Reservations)
	}
	err = s.doLonger(ctx, rows.TimeForRows(n), "restore", func(ctx context.Context, c *pgxpool.Conn) error {
		restored, err = restore(ctx, c, copies, rules)
		return err
	})

	return restored, err
}

func restore(
	ctx context.Context, c *pgxpool.Conn, copies []counter.Copy, rules *counter.Rules,
) (restored int, err error) {
	d := newDraft(nil)
	for i := range copies {
		key := copies[i].Key
		d.rows[key] = &row{}
		d.keys = append(d.keys, key)
	}
	if err := d.read(ctx, c); err != nil {
		return 0, err
	}

	var replaced sweepColumns
	for i := range copies {
		is := copies[i]
		if !is.Replaces(&d.rows[is.Key].State, uint64(d.deleted)) {
			continue
		}

		restored++
		d.restore(&is, rules)
		// The counter that is replaced may have the same incarnation, and so a ledger and reservations of the same
		// name.
		replaced.add(ledger{is.Key, is.Version.Incarnation}, sweep{})
	}

	b := &pgx.Batch{}
	b.Queue(dropLedgers, replaced.key, replaced.incarnation)
	b.Queue(dropAllReservations, replaced.key, replaced.incarnation)
	d.queueWrites(b)
	b.Queue("commit")

	return restored, c.SendBatch(ctx, b).Close()
}

// restore replaces a counter by a copy.
func (d *draft) restore(is *counter.Copy, rules *counter.Rules) {
	r := d.rows[is.Key]
	// The ledger of the counter that is replaced belongs to no counter any more.
	if r.Kind != 0 {
		d.sweep(is.Key, r.Version, sweep{due: d.now})
	}

	kept, _ := is.Kept(rules)
	r.State = is.State
	r.kept = kept.Milliseconds()
	r.entries = is.Ledger
	r.restored = true
	for _, one := range is.Reservations {
		// Keep replaces only what was asked for.
		d.asks(is.Key, one.ID)
		d.Keep(is.Key, one)
	}
	if is.Entries > 0 && kept > 0 {
		// Even if all entries have expired: only the first entry of a new ledger schedules a sweep.
		oldest := d.now
		if len(is.Ledger) > 0 {
			oldest = is.Ledger[0].At
		}
		d.sweep(is.Key, r.Version, sweep{due: oldest.Add(kept), kept: r.kept})
	}
}

// RestoreDeleted records that counters with incarnations up to deleted have been deleted.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	return s.do(ctx, "restore", func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, writeDeleted, int64(deleted))
		return err
	})
}
