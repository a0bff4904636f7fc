package counterfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/presence"
)

// Read implements counter.Reader; no answer lags.
func (s *Store) Read(_ context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	out := make([]counter.Reading, len(keys))
	err := s.view("read", func(tx *bbolt.Tx) error {
		counters, members := tx.Bucket(countersBucket), tx.Bucket(membersBucket)
		for i, key := range keys {
			var r record
			if err := r.load(counters, key); err != nil {
				return err
			}
			out[i].Counter = r.Counter(key)
			out[i].Mine = member != "" && r.set != 0 && members.Get(within(r.set, member)) != nil
		}
		return nil
	})
	return out, err
}

// Ledger implements counter.Reader.
func (s *Store) Ledger(_ context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	var page counter.Ledger
	err := s.view("ledger", func(tx *bbolt.Tx) error {
		page = counter.Ledger{}
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil || r.ledger == 0 || after >= r.Entries {
			return err
		}
		c := tx.Bucket(ledgersBucket).Cursor()
		prefix := number(r.ledger)
		for k, v := c.Seek(binary.BigEndian.AppendUint64(prefix, after+1)); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			if len(page.Entries) == limit {
				page.More = true
				return nil
			}
			e, err := parseEntry(k[8:], v)
			if err != nil {
				return fmt.Errorf("the ledger of %q: %w", key, err)
			}
			page.Entries = append(page.Entries, e)
		}
		return nil
	})
	return page, err
}

// History implements counter.Reader.
func (s *Store) History(_ context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	var out counter.Counter
	var gains []counter.Gain
	err := s.view("history", func(tx *bbolt.Tx) error {
		gains = nil
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil {
			return err
		}
		out = r.Counter(key)
		if r.history != 0 {
			prefix := historyKey(r.history, uint32(step/time.Second))
			c := tx.Bucket(gainsBucket).Cursor()
			for k, v := c.Seek(binary.BigEndian.AppendUint64(prefix, uint64(max(from, 0)))); bytes.HasPrefix(k, prefix); k, v = c.Next() {
				number := int64(binary.BigEndian.Uint64(k[len(prefix):]))
				if number >= to {
					break
				}
				g, err := parseGain(number, v)
				if err != nil {
					return fmt.Errorf("the history of %q: %w", key, err)
				}
				gains = append(gains, g)
			}
		}
		gains = r.With(gains, step, from, to)
		return nil
	})
	return out, gains, err
}

// Dimension implements counter.Reader.
func (s *Store) Dimension(_ context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	var out counter.Counter
	var counted counter.Counted
	err := s.view("dimension", func(tx *bbolt.Tx) error {
		counted = counter.Counted{Values: map[string]int64{}}
		var r record
		if err := r.load(tx.Bucket(countersBucket), key); err != nil {
			return err
		}
		if out = r.Counter(key); r.history == 0 {
			return nil
		}
		prefix := dimensionKey(r.history, name)
		c := tx.Bucket(countedBucket).Cursor()
		for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			switch {
			case len(k) == len(prefix) && len(v) == 16:
				counted.Other = int64(binary.BigEndian.Uint64(v))
			case len(v) == 8:
				counted.Values[string(k[len(prefix):])] = int64(binary.BigEndian.Uint64(v))
			default:
				return fmt.Errorf("the dimension %q of %q: a count of %d bytes", name, key, len(v))
			}
		}
		return nil
	})
	return out, counted, err
}

// Size implements counter.Reader.
func (s *Store) Size(_ context.Context, prefix string) (n int64, err error) {
	err = s.view("size", func(tx *bbolt.Tx) error {
		c := tx.Bucket(countersBucket).Cursor()
		for k, _ := c.Seek([]byte(presence.FirstWith(prefix))); bytes.HasPrefix(k, []byte(prefix)) && k != nil; k, _ = c.Next() {
			n++
		}
		return nil
	})
	return n, err
}

// Aggregate implements counter.Reader. It reads each counter with the prefix
// once; writes go on meanwhile.
func (s *Store) Aggregate(_ context.Context, prefix string) (a counter.Aggregate, err error) {
	err = s.view("aggregate", func(tx *bbolt.Tx) error {
		var total counter.Total
		registers := tx.Bucket(registersBucket)
		c := tx.Bucket(countersBucket).Cursor()
		for k, v := c.Seek([]byte(presence.FirstWith(prefix))); bytes.HasPrefix(k, []byte(prefix)) && k != nil; k, v = c.Next() {
			var r record
			if err := r.parse(v); err != nil {
				return fmt.Errorf("counter %q: %w", k, err)
			}
			total.Add(r.State)
			if r.Kind == counter.Unique {
				u, err := r.registers(registers)
				if err != nil {
					return fmt.Errorf("counter %q: %w", k, err)
				}
				total.Merge(u)
			}
		}
		a, err = total.Aggregate(prefix)
		return err
	})
	return a, err
}

// setsAtOnce is how many counters one call of Sets looks at.
const setsAtOnce = 10_000

// Sets implements counter.Reader. The cursor is the key that comes next.
func (s *Store) Sets(_ context.Context, cursor string) (keys []string, next string, err error) {
	err = s.view("sets", func(tx *bbolt.Tx) error {
		c := tx.Bucket(countersBucket).Cursor()
		n := 0
		for k, v := c.Seek([]byte(cursor)); k != nil; k, v = c.Next() {
			if n++; n > setsAtOnce {
				next = string(k)
				return nil
			}
			var r record
			if err := r.parse(v); err != nil {
				return fmt.Errorf("counter %q: %w", k, err)
			}
			if r.Kind == counter.Members {
				keys = append(keys, string(k))
			}
		}
		return nil
	})
	return keys, next, err
}
