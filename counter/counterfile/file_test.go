package counterfile

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/internal/boltfile"
)

var (
	exact   = &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: time.Hour}
	sum     = &counter.Rule{Match: "s:*", Kind: counter.Sum}
	members = &counter.Rule{Match: "m:*", Kind: counter.Members}
)

func add(rule *counter.Rule, key, idempotencyKey string) counter.Op {
	op := counter.Op{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Add, Delta: 1}}}
	if idempotencyKey != "" {
		op.IdempotencyKey = counter.NewIdempotencyKey(key, "", idempotencyKey)
	}
	return op
}

func apply(t testing.TB, s *Store, ops ...counter.Op) {
	t.Helper()
	for _, r := range s.Apply(t.Context(), ops) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
}

// keys counts what a bucket holds.
func keys(t testing.TB, s *Store, bucket []byte) (n int) {
	t.Helper()
	err := s.db.View(func(tx *bbolt.Tx) error {
		n = tx.Bucket(bucket).Stats().KeyN
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestAnotherFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Config{})
	err := s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(boltfile.Meta).Put(boltfile.FormatKey, []byte("2")) })
	if err != nil || s.Close() != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), `its format is "2", this version knows "1"; use the version that wrote it`) {
		t.Errorf("%v", err)
	}
}

func TestAFileInUseIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, Config{})
	if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("%v", err)
	}
}

func TestWhatIsNoFileIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, File), []byte(strings.Repeat("not a database ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Config{}); err == nil || !strings.Contains(err.Error(), File) {
		t.Errorf("%v", err)
	}
}

// clock is a time that a test sets between operations.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func TestIdempotencyKeysAreForgottenAfterADay(t *testing.T) {
	c := &clock{time.Unix(2e9, 0)}
	s := open(t, t.TempDir(), Config{Now: c.now})
	for i := range 100 {
		apply(t, s, add(sum, "s:1", strconv.Itoa(i)))
	}
	c.at = c.at.Add(counter.IdempotencyKeyKept - time.Second)
	if r := s.Apply(t.Context(), []counter.Op{add(sum, "s:1", "7")}); !r[0].Replay {
		t.Errorf("%+v", r)
	}
	c.at = c.at.Add(2 * time.Second)
	if r := s.Apply(t.Context(), []counter.Op{add(sum, "s:1", "7")}); r[0].Replay || r[0].Counters[0].Value != 101 {
		t.Errorf("%+v", r)
	}
	for range 10 {
		apply(t, s, add(sum, "s:1", ""))
	}
	// The key that was made anew lives on, although its first day is over.
	if r := s.Apply(t.Context(), []counter.Op{add(sum, "s:1", "7")}); !r[0].Replay {
		t.Errorf("%+v", r)
	}
	if ids, forget := keys(t, s, idsBucket), keys(t, s, forgetBucket); ids != 1 || forget != 1 {
		t.Errorf("%d idempotency keys and %d ends are left, want 1", ids, forget)
	}
}

func TestOldEntriesGoInOrder(t *testing.T) {
	c := &clock{time.Unix(2e9, 0)}
	s := open(t, t.TempDir(), Config{Now: c.now})
	for range 60 { // a minute each
		apply(t, s, add(exact, "e:1", ""))
		c.at = c.at.Add(time.Minute)
	}
	for range 60 {
		apply(t, s, add(exact, "e:1", ""))
		c.at = c.at.Add(time.Minute)
	}
	l, err := s.Ledger(t.Context(), "e:1", 0, 1000)
	if err != nil || len(l.Entries) < 60 || len(l.Entries) > 62 || l.Entries[len(l.Entries)-1].Seq != 120 {
		t.Fatalf("%d entries, %v", len(l.Entries), err)
	}
	for i, e := range l.Entries {
		if i > 0 && (e.Seq != l.Entries[i-1].Seq+1 || e.Before != l.Entries[i-1].After) {
			t.Errorf("%+v after %+v", e, l.Entries[i-1])
		}
	}
}

func TestGarbageIsClearedByLaterWrites(t *testing.T) {
	s := open(t, t.TempDir(), Config{})
	for i := range 5 {
		var join []string
		for m := range 1000 {
			join = append(join, fmt.Sprintf("%d %d", i, m))
		}
		apply(t, s, counter.Op{Changes: []counter.Change{{Key: "m:1", Rule: members, Verb: counter.Edit, Join: join}}})
	}
	for range 100 {
		apply(t, s, add(exact, "e:1", ""))
	}
	apply(t, s, counter.Op{Changes: []counter.Change{{Key: "u:1", Rule: &counter.Rule{Match: "u:*", Kind: counter.Unique}, Verb: counter.Edit, Join: []string{"a"}}}})
	if n := keys(t, s, registersBucket); n != 1 {
		t.Errorf("%d registers", n)
	}
	for _, key := range []string{"m:1", "e:1", "u:1"} {
		apply(t, s, counter.Op{Changes: []counter.Change{{Key: key, Rule: sum, Verb: counter.Delete}}})
	}
	apply(t, s, counter.Op{Changes: []counter.Change{{Key: "m:1", Rule: members, Verb: counter.Edit, Join: []string{"a"}}}})
	for range 12 {
		apply(t, s, add(sum, "s:1", ""))
	}
	if m, l, r, g := keys(t, s, membersBucket), keys(t, s, ledgersBucket), keys(t, s, registersBucket), keys(t, s, garbageBucket); m != 1 || l+r+g != 0 {
		t.Errorf("%d members, %d entries, %d registers, %d ids of garbage are left, want 1 and none", m, l, r, g)
	}
}

// TestAnIdleCounterCostsNoMemory opens a file of many counters.
func TestAnIdleCounterCostsNoMemory(t *testing.T) {
	const n = 60_000
	dir := t.TempDir()
	s := open(t, dir, Config{})
	for i := 0; i < n; {
		var ops []counter.Op
		for range 20_000 {
			ops = append(ops, add(sum, fmt.Sprintf("s:%07d", i), ""))
			i++
		}
		apply(t, s, ops...)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	s = open(t, dir, Config{})
	if a, err := s.Aggregate(t.Context(), "s:"); err != nil || a != (counter.Aggregate{Counters: n, Value: n}) {
		t.Fatalf("%+v, %v", a, err)
	}
	apply(t, s, add(sum, "s:0000001", ""))
	if grown := int64(heap()) - int64(before); grown > n {
		t.Errorf("%d bytes for %d idle counters: under one byte each is none", grown, n)
	}
}

// On a full disk some transactions fit and some do not: the log says once that it is full, and once that it is not any more.
func TestADiskThatFailsNowAndThenIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &badDisk{}
		var log bytes.Buffer
		s := open(t, t.TempDir(), Config{openFile: d.open, Log: zerolog.New(&log)})
		says := func(full, mended int) {
			t.Helper()
			if strings.Count(log.String(), "cannot be written") != full || strings.Count(log.String(), "can be written again") != mended {
				t.Errorf("want %d and %d lines:\n%s", full, mended, &log)
			}
		}
		for range 3 {
			heal := d.snap(t)
			if r := s.Apply(t.Context(), []counter.Op{add(sum, "s:1", "")})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Fatalf("%+v", r)
			}
			heal()
			for s.Apply(t.Context(), []counter.Op{add(sum, "s:1", "")})[0].Err != nil {
				time.Sleep(healWait)
			}
			says(1, 0)
		}
		time.Sleep(2 * calm)
		apply(t, s, add(sum, "s:1", ""))
		apply(t, s, add(sum, "s:1", ""))
		says(1, 1)
	})
}

// TestHistoryIsForgotten: what was gained is kept as long as the rule says, also of counters that
// nobody touches any more, and then goes without anybody asking for it; so does a deleted one's.
func TestHistoryIsForgotten(t *testing.T) {
	c := &clock{time.Unix(2e9, 0)}
	s := open(t, t.TempDir(), Config{Now: c.now})
	views := &counter.Rule{Match: "*", Kind: counter.Sum, Buckets: []counter.Bucket{{Step: time.Minute, Kept: time.Hour}, {Step: time.Hour, Kept: 24 * time.Hour}}}
	for range 40 {
		apply(t, s, add(views, "left", ""), add(views, "gone", ""))
		c.at = c.at.Add(time.Minute)
	}
	apply(t, s, counter.Op{Changes: []counter.Change{{Key: "gone", Rule: views, Verb: counter.Delete}}})
	apply(t, s, add(sum, "s:1", ""))
	if n := keys(t, s, gainsBucket); n != 40 {
		t.Errorf("%d gains, want 39 minutes and an hour of one", n)
	}
	for range 120 {
		apply(t, s, add(views, "busy", ""))
		c.at = c.at.Add(time.Minute)
	}
	_, gains, err := s.History(t.Context(), "busy", time.Minute, 0, math.MaxUint32)
	if n := len(gains); err != nil || n < 61 || n > 64 {
		t.Errorf("%d minutes are kept, %v", n, err)
	}
	if _, gains, err = s.History(t.Context(), "left", time.Minute, 0, math.MaxUint32); err != nil || len(gains) != 1 {
		t.Errorf("%v is left of a counter that nobody touches, %v; want its slot", gains, err)
	}
	c.at = c.at.Add(48 * time.Hour)
	for range 3 {
		apply(t, s, add(sum, "s:1", ""))
	}
	if g, k, d := keys(t, s, gainsBucket), keys(t, s, keptBucket), keys(t, s, dueBucket); g+k+d != 0 {
		t.Errorf("%d gains are left, %d histories, %d waited for", g, k, d)
	}
}
