package owner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
	"headcount/internal/rows"
)

// History implements counter.Reader.
func (r *Reader) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	h, err := r.head(ctx, key)
	if err != nil || h.Version == (counter.Version{}) {
		return h.Counter(key), nil, err
	}

	gains, err := r.ended(ctx, &h, step, from, to)
	if err != nil {
		return counter.Counter{}, nil, fmt.Errorf("owner: history of %q: %w", key, err)
	}

	return h.Counter(key), h.With(gains, step, from, to), nil
}

// manyRows is how many rows of a history are read by name at most. More are scanned, since most of them may not exist.
const manyRows = 64

// Histories returns for each of the distinct keys the time buckets that History returns, as counter.TopStore does. It
// reads all sums at once, because a top list reads a thousand of them from a store that may be far away.
func (r *Reader) Histories(
	ctx context.Context, keys []string, step time.Duration, from, to int64,
) ([][]counter.Gain, error) {
	all, err := r.heads(ctx, keys)
	if err != nil {
		return nil, err
	}

	first, last := from/historyRow, (to-1)/historyRow
	histories := make([][]counter.Gain, len(all))
	var spans []span
	var addresses []rows.Address
	for i := range all {
		h := &all[i]
		if h.Version == (counter.Version{}) {
			continue
		}

		// A time bucket of a unique has up to 16 rows, most of which may not exist.
		if h.Kind.Estimates() || last-first >= manyRows {
			histories[i], err = r.ended(ctx, h, step, from, to)
			if err != nil {
				return nil, fmt.Errorf("owner: history of %q: %w", h.key, err)
			}
			continue
		}

		collection := historyCollection(&h.head, uint32(step/time.Second))
		for number := first; number <= last; number++ {
			spans = append(spans, span{i, number})
			addresses = append(addresses, h.address(rows.Name{Collection: collection, Field: numberField(number)}))
		}
	}

	values, err := r.values(ctx, addresses)
	if err != nil {
		return nil, err
	}
	for i, at := range spans {
		gains, err := gainsWithin(at.number, values[i], from, to)
		if err != nil {
			return nil, fmt.Errorf("owner: history of %q: %w", keys[at.of], err)
		}
		histories[at.of] = append(histories[at.of], gains...)
	}

	for i := range all {
		histories[i] = all[i].With(histories[i], step, from, to)
	}

	return histories, nil
}

// span is a row of ended time buckets of a sum.
type span struct {
	of     int // the index of the counter
	number int64
}

// ended returns the ended time buckets of a counter.
func (r *Reader) ended(
	ctx context.Context, h *found, step time.Duration, from, to int64,
) ([]counter.Gain, error) {
	if h.Kind.Estimates() {
		return r.uniqueGains(ctx, h, step, from, to)
	}

	return r.gains(ctx, h, step, from, to)
}

// gains returns the ended time buckets of a sum.
func (r *Reader) gains(ctx context.Context, h *found, step time.Duration, from, to int64) ([]counter.Gain, error) {
	var gains []counter.Gain
	collection := historyCollection(&h.head, uint32(step/time.Second))
	// The first and the last row may also have time buckets outside the range.
	first, last := from/historyRow, to/historyRow
	err := r.scanNumbers(ctx, h, collection, first, last, func(span int64, _ string, row []byte) error {
		some, err := gainsWithin(span, row, from, to)
		gains = append(gains, some...)
		return err
	})

	return gains, err
}

// gainsWithin returns the time buckets with the indexes from from to to-1 in a row.
func gainsWithin(span int64, row []byte, from, to int64) ([]counter.Gain, error) {
	read := reader{rest: row}
	some := slices.DeleteFunc(read.gains(span), func(g counter.Gain) bool { return g.Number < from || g.Number >= to })

	return some, read.end("a history")
}

// uniqueGains returns the time buckets of a unique, each from its rows of registers.
func (r *Reader) uniqueGains(
	ctx context.Context, h *found, step time.Duration, from, to int64,
) ([]counter.Gain, error) {
	var gains []counter.Gain
	var bucket hyperloglog.Union
	// Rows come in the order of their fields, so the rows of one time bucket follow each other.
	number := int64(-1)
	end := func() {
		if number < 0 {
			return
		}
		registers := bucket.Registers()
		gains = append(gains, counter.Gain{Number: number, Seen: &registers})
	}

	collection := historyCollection(&h.head, uint32(step/time.Second))
	err := r.scanNumbers(ctx, h, collection, from, to-1, func(next int64, field string, row []byte) error {
		if next != number {
			end()
			number = next
			bucket = hyperloglog.Union{}
		}

		part, err := strconv.ParseUint(field, registerRows, 64)
		// The part is used as an index, and another program may have written the row.
		if err != nil || part >= registerRows {
			return fmt.Errorf("%w: registers named %q", ErrMalformed, field)
		}
		return mergeRow(&bucket, int(part), row)
	})
	end()

	return gains, err
}

// numberDigits is the length of a number at the beginning of a field.
const numberDigits = 8

// scanNumbers calls each with the rows of a counter's collection whose fields begin with a number from first to last,
// and with the rest of the field.
func (r *Reader) scanNumbers(
	ctx context.Context, h *found, collection string, first, last int64, each func(int64, string, []byte) error,
) error {
	after := ""
	if first > 0 {
		after = numberField(first-1) + "~" // sorts after every field that begins with the previous number
	}

	err := r.store.Scan(ctx, h.partition, collection, after, func(field string, row []byte) error {
		digits := min(numberDigits, len(field))
		number, err := strconv.ParseInt(field[:digits], 16, 64)
		switch {
		case err != nil:
			return fmt.Errorf("%w: a row of %q named %q", ErrMalformed, collection, field)
		case number > last:
			// Fields come in order, so only later numbers follow.
			return errEnough
		}
		return each(number, field[digits:], row)
	})
	switch {
	case errors.Is(err, errEnough):
		return nil
	case errors.Is(err, ErrMalformed):
		// Waiting does not help against malformed data, so it is no outage.
		return err
	case err != nil:
		return unavailable("scan", err)
	}

	return nil
}
