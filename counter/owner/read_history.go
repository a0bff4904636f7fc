package owner

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
)

// History implements counter.Reader.
func (r *Reader) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	h, err := r.head(ctx, key)
	if err != nil || h.Version == (counter.Version{}) {
		return h.Counter(key), nil, err
	}

	var gains []counter.Gain
	if h.Kind.Estimates() {
		gains, err = r.uniqueGains(ctx, &h, step, from, to)
	} else {
		gains, err = r.gains(ctx, &h, step, from, to)
	}
	if err != nil {
		return counter.Counter{}, nil, fmt.Errorf("owner: history of %q: %w", key, err)
	}

	return h.Counter(key), h.With(gains, step, from, to), nil
}

// gains returns the ended time buckets of a sum.
func (r *Reader) gains(ctx context.Context, h *found, step time.Duration, from, to int64) ([]counter.Gain, error) {
	var gains []counter.Gain
	collection := historyCollection(&h.head, uint32(step/time.Second))
	// The first and the last row may also have time buckets outside the range.
	first, last := from/historyRow, to/historyRow
	err := r.scanNumbers(ctx, h, collection, first, last, func(span int64, _ string, row []byte) error {
		read := reader{rest: row}
		for _, gain := range read.gains(span) {
			if gain.Number >= from && gain.Number < to {
				gains = append(gains, gain)
			}
		}
		return read.end("a history")
	})

	return gains, err
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

		part, err := strconv.ParseInt(field, registerRows, 64)
		if err != nil {
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
