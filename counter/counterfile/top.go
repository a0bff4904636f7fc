package counterfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"

	"go.etcd.io/bbolt"

	"headcount/counter"
)

// matchKey is the beginning of the keys of a match.
func matchKey(match string) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(match))), match...)
}

func markKey(match string, number int64, key string) []byte {
	return append(binary.BigEndian.AppendUint64(matchKey(match), uint64(number)), key...)
}

// topKey is the beginning of the keys of lists of steps of a length.
func topKey(match string, step time.Duration) []byte {
	return binary.BigEndian.AppendUint32(matchKey(match), uint32(step/time.Second))
}

// Mark implements counter.TopStore.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	return s.update(ctx, "top", func(tx *bbolt.Tx) error {
		marks := tx.Bucket(marksBucket)
		for _, key := range keys {
			if err := marks.Put(markKey(match, number, key), []byte{}); err != nil {
				return err
			}
		}
		return nil
	})
}

// Marked implements counter.TopStore.
func (s *Store) Marked(_ context.Context, match string) (out map[int64][]string, err error) {
	err = s.view("top", func(tx *bbolt.Tx) error {
		out = map[int64][]string{}
		prefix := matchKey(match)
		c := tx.Bucket(marksBucket).Cursor()
		for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix) && len(k) > len(prefix)+8; k, _ = c.Next() {
			number := int64(binary.BigEndian.Uint64(k[len(prefix):]))
			out[number] = append(out[number], string(k[len(prefix)+8:]))
		}
		return nil
	})
	return out, err
}

// KeepTop implements counter.TopStore.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	text, err := json.Marshal(list.Most)
	if err != nil { // strings and numbers always marshal
		panic(err)
	}
	now := s.cfg.Now()
	return s.update(ctx, "top", func(tx *bbolt.Tx) error {
		prefix := topKey(match, step)
		tops := tx.Bucket(topsBucket)
		c := tops.Cursor()
		for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix) && counter.Over(int64(binary.BigEndian.Uint64(k[len(prefix):])), step, kept, now); k, _ = c.Seek(prefix) {
			if err := c.Delete(); err != nil {
				return err
			}
		}
		for _, key := range marks {
			if err := tx.Bucket(marksBucket).Delete(markKey(match, list.Number, key)); err != nil {
				return err
			}
		}
		return tops.Put(binary.BigEndian.AppendUint64(prefix, uint64(list.Number)), text)
	})
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(_ context.Context, match string, step time.Duration, from, to int64) (out []counter.TopList, err error) {
	err = s.view("top", func(tx *bbolt.Tx) error {
		out = nil
		prefix := topKey(match, step)
		c := tx.Bucket(topsBucket).Cursor()
		for k, v := c.Seek(binary.BigEndian.AppendUint64(prefix[:len(prefix):len(prefix)], uint64(max(from, 0)))); bytes.HasPrefix(k, prefix); k, v = c.Next() {
			l := counter.TopList{Number: int64(binary.BigEndian.Uint64(k[len(prefix):]))}
			if l.Number >= to {
				break
			}
			if err := json.Unmarshal(v, &l.Most); err != nil {
				return fmt.Errorf("what gained most under %q: %w", match, err)
			}
			out = append(out, l)
		}
		return nil
	})
	return out, err
}

// Running implements counter.TopStore.
func (s *Store) Running(_ context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	slots := make([]counter.Slot, len(keys))
	err := s.view("top", func(tx *bbolt.Tx) error {
		counters := tx.Bucket(countersBucket)
		for i, key := range keys {
			var r record
			if err := r.load(counters, key); err != nil {
				return err
			}
			slots[i] = r.Slots.At(step)
		}
		return nil
	})
	return slots, err
}

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	return counter.HistoriesOf(ctx, s, keys, step, from, to)
}
