package exactpg

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"headcount/counter"
	"headcount/internal/pgtest"
)

// longLedger returns a counter whose ledger has so many entries.
func longLedger(n int) counter.Copy {
	c := counter.Copy{Key: "stock:1", State: counter.State{
		Kind: counter.Exact, Value: int64(n), Entries: uint64(n),
		Version: counter.Version{Incarnation: 1, Sequence: uint64(n)},
	}}
	for i := range int64(n) {
		c.Ledger = append(c.Ledger, counter.Entry{
			Seq: uint64(i + 1), At: time.Now(), Op: counter.LedgerIncrement, Delta: 1, Before: i, After: i + 1,
		})
	}

	return c
}

// TestServerALongLedgerIsRestored: a transaction of many entries may take longer than other calls. The server is slow
// here.
func TestServerALongLedgerIsRestored(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	server.Exec(t, url, `create function slowly() returns trigger language plpgsql as
			'begin perform pg_sleep(5.2); return null; end';
		create trigger slowly after insert on headcount_ledger for each statement execute function slowly()`)

	c := longLedger(10_000)
	restored, err := s.Restore(t.Context(), []counter.Copy{c}, counter.BuiltinRules())
	if err != nil || restored != 1 {
		t.Fatalf("%d counters are restored, %v; want 1", restored, err)
	}
	page, err := s.Ledger(t.Context(), c.Key, 9_990, 1000)
	if err != nil || len(page.Entries) != 10 {
		t.Errorf("the ledger has %d entries after the first 9,990, %v; want 10", len(page.Entries), err)
	}
}

// TestALongLedgerIsWrittenInParts: each statement ends before the timeout of a statement.
func TestALongLedgerIsWrittenInParts(t *testing.T) {
	const n = 2*writtenAtOnce + 1
	d := restoring(longLedger(n))
	b := &pgx.Batch{}
	d.queueWrites(b)

	written := 0
	for _, one := range b.QueuedQueries {
		if one.SQL != insertEntries {
			continue
		}

		seqs := one.Arguments[2].([]int64)
		times := one.Arguments[9].([]time.Time)
		isWhole := len(seqs) == len(times) && len(seqs) <= writtenAtOnce
		if !isWhole || seqs[0] != int64(written+1) {
			t.Errorf("after %d entries a statement writes %d with %d times, from %d on",
				written, len(seqs), len(times), seqs[0])
		}
		written += len(seqs)
	}
	if written != n {
		t.Errorf("%d entries are written, want %d", written, n)
	}
}

// restoring returns a draft into which a counter is restored.
func restoring(c counter.Copy) *draft {
	d := newDraft(nil)
	d.now = time.Now()
	d.rows[c.Key] = &row{}
	d.keys = []string{c.Key}
	d.restore(&c, counter.BuiltinRules())

	return d
}

// TestALedgerIsSweptAfterAnImport: also if all its entries had expired before the export. Otherwise nobody would look
// at it again, and what is added would be kept for ever.
func TestALedgerIsSweptAfterAnImport(t *testing.T) {
	c := longLedger(3)
	for name, entries := range map[string][]counter.Entry{"with entries": c.Ledger, "without": nil} {
		t.Run(name, func(t *testing.T) {
			c := c
			c.Ledger = entries
			d := restoring(c)
			if _, isSwept := d.sweeps[ledger{c.Key, c.Version.Incarnation}]; !isSwept {
				t.Error("nobody sweeps the ledger")
			}
		})
	}
}
