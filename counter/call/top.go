package call

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// The candidates and the lists of a rule are stored in the partition of its match.

func marksOf(match string) string { return "marks:" + match }

// numberDigits is the length of a number at the beginning of a field.
const numberDigits = 16

// fieldOf returns a field name that sorts like its number.
func fieldOf(number int64) string { return fmt.Sprintf("%0*x", numberDigits, number) }

// Mark implements counter.TopStore.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	var more owner.More
	for _, key := range keys {
		name := rows.Name{Collection: marksOf(match), Field: fieldOf(number) + key}
		// The value means nothing, but a row without one would be deleted.
		more.Rows = append(more.Rows, owner.Expiring{Row: rows.Row{Name: name, Value: []byte{1}}})
	}
	_, err := s.do(ctx, owner.Call{Partition: rows.PartitionOf(match), More: &more})

	return err
}

// Marked implements counter.TopStore.
func (s *Store) Marked(ctx context.Context, match string) (map[int64][]string, error) {
	marked := map[int64][]string{}
	each := func(field string, _ []byte) error {
		// Another program may have written the row.
		digits := min(numberDigits, len(field))
		number, err := strconv.ParseInt(field[:digits], 16, 64)
		if err != nil || digits < numberDigits {
			return fmt.Errorf("mark %q: %w", field, owner.ErrMalformed)
		}
		marked[number] = append(marked[number], field[digits:])
		return nil
	}
	if err := s.rows.Scan(ctx, rows.PartitionOf(match), marksOf(match), "", each); err != nil {
		return nil, fmt.Errorf("call: marks: %w: %w", counter.ErrUnavailable, err)
	}

	return marked, nil
}

func listsOf(match string, step time.Duration) string { return "top:" + step.String() + ":" + match }

// KeepTop implements counter.TopStore.
func (s *Store) KeepTop(
	ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string,
) error {
	name := rows.Name{Collection: listsOf(match, step), Field: fieldOf(list.Number)}
	var more owner.More
	more.Rows = append(more.Rows, owner.Expiring{
		Row:   rows.Row{Name: name, Value: owner.EncodeGained(list.Most)},
		Until: counter.ForgetAt(list.Number, step, kept),
	})
	// One commit stores the list and drops the marks, so that no candidate is forgotten in between.
	for _, key := range marks {
		mark := rows.Name{Collection: marksOf(match), Field: fieldOf(list.Number) + key}
		more.Rows = append(more.Rows, owner.Expiring{Row: rows.Row{Name: mark}})
	}
	_, err := s.do(ctx, owner.Call{Partition: rows.PartitionOf(match), More: &more})

	return err
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(
	ctx context.Context, match string, step time.Duration, from, to int64,
) ([]counter.TopList, error) {
	var lists []counter.TopList
	each := func(field string, value []byte) error {
		number, err := strconv.ParseInt(field, 16, 64)
		if err != nil {
			return fmt.Errorf("list %q: %w", field, owner.ErrMalformed)
		}
		// Fields come in order, so only later lists follow.
		if number >= to {
			return errEnough
		}
		most, err := owner.DecodeGained(value)
		lists = append(lists, counter.TopList{Number: number, Most: most})
		return err
	}

	after := ""
	if from > 0 {
		after = fieldOf(from - 1)
	}
	err := s.rows.Scan(ctx, rows.PartitionOf(match), listsOf(match, step), after, each)
	if err != nil && !errors.Is(err, errEnough) {
		return nil, fmt.Errorf("call: lists: %w: %w", counter.ErrUnavailable, err)
	}

	return lists, nil
}

// errEnough ends a scan early.
var errEnough = errors.New("enough")
