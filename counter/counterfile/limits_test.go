package counterfile

import (
	"strconv"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"headcount/counter/limit"
)

// States that have ended leave the file, and those that are used stay. What is refused writes
// nothing.
func TestEndedLimitsLeaveTheFile(t *testing.T) {
	now := time.UnixMilli(1_700_000_000_000)
	s := open(t, t.TempDir(), Config{Now: func() time.Time { return now }})
	take := func(key string, a limit.Algorithm) bool {
		t.Helper()
		r := s.Limit(t.Context(), []limit.Call{{Name: limit.Name{Key: key, Algorithm: a, Window: 1000}, Limit: 1, Cost: 1}})[0]
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		return r.Allowed
	}
	for key := range 20 {
		for _, a := range []limit.Algorithm{limit.Fixed, limit.Sliding, limit.Log} {
			if !take(strconv.Itoa(key), a) {
				t.Fatal("a first call was refused")
			}
		}
	}
	if n, ends := keys(t, s, limitsBucket), keys(t, s, limitEndsBucket); n != 60 || ends != 60 {
		t.Errorf("%d states, %d to look at", n, ends)
	}
	writes := func() (n int64) {
		if err := s.db.View(func(tx *bbolt.Tx) error { n = int64(tx.ID()); return nil }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := writes()
	for range 10 {
		if take("7", limit.Log) {
			t.Fatal("a second call passed")
		}
	}
	if n := writes() - before; n != 0 {
		t.Errorf("%d transactions for calls that were refused", n)
	}
	for range 20 {
		now = now.Add(1001 * time.Millisecond)
		if !take("7", limit.Log) {
			t.Fatal("a call more than a second later was refused")
		}
	}
	if n, ends := keys(t, s, limitsBucket), keys(t, s, limitEndsBucket); n != 1 || ends != 1 {
		t.Errorf("%d states, %d to look at", n, ends)
	}
}

// A file of an earlier version has no place for limits, and gets one.
func TestAnEarlierFileGetsLimits(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Config{})
	apply(t, s, add(sum, "s:1", ""))
	err := s.db.Update(func(tx *bbolt.Tx) error {
		if err := tx.DeleteBucket(limitsBucket); err != nil {
			return err
		}
		return tx.DeleteBucket(limitEndsBucket)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Config{})
	call := limit.Call{Name: limit.Name{Key: "k", Algorithm: limit.Fixed, Window: 1000}, Limit: 1, Cost: 1}
	if r := s.Limit(t.Context(), []limit.Call{call})[0]; r.Err != nil || !r.Allowed {
		t.Errorf("%+v", r)
	}
	if read, err := s.Read(t.Context(), []string{"s:1"}, "", 0); err != nil || read[0].Value != 1 {
		t.Errorf("%+v, %v", read, err)
	}
}
