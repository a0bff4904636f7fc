package rowspg

import (
	"context"

	"headcount/internal/rows"
)

const (
	// A part of a table: the changed rows among the next 1,000, and the last one of these, where the next part begins.
	// The limit is no argument, because without knowing it PostgreSQL might sort all rows of the partition.
	changedRows = `select collection, field, value, number > $2, at = 1000 from (
			select collection, field, value, number, row_number() over (order by collection, field) as at
			from headcount_rows where partition = $1 and (collection, field) > ($3, $4)
			order by collection, field limit 1000) part
		where number > $2 or at = 1000 order by collection, field`
	deletedRows = `select collection, field, null::bytea, number > $2, at = 1000 from (
			select collection, field, number, row_number() over (order by collection, field) as at
			from headcount_row_deletions where partition = $1 and (collection, field) > ($3, $4)
			order by collection, field limit 1000) part
		where number > $2 or at = 1000 order by collection, field`
	rememberedIDs = `select id, until from headcount_row_ids
		where partition = $1 and id = any($2::uuid[]) and until > now()`
)

// changedTables are in the order of the walk: a row that was written again after its deletion is in both tables, and
// its value has to come second.
var changedTables = []string{deletedRows, changedRows}

// Changed examines the rows of a partition that follow a place, as many as take a moment. It returns those that commits
// whose numbers are greater than after have changed, and the next place. A nil value means that the row was deleted,
// unless a later row of the walk has the same name. Changed needs [Config.DurableTier].
func (s *Store) Changed(
	ctx context.Context, partition int, after uint64, from rows.Place,
) (some []rows.Row, next rows.Place, err error) {
	if from.End {
		return nil, from, nil
	}

	// A part without its last row is the end of the table.
	next = rows.Place{Table: from.Table + 1, End: from.Table+1 == len(changedTables)}
	var collection, field, value []byte
	var isChanged, isLast bool
	each := func() error {
		name := rows.Name{Collection: string(collection), Field: string(field)}
		if isChanged {
			some = append(some, rows.Row{Name: name, Value: value})
		}
		if isLast {
			next = rows.Place{Table: from.Table, Last: name}
		}

		return nil
	}
	err = s.query(ctx, "changed", []any{&collection, &field, &value, &isChanged, &isLast}, each,
		changedTables[from.Table], partition, int64(after), []byte(from.Last.Collection), []byte(from.Last.Field))

	return some, next, err
}

// Remembered returns the ids that are still remembered, with their expiry times.
func (s *Store) Remembered(ctx context.Context, partition int, ids []rows.ID) (known []rows.ID, err error) {
	wanted := make([][16]byte, len(ids))
	for i := range ids {
		wanted[i] = ids[i].Bytes
	}

	var id rows.ID
	each := func() error {
		known = append(known, id)
		return nil
	}
	err = s.query(ctx, "remembered", []any{&id.Bytes, &id.Until}, each, rememberedIDs, partition, wanted)

	return known, err
}
