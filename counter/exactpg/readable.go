package exactpg

import (
	"slices"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

const (
	copyCounters = `insert into headcount_counters as c (key, kind, value, updated_at, incarnation, sequence, entries)
		select * from unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[],
			$5::bigint[], $6::bigint[], $7::bigint[])
		on conflict (key) do update set kind = excluded.kind, value = excluded.value, updated_at = excluded.updated_at,
			incarnation = excluded.incarnation, sequence = excluded.sequence, entries = excluded.entries
			where c.kind <> 'exact'`
	dropCopies  = `delete from headcount_counters where key = any($1::text[]) and kind <> 'exact'`
	copyEntries = insertEntries + ` on conflict do nothing`
	// A counter that was moved here from an owner kept its ledger, so the entries of exact counters are not deleted.
	dropEntries = `delete from headcount_ledger l using unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[])
			u (key, incarnation, first, last)
		where l.key = u.key and l.incarnation = u.incarnation and l.seq between u.first and u.last
			and not exists (select from headcount_counters c
				where c.key = l.key and c.incarnation = l.incarnation and c.kind = 'exact')`
)

// Readable copies the counters of owners, and their ledgers, to the tables of this package, so that people can query
// all counters in one place. It is a rowspg.Readable.
func Readable(c *rows.Commit, queue func(sql string, args ...any)) {
	var put copyColumns
	var gone []string
	var entries entryColumns
	var ended endColumns
	for i := range c.Rows {
		is, ok, err := owner.OutlineOf(&c.Rows[i])
		switch {
		case err != nil, !ok: // the owner reports the error when it reads the row
		case is.State == nil:
			entries.addAll(&is)
			ended.add(&is)
		case is.State.Version == (counter.Version{}):
			gone = append(gone, is.Key)
		default:
			put.add(is.Key, is.State)
		}
	}

	if len(put.key) > 0 {
		queue(copyCounters, put.key, put.kind, put.value, put.updated, put.incarnation, put.sequence, put.entries)
	}
	if len(gone) > 0 {
		// Locks are taken in the order of keys, as everywhere.
		slices.Sort(gone)
		queue(dropCopies, gone)
	}
	if len(entries.key) > 0 {
		queue(copyEntries, entries.args()...)
	}
	if len(ended.key) > 0 {
		queue(dropEntries, ended.key, ended.incarnation, ended.first, ended.last)
	}
}

type (
	copyColumns struct {
		rowColumns
		kind []string
	}
	endColumns struct {
		key                      []string
		incarnation, first, last []int64
	}
)

func (c *copyColumns) add(key string, is *counter.State) {
	c.rowColumns.add(key, &record{State: *is})
	c.kind = append(c.kind, is.Kind.String())
}

func (c *entryColumns) addAll(is *owner.Outline) {
	for i := range is.Entries {
		c.add(is.Key, counter.Version{Incarnation: is.Life}, &is.Entries[i])
	}
	c.addTimes(is.Entries)
}

// add adds a range of entries to delete.
func (c *endColumns) add(is *owner.Outline) {
	if len(is.Entries) > 0 {
		return
	}

	c.key = append(c.key, is.Key)
	c.incarnation = append(c.incarnation, int64(is.Life))
	c.first = append(c.first, int64(is.First))
	c.last = append(c.last, int64(is.Last))
}
