package counterfile

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"go.etcd.io/bbolt"

	"headcount/counter"
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// Deleted implements counter.Dumper.
func (s *Store) Deleted(context.Context) (deleted uint64, err error) {
	err = s.view("deleted", func(tx *bbolt.Tx) error {
		deleted = deletedIn(tx)
		return nil
	})
	return deleted, err
}

// Dump implements counter.Dumper: all is of one moment.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	var refused error // what each has said
	err := s.view("dump", func(tx *bbolt.Tx) error {
		c := tx.Bucket(countersBucket).Cursor()
		for k, v := c.Seek([]byte(after + "\x00")); k != nil; k, v = c.Next() {
			one, err := dumpOne(tx, string(k), v)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return err
			}
			if refused = each(one); refused != nil {
				return refused
			}
		}
		return nil
	})
	if refused != nil {
		return refused
	}
	return err
}

func dumpOne(tx *bbolt.Tx, key string, v []byte) (one counter.Copy, err error) {
	var r record
	if err := r.parse(v); err != nil {
		return one, fmt.Errorf("counter %q: %w", key, err)
	}
	one = counter.Copy{Key: key, State: r.State}
	if r.set != 0 && r.Kind == counter.Unique {
		in, err := r.registers(tx.Bucket(registersBucket))
		if err != nil {
			return one, fmt.Errorf("counter %q: %w", key, err)
		}
		one.Registers = in.Clone()
	} else if r.set != 0 {
		prefix := within(r.set, "")
		c := tx.Bucket(membersBucket).Cursor()
		for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
			one.Members = append(one.Members, string(k[8:]))
		}
	}
	if r.ledger != 0 {
		prefix := within(r.ledger, "")
		c := tx.Bucket(ledgersBucket).Cursor()
		for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			e, err := parseEntry(k[8:], v)
			if err != nil {
				return one, fmt.Errorf("the ledger of %q: %w", key, err)
			}
			one.Ledger = append(one.Ledger, e)
		}
	}
	if r.history != 0 {
		prefix := within(r.history, "")
		c := tx.Bucket(gainsBucket).Cursor()
		for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			if len(k) != 20 {
				return one, fmt.Errorf("the history of %q: a key of %d bytes", key, len(k))
			}
			g, err := parseGain(int64(binary.BigEndian.Uint64(k[12:])), v)
			if err != nil {
				return one, fmt.Errorf("the history of %q: %w", key, err)
			}
			one.Steps = append(one.Steps, counter.StepCopy{Step: binary.BigEndian.Uint32(k[8:]), Number: g.Number, Value: g.Value, Seen: g.Seen})
		}
	}
	return one, dumpDimensions(tx, r.history, &one)
}

// dumpDimensions reads what a counter with that history counted under its dimensions.
func dumpDimensions(tx *bbolt.Tx, history uint64, one *counter.Copy) error {
	if history == 0 {
		return nil
	}
	prefix := within(history, "")
	c := tx.Bucket(countedBucket).Cursor()
	for k, v := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, v = c.Next() {
		k = k[len(prefix):]
		if len(k) == 0 || len(k) < 1+int(k[0]) || len(v) < 8 {
			return fmt.Errorf("the dimensions of %q: a key of %d bytes", one.Key, len(k))
		}
		name, value := string(k[1:1+k[0]]), string(k[1+k[0]:])
		counted, n := one.Dimension(name), int64(binary.BigEndian.Uint64(v))
		if value == "" {
			counted.Other = n
		} else {
			counted.Values[value] = n
		}
	}
	slices.SortFunc(one.Dimensions, func(a, b counter.DimensionCopy) int { return cmp.Compare(a.Name, b.Name) }) // the shorter ones came first
	return nil
}

// Restore implements counter.Restorer: one transaction.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	for i := range copies {
		if err := copies[i].Named(); err != nil {
			return 0, err
		}
	}
	err = s.update(ctx, "restore", func(tx *bbolt.Tx) error {
		t := s.begin(tx)
		for i := range copies {
			c := copies[i]
			r := t.record(c.Key)
			if !c.Replaces(&r.State, t.deleted) {
				continue
			}
			restored++
			t.discard(&r.set)
			t.discard(&r.ledger)
			t.discard(&r.history)
			r.State = c.State
			t.restore(r, &c, rules)
		}
		return t.end(0)
	})
	if err != nil {
		return 0, err
	}
	return restored, nil
}

// restore puts what stands beside the record of a counter.
func (t *step) restore(r *record, c *counter.Copy, rules *counter.Rules) {
	if len(c.Members) > 0 || !c.Registers.Empty() {
		r.set = t.newID()
	}
	for _, m := range c.Members {
		t.put(membersBucket, within(r.set, m), []byte{})
	}
	if !c.Registers.Empty() {
		t.put(registersBucket, within(r.set, ""), c.Registers.Bytes())
	}
	if len(c.Ledger) > 0 {
		r.ledger = t.newID()
	}
	for _, e := range c.Ledger {
		t.put(ledgersBucket, binary.BigEndian.AppendUint64(within(r.ledger, ""), e.Seq), appendEntry(nil, e))
	}
	_, kept := c.Kept(rules)
	for _, s := range c.Steps {
		slot := counter.Slot{Number: uint32(s.Number), Step: s.Step}
		value := number(uint64(s.Value))
		if s.Seen != nil {
			value = s.Seen.Bytes()
		}
		t.keep(t.gainKey(c.Key, slot), value, slot, kept(s.Step))
	}
	for _, d := range c.Dimensions {
		of := dimensionKey(t.history(c.Key), d.Name)
		t.put(countedBucket, of, binary.BigEndian.AppendUint64(number(uint64(d.Other)), uint64(len(d.Values))))
		for value, n := range d.Values {
			t.put(countedBucket, append(of[:len(of):len(of)], value...), number(uint64(n)))
		}
	}
}

// RestoreDeleted implements counter.Restorer.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	return s.update(ctx, "restore", func(tx *bbolt.Tx) error {
		t := s.begin(tx)
		t.deleted = max(t.deleted, deleted)
		return t.end(0)
	})
}
