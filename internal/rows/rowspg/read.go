package rowspg

import (
	"context"

	"headcount/internal/outage"
	"headcount/internal/rows"
)

const (
	readRows = `select g.at - 1, r.value
		from unnest($1::smallint[], $2::bytea[], $3::bytea[]) with ordinality g(partition, collection, field, at)
		join headcount_rows r using (partition, collection, field)`
	scanRows = `select field, value from headcount_rows
		where partition = $1 and collection = $2 and field > $3 order by field limit $4`
	readNumbers = `select partition, epoch, number from headcount_partitions`

	scanAtOnce = 1000
)

// Read implements rows.Store.
func (s *Store) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	var wanted rowColumns
	for _, at := range addresses {
		wanted.addName(at.Partition, at.Name)
	}

	// Rows that do not exist are not in the result, so each comes with its index.
	var at int
	var value []byte
	each := func() error {
		found[at].Value = value
		return nil
	}
	err := s.query(ctx, "read", []any{&at, &value}, each, readRows, wanted.partition, wanted.collection, wanted.field)
	if err != nil {
		return rows.Unread(len(addresses), err)
	}

	return found
}

// Scan implements rows.Store.
func (s *Store) Scan(ctx context.Context, at int, collection, after string, each func(string, []byte) error) error {
	part := func(after string) ([]rows.Row, error) { return s.scan(ctx, at, collection, after) }

	return rows.ScanInParts(after, scanAtOnce, part, each)
}

// scan returns the first rows of a collection whose fields are greater than after.
func (s *Store) scan(ctx context.Context, at int, collection, after string) (some []rows.Row, err error) {
	var field, value []byte
	each := func() error {
		name := rows.Name{Collection: collection, Field: string(field)}
		some = append(some, rows.Row{Name: name, Value: value})
		return nil
	}
	err = s.query(ctx, "scan", []any{&field, &value}, each, scanRows, at, []byte(collection), []byte(after), scanAtOnce)

	return some, err
}

// newest identifies the newest commit of a partition.
type newest struct{ epoch, number uint64 }

// publish passes on the publication of a commit, only once even if the commit was repeated.
func (s *Store) publish(c *rows.Commit) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// Most repetitions repeat a commit that was published. If the first answer was lost, the repetition is published
	// instead.
	before := s.newest[c.Partition]
	is := newest{epoch: c.Epoch, number: c.Number}
	if is == before {
		return
	}

	// A later commit of another caller was answered first. Publications must be in the order of commits, so this one
	// becomes a gap.
	overtaken := is.epoch < before.epoch || is.epoch == before.epoch && is.number < before.number
	if overtaken {
		s.watches.Missed()
		return
	}

	s.newest[c.Partition] = is
	s.watches.Publish(c)
}

// claimed records claims of this process.
func (s *Store) claimed(partitions []rows.Former, claims []rows.Claim) {
	s.mu.Lock()
	for i, claim := range claims {
		if claim.Epoch != 0 {
			s.mine[partitions[i].Partition] = claim.Epoch
		}
	}
	s.mu.Unlock()

	// Earlier commits of other processes were not published here.
	s.watches.Missed()
}

// Watch implements rows.Store. A committing caller calls received, which must not block. Commits of other processes are
// detected as gaps, within PollEvery.
func (s *Store) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) error {
	w := s.watches.Begin(received, missed)
	defer w.End()

	before := map[int]newest{}
	for outage.Sleep(ctx, s.cfg.PollEvery) {
		others, err := s.others(ctx)
		if err != nil {
			continue // wait until it can be read again: the whole outage is one gap
		}

		// Partitions that this process owns keep their entry in before: no other process commits there until it has
		// claimed the partition.
		gap := false
		for partition, is := range others {
			gap = gap || is != before[partition]
			before[partition] = is
		}
		if gap {
			w.Missed()
		}
	}

	return nil
}

// others returns the newest commits of the partitions that other processes own.
func (s *Store) others(ctx context.Context) (map[int]newest, error) {
	others := map[int]newest{}
	var partition int
	var is newest
	err := s.query(ctx, "numbers", []any{&partition, &is.epoch, &is.number}, func() error {
		others[partition] = is
		return nil
	}, readNumbers)

	// While the epoch of this process is the current one, only this process commits, and its commits are published
	// here.
	s.mu.Lock()
	defer s.mu.Unlock()

	for partition, epoch := range s.mine {
		if others[partition].epoch == epoch {
			delete(others, partition)
		}
	}

	return others, err
}
