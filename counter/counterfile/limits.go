package counterfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/counter/limit"
)

// Limit implements counter.Limiter: one transaction, so the file alone knows what has passed, and
// a restart lets nothing pass twice. When all of calls are refused nothing is written.
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	err := s.update(ctx, "limit", func(tx *bbolt.Tx) error { return takeAll(tx, calls, s.cfg.Now().UnixMilli(), results) })
	if err != nil {
		for i := range results {
			results[i] = counter.LimitResult{Err: err}
		}
	}
	return results
}

func takeAll(tx *bbolt.Tx, calls []limit.Call, now int64, results []counter.LimitResult) error {
	limits, ends := tx.Bucket(limitsBucket), tx.Bucket(limitEndsBucket)
	states := map[limit.Name]*limit.State{}
	changed := map[limit.Name]bool{}
	for i := range calls {
		c := &calls[i]
		s := states[c.Name]
		if s == nil {
			read, err := limit.Parse(limits.Get(limitKey(c.Name)))
			if err != nil {
				return fmt.Errorf("limit %q: %w", c.Key, err)
			}
			s = &read
			states[c.Name] = s
		}
		results[i].Answer = s.Take(*c, now)
		if results[i].Allowed {
			changed[c.Name] = true
		}
	}
	if len(changed) == 0 {
		return errNothing
	}
	for name := range changed {
		key := limitKey(name)
		if limits.Get(key) == nil {
			if err := ends.Put(limitEnd(now+name.Window, key), nil); err != nil {
				return err
			}
		}
		if err := limits.Put(key, states[name].Append(nil)); err != nil {
			return err
		}
	}
	return forgetLimits(limits, ends, now, min(forgetPerOp*len(calls)+16, forgetAtMost))
}

// forgetLimits looks at the states that are due, a bounded number of them and more than calls can
// make. One that has not ended by then is due again at its end: a call does not move it.
func forgetLimits(limits, ends *bbolt.Bucket, now int64, most int) error {
	for range most {
		due, _ := ends.Cursor().First()
		if len(due) < 8 || int64(binary.BigEndian.Uint64(due)) > now {
			return nil
		}
		due = bytes.Clone(due)
		key := due[8:]
		s, err := limit.Parse(limits.Get(key))
		if err != nil {
			return err
		}
		if end := s.End(limitName(key)); end > now {
			err = ends.Put(limitEnd(end, key), nil)
		} else {
			err = limits.Delete(key)
		}
		if err := errors.Join(err, ends.Delete(due)); err != nil {
			return err
		}
	}
	return nil
}

// limitKey is algorithm, window in 8 bytes, and the limit's key.
func limitKey(n limit.Name) []byte {
	b := binary.BigEndian.AppendUint64([]byte{byte(n.Algorithm)}, uint64(n.Window))
	return append(b, n.Key...)
}

func limitName(key []byte) limit.Name {
	return limit.Name{Key: string(key[9:]), Algorithm: limit.Algorithm(key[0]), Window: int64(binary.BigEndian.Uint64(key[1:]))}
}

func limitEnd(at int64, key []byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, uint64(at)), key...)
}
