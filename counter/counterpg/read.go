package counterpg

import (
	"context"
	"fmt"
	"math"
	"math/big"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/presence"
)

const (
	// recordColumns are those that records scans.
	recordColumns = `c.key, c.kind, c.value, c.updated, c.incarnation, c.sequence, c.entries, c.set_id, c.ledger_id, c.kept, c.history_id, c.slots`
	readCounters  = `select ` + recordColumns + `, exists (select from headcount_members m where m.set_id = c.set_id and m.member = any($2::text[]))
		from headcount_counters c where c.key = any($1::text[])`
	readEntries = `select l.seq, l.at, l.delta, l.before, l.op, l.reason, l.author
		from headcount_counters c join headcount_ledger l on l.ledger_id = c.ledger_id
		where c.key = $1 and c.ledger_id <> 0 and l.seq > $2 order by l.seq limit $3`
	// One statement is of one moment: what was counted is up to the version of the row.
	readDimension = `select c.kind, c.value, c.updated, c.incarnation, c.sequence, coalesce(d.value, ''), coalesce(d.count, 0) from headcount_counters c
		left join headcount_dimensions d on d.history_id = c.history_id and c.history_id <> 0 and d.name = $2 where c.key = $1`
	// A range of the key's index is all keys with a prefix: no key is longer than
	// MaxKeyLength, and no character is greater than the one repeated.
	readSum = `select count(*), count(*) filter (where kind = 4), coalesce(sum(value) filter (where kind <> 4), 0)::text
		from headcount_counters where key >= $1 and key <= $2 and not key = any(coalesce($3::text[], '{}'))`
	readSize   = `select count(*) from headcount_counters where key >= $1 and key <= $2`
	readUnions = `select r.registers from headcount_counters c join headcount_registers r on r.set_id = c.set_id
		where c.key >= $1 and c.key <= $2 and c.kind = 4`
	// An aggregate is the one statement that may be better off reading all.
	allowScan = `select set_config('enable_seqscan', 'on', true), set_config('plan_cache_mode', 'force_custom_plan', true)`
)

var afterAll = strings.Repeat("\U0010FFFF", counter.MaxKeyLength)

// Read is as counter.Reader says. No answer lags or is stale.
func (s *Store) Read(ctx context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	out := make([]counter.Reading, len(keys))
	for i, key := range keys {
		out[i].Key = key
	}
	err := s.read(ctx, keys, member, func(key string, r *record, mine bool) {
		for i := range keys {
			if keys[i] == key {
				out[i] = counter.Reading{Counter: r.Counter(key), Mine: mine}
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("counterpg: read: %w", err)
	}
	return out, nil
}

// read calls each for the counters of keys that exist.
func (s *Store) read(ctx context.Context, keys []string, member string, each func(key string, r *record, mine bool)) error {
	var either []string // what may stand for the member
	if member != "" {
		either = []string{member, counter.Nameless(counter.MemberHash(member))}
	}
	return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		var mine bool
		rows, _ := c.Query(ctx, readCounters, keys, either) // records returns the error
		return records(rows, func(key string, r *record) { each(key, r, mine) }, &mine)
	})
}

// Ledger is as counter.Reader says.
func (s *Store) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	var page counter.Ledger
	from := int64(min(after, math.MaxInt64))
	var e entryRow
	err := s.query(ctx, e.columns(), func() error {
		if len(page.Entries) == limit {
			page.More = true
			return nil
		}
		page.Entries = append(page.Entries, e.entry())
		return nil
	}, readEntries, key, from, limit+1)
	if err != nil {
		return counter.Ledger{}, fmt.Errorf("counterpg: ledger of %q: %w", key, err)
	}
	return page, nil
}

// entryRow is a row of headcount_ledger without the ledger.
type entryRow struct {
	seq, at, delta, before int64
	op                     int16
	reason, by             string
}

func (e *entryRow) columns() []any {
	return []any{&e.seq, &e.at, &e.delta, &e.before, &e.op, &e.reason, &e.by}
}

func (e *entryRow) entry() counter.Entry {
	return counter.Entry{
		Seq: uint64(e.seq), At: time.UnixMilli(e.at).UTC(), Op: counter.LedgerOp(e.op),
		Delta: e.delta, Before: e.before, After: e.before + e.delta, Reason: e.reason, By: e.by,
	}
}

// Dimension is as counter.Reader says.
func (s *Store) Dimension(ctx context.Context, key, name string) (out counter.Counter, counted counter.Counted, err error) {
	out = counter.Counter{Key: key}
	var kind int16
	var incarnation, sequence, count int64
	var st counter.State
	var value string
	err = s.query(ctx, []any{&kind, &st.Value, &st.Updated, &incarnation, &sequence, &value, &count}, func() error {
		st.Kind, st.Version = counter.Kind(kind), counter.Version{Incarnation: uint64(incarnation), Sequence: uint64(sequence)}
		out = st.Counter(key)
		counted.Add(value, count)
		return nil
	}, readDimension, key, name)
	if err != nil {
		return counter.Counter{}, counter.Counted{}, fmt.Errorf("counterpg: dimension %q of %q: %w", name, key, err)
	}
	return out, counted, nil
}

// Size is as counter.Reader says.
func (s *Store) Size(ctx context.Context, prefix string) (n int64, err error) {
	err = s.doLong(ctx, aggregateIn, func(ctx context.Context, c *pgxpool.Conn) error {
		return c.QueryRow(ctx, readSize, presence.FirstWith(prefix), prefix+afterAll).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("counterpg: size of %q: %w", prefix, err)
	}
	return n, nil
}

// Aggregate is as counter.Reader says.
func (s *Store) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	var total counter.Total
	if err := s.AddTo(ctx, &total, prefix, nil); err != nil {
		return counter.Aggregate{}, err
	}
	return total.Aggregate(prefix)
}

// AddTo adds the counters with prefix to total, but for those of but, as they are at one moment.
func (s *Store) AddTo(ctx context.Context, total *counter.Total, prefix string, but []string) error {
	err := s.doLong(ctx, aggregateIn, func(ctx context.Context, c *pgxpool.Conn) error {
		b := &pgx.Batch{}
		b.Queue(repeatable)
		b.Queue(allowScan)
		if err := c.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		first, last := presence.FirstWith(prefix), prefix+afterAll
		var counters, uniques int64
		var text string
		if err := c.QueryRow(ctx, readSum, first, last, but).Scan(&counters, &uniques, &text); err != nil {
			return err
		}
		value, ok := new(big.Int).SetString(text, 10)
		if !ok {
			return fmt.Errorf("a sum of %q", text)
		}
		if total.AddSum(counters, uniques, value); uniques > 0 && !total.Mixed() {
			rows, err := c.Query(ctx, readUnions, first, last)
			if err != nil {
				return err
			}
			var registers []byte
			if _, err = pgx.ForEachRow(rows, []any{&registers}, func() error {
				r, err := parseRegisters(registers)
				total.Merge(r)
				return err
			}); err != nil {
				return err
			}
		}
		_, err := c.Exec(ctx, "commit")
		return err
	})
	if err != nil {
		return fmt.Errorf("counterpg: aggregate of %q: %w", prefix, err)
	}
	return nil
}

const (
	setsAtOnce = 1000
	readSets   = `select key from headcount_counters where kind = 3 and key > $1 order by key limit $2`
)

// Sets is as counter.Reader says. The cursor is the key that came last.
func (s *Store) Sets(ctx context.Context, cursor string) (keys []string, next string, err error) {
	err = s.doLong(ctx, aggregateIn, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, err := c.Query(ctx, readSets, cursor, setsAtOnce)
		if err != nil {
			return err
		}
		keys, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("counterpg: sets: %w", err)
	}
	if len(keys) == setsAtOnce {
		next = keys[len(keys)-1]
	}
	return keys, next, nil
}
