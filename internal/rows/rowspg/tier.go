package rowspg

import (
	"context"

	"headcount/internal/rows"
)

const (
	changedRows = `select collection, field, value from headcount_rows
		where partition = $1 and number > $2 and (collection, field) > ($3, $4) order by collection, field limit $5`
	deletedRows = `select collection, field, null::bytea from headcount_row_deletions
		where partition = $1 and number > $2 and (collection, field) > ($3, $4) order by collection, field limit $5`
	rememberedIDs = `select id, until from headcount_row_ids
		where partition = $1 and id = any($2::uuid[]) and until > now()`
)

// Changed calls each with every row that was changed by a commit whose number is greater than after. A nil value means
// that the row was deleted, unless a later call has a value for the same row. Changed needs [Config.DurableTier].
func (s *Store) Changed(
	ctx context.Context, partition int, after uint64, each func(name rows.Name, value []byte) error,
) error {
	// A row that was written again after its deletion is in both results, so the changed rows come second.
	for _, sql := range []string{deletedRows, changedRows} {
		if err := s.changed(ctx, sql, partition, after, each); err != nil {
			return err
		}
	}

	return nil
}

// changed calls each with the rows of a statement, which returns a limited number at a time.
func (s *Store) changed(
	ctx context.Context, sql string, partition int, after uint64, each func(name rows.Name, value []byte) error,
) error {
	var last rows.Name
	for {
		var some []rows.Row
		var collection, field, value []byte
		gather := func() error {
			name := rows.Name{Collection: string(collection), Field: string(field)}
			some = append(some, rows.Row{Name: name, Value: value})
			return nil
		}
		err := s.query(ctx, "changed", []any{&collection, &field, &value}, gather, sql,
			partition, int64(after), []byte(last.Collection), []byte(last.Field), scanAtOnce)
		if err != nil {
			return err
		}

		// After the query, whose connection is free again by then, because each may be slow.
		for i := range some {
			last = some[i].Name
			if err := each(last, some[i].Value); err != nil {
				return err
			}
		}
		if len(some) < scanAtOnce {
			return nil
		}
	}
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
