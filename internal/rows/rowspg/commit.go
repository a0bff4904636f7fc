package rowspg

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/internal/postgres"
	"headcount/internal/rows"
)

const (
	// All transactions lock in the same order, so they may wait for each other, but cannot deadlock.
	lockPartitions = `select partition, owner, epoch, number, clock_timestamp() from headcount_partitions
		where partition = any($1) order by partition for update`
	readIDs = `select i.partition, i.id, i.until
		from unnest($1::smallint[], $2::uuid[]) g(partition, id) join headcount_row_ids i using (partition, id)`

	writeNumbers = `update headcount_partitions p set number = g.number
		from unnest($1::smallint[], $2::bigint[]) g(partition, number) where p.partition = g.partition`
	writeClaims = `update headcount_partitions p set owner = $3, epoch = g.epoch
		from unnest($1::smallint[], $2::bigint[]) g(partition, epoch) where p.partition = g.partition`
	writeIDs = `insert into headcount_row_ids (partition, id, until)
		select * from unnest($1::smallint[], $2::uuid[], $3::timestamptz[])
		on conflict (partition, id) do update set until = excluded.until`
	writeRows = `insert into headcount_rows (partition, collection, field, value, number)
		select * from unnest($1::smallint[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bigint[])
		on conflict (partition, collection, field) do update set value = excluded.value, number = excluded.number`
	deleteRows = `delete from headcount_rows r
		using unnest($1::smallint[], $2::bytea[], $3::bytea[]) g(partition, collection, field)
		where r.partition = g.partition and r.collection = g.collection and r.field = g.field`
	writeDeletions = `insert into headcount_row_deletions (partition, collection, field, number, at)
		select partition, collection, field, number, now()
		from unnest($1::smallint[], $2::bytea[], $3::bytea[], $4::bigint[]) g(partition, collection, field, number)
		on conflict (partition, collection, field) do update set number = excluded.number, at = excluded.at`
)

// transaction makes commits.
type transaction struct {
	commits []rows.Commit
	errs    []error        // of the refused commits
	made    []*rows.Commit // admitted commits that were not made before

	owned map[int]*rows.Ownership
	ids   map[idName]time.Time // the remembered IDs
	now   time.Time            // by the server's clock
}

type idName struct {
	partition int
	id        [16]byte
}

func newTransaction(commits []rows.Commit) *transaction {
	return &transaction{
		commits: commits,
		errs:    make([]error, len(commits)),
		owned:   map[int]*rows.Ownership{},
		ids:     map[idName]time.Time{},
	}
}

// Commit implements rows.Store.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	wanted := make([]int16, len(commits))
	for i := range commits {
		wanted[i] = int16(commits[i].Partition)
	}

	var t *transaction
	err := s.doLonger(ctx, rows.TimeFor(commits), "commit", func(ctx context.Context, c *pgxpool.Conn) error {
		// This may be a retry, so drop the results of the first attempt.
		t = newTransaction(commits)
		if err := t.hold(ctx, c, wanted); err != nil {
			return err
		}
		t.decide()

		return t.write(ctx, c, &s.cfg)
	})
	if err != nil {
		errs := make([]error, len(commits))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}

	// This includes commits that were made before: their answer may have been lost.
	for i := range commits {
		if t.errs[i] == nil {
			s.publish(&commits[i])
		}
	}

	return t.errs
}

// hold makes the first round trip: it begins the transaction, locks the partitions and reads which IDs of the commits
// are remembered.
func (t *transaction) hold(ctx context.Context, c *pgxpool.Conn, partitions []int16) error {
	b := &pgx.Batch{}
	t.queueHold(b, partitions)

	var ids idColumns
	for i := range t.commits {
		commit := &t.commits[i]
		ids.add(commit.Partition, commit.IDs)
		ids.add(commit.Partition, commit.Asked)
	}

	// A separate statement reads the IDs, so that it sees what was committed while the first one waited for the locks.
	if len(ids.id) > 0 {
		t.queueIDs(b, &ids)
	}
	if err := c.SendBatch(ctx, b).Close(); err != nil {
		return postgres.First(ctx, err)
	}

	// Without a row there is no lock, and two concurrent claims would both be granted.
	if len(t.owned) < len(partitions) {
		return errPartition
	}

	return nil
}

// queueHold queues the statements that begin a transaction and lock the partitions.
func (t *transaction) queueHold(b *pgx.Batch, partitions []int16) {
	b.Queue("begin isolation level read committed")

	var partition int
	var is rows.Ownership
	b.Queue(lockPartitions, partitions).Query(func(found pgx.Rows) error {
		_, err := pgx.ForEachRow(found, []any{&partition, &is.Owner, &is.Epoch, &is.Number, &t.now}, func() error {
			// The scan writes into is again for the next row.
			owned := is
			t.owned[partition] = &owned
			return nil
		})
		return err
	})
}

// queueIDs queues the statement that reads which IDs are remembered.
func (t *transaction) queueIDs(b *pgx.Batch, ids *idColumns) {
	var name idName
	var until time.Time
	b.Queue(readIDs, ids.partition, ids.id).Query(func(found pgx.Rows) error {
		_, err := pgx.ForEachRow(found, []any{&name.partition, &name.id, &until}, func() error {
			t.ids[name] = until
			return nil
		})
		return err
	})
}

// decide decides which commits are made.
func (t *transaction) decide() {
	for i := range t.commits {
		c := &t.commits[i]
		owned := t.owned[c.Partition]
		// The partition is locked, so the decision is valid until the end of the transaction.
		t.errs[i] = owned.Refuses(c)
		if t.errs[i] != nil || owned.Has(c) {
			continue
		}

		until := func(id rows.ID) time.Time { return t.ids[idName{c.Partition, id.Bytes}] }
		t.errs[i] = c.Remembered(until)
		if t.errs[i] == nil {
			t.made = append(t.made, c)
		}
	}
}

// write makes the second round trip: it writes the commits and ends the transaction.
func (t *transaction) write(ctx context.Context, c *pgxpool.Conn, cfg *Config) error {
	// If all commits are refused or repeated, nothing changes, and no fsync is needed.
	b := &pgx.Batch{}
	if len(t.made) == 0 {
		b.Queue("rollback")
		return c.SendBatch(ctx, b).Close()
	}

	t.queueWrites(b, cfg.DurableTier)
	if cfg.Readable != nil {
		queue := func(sql string, args ...any) { b.Queue(sql, args...) }
		for _, one := range t.made {
			part := *one
			for some := range slices.Chunk(one.Rows, writtenAtOnce) {
				part.Rows = some
				cfg.Readable(&part, queue)
			}
		}
	}
	b.Queue("commit")

	// After a failed statement the rest of the batch is skipped, including the commit.
	return c.SendBatch(ctx, b).Close()
}

// queueWrites queues the writes of the commits, one statement for each table instead of one for each commit, or several
// if there are many rows. With deletions, it also records the deleted rows.
func (t *transaction) queueWrites(b *pgx.Batch, deletions bool) {
	var numbers numberColumns
	var ids idColumns
	var put, gone rowColumns
	for _, one := range t.made {
		numbers.add(one.Partition, one.Number)
		ids.add(one.Partition, one.IDs)
		for i := range one.Rows {
			row := &one.Rows[i]
			if row.Value == nil {
				gone.add(one, row)
			} else {
				put.add(one, row)
			}
		}
	}

	b.Queue(writeNumbers, numbers.partition, numbers.number)
	for first := 0; first < len(ids.id); first += writtenAtOnce {
		some := ids.from(first)
		b.Queue(writeIDs, some.partition, some.id, some.until)
	}
	for first := 0; first < len(put.value); first += writtenAtOnce {
		some := put.from(first)
		b.Queue(writeRows, some.partition, some.collection, some.field, some.value, some.number)
	}
	for first := 0; first < len(gone.value); first += writtenAtOnce {
		some := gone.from(first)
		b.Queue(deleteRows, some.partition, some.collection, some.field)
		if deletions {
			b.Queue(writeDeletions, some.partition, some.collection, some.field, some.number)
		}
	}
}

// writtenAtOnce is the maximum number of rows of one statement, so that each ends before its timeout.
const writtenAtOnce = 10_000

// Claim implements rows.Store.
func (s *Store) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	wanted := make([]int16, len(partitions))
	for i, former := range partitions {
		wanted[i] = int16(former.Partition)
	}

	claims := make([]rows.Claim, len(partitions))
	err := s.do(ctx, "claim", func(ctx context.Context, c *pgxpool.Conn) error {
		t := newTransaction(nil)
		if err := t.hold(ctx, c, wanted); err != nil {
			return err
		}

		// Use the server's clock, because those of the processes differ.
		var granted numberColumns
		for i, former := range partitions {
			claims[i] = t.owned[former.Partition].Claim(owner, former.Epoch, t.now)
			if claims[i].Epoch != 0 {
				granted.add(former.Partition, claims[i].Epoch)
			}
		}

		b := &pgx.Batch{}
		b.Queue(writeClaims, granted.partition, granted.number, owner)
		b.Queue("commit")
		return c.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return nil, err
	}
	s.claimed(partitions, claims)

	return claims, nil
}

// Columns that are sent as arrays.
type (
	numberColumns struct {
		partition []int16
		number    []int64
	}
	idColumns struct {
		partition []int16
		id        [][16]byte
		until     []time.Time
	}
	rowColumns struct {
		partition                []int16
		collection, field, value [][]byte
		number                   []int64 // of the commit
	}
)

func (c *numberColumns) add(partition int, number uint64) {
	c.partition = append(c.partition, int16(partition))
	c.number = append(c.number, int64(number))
}

func (c *idColumns) add(partition int, ids []rows.ID) {
	for _, id := range ids {
		c.partition = append(c.partition, int16(partition))
		c.id = append(c.id, id.Bytes)
		c.until = append(c.until, id.Until)
	}
}

// from returns the elements of one statement, beginning with first.
func (c *idColumns) from(first int) idColumns {
	end := min(first+writtenAtOnce, len(c.id))

	return idColumns{partition: c.partition[first:end], id: c.id[first:end], until: c.until[first:end]}
}

func (c *rowColumns) add(of *rows.Commit, row *rows.Row) {
	c.addName(of.Partition, row.Name)
	c.value = append(c.value, row.Value)
	c.number = append(c.number, int64(of.Number))
}

// from returns the elements of one statement, beginning with first.
func (c *rowColumns) from(first int) rowColumns {
	end := min(first+writtenAtOnce, len(c.value))

	return rowColumns{
		partition: c.partition[first:end], collection: c.collection[first:end], field: c.field[first:end],
		value: c.value[first:end], number: c.number[first:end],
	}
}

func (c *rowColumns) addName(partition int, name rows.Name) {
	c.partition = append(c.partition, int16(partition))
	c.collection = append(c.collection, []byte(name.Collection))
	c.field = append(c.field, []byte(name.Field))
}
