package rowstier

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"headcount/internal/rows"
)

// Read implements rows.Store. An evicted row cannot be read while the back is unavailable.
func (s *Store) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	// The states are read after the rows. The commit that evicts the first row also makes the state say that the front
	// is not whole, so a row that was evicted just before it was read is not taken for a missing one.
	states := map[int]int{}
	asked := append([]rows.Address{}, addresses...)
	for _, at := range addresses {
		if _, is := states[at.Partition]; !is {
			states[at.Partition] = len(asked)
			asked = append(asked, rows.Address{Partition: at.Partition, Name: stateName})
		}
	}
	all := s.front.Read(ctx, asked)
	found := all[:len(addresses)]

	// If the front is not whole, a row that it does not have may be in the back.
	var missing []int
	var elsewhere []rows.Address
	for i, at := range addresses {
		if found[i].Err != nil {
			continue
		}
		if found[i].Value != nil {
			value, err := decodeValue(found[i].Value)
			found[i] = rows.Found{Value: value, Err: s.malformed(err, at)}
			continue
		}

		is := all[states[at.Partition]]
		whole, err := s.isWhole(is, at)
		switch {
		case err != nil:
			found[i].Err = err
		case !whole:
			missing = append(missing, i)
			elsewhere = append(elsewhere, at)
		}
	}
	if len(missing) == 0 {
		return found
	}

	for at, is := range s.back.Read(ctx, elsewhere) {
		found[missing[at]] = is
	}

	return found
}

// isWhole reports whether the front has all rows, given the row of its state. Without that row the front may have lost
// everything, so it is not whole.
func (s *Store) isWhole(row rows.Found, at rows.Address) (bool, error) {
	if row.Err != nil || row.Value == nil {
		return false, row.Err
	}
	is, err := decodeState(row.Value)

	return is.whole, s.malformed(err, at)
}

func (s *Store) malformed(err error, at rows.Address) error {
	if err == nil {
		return nil
	}

	return fmt.Errorf("%w: partition %d, %s %q: %w", rows.ErrMalformed, at.Partition, at.Collection, at.Field, err)
}

// Scan implements rows.Store.
func (s *Store) Scan(ctx context.Context, partition int, of, after string, each func(string, []byte) error) error {
	at := rows.Address{Partition: partition, Name: rows.Name{Collection: of}}

	// The state is read before the rows. If rows are evicted during the scan, the back has had them all along.
	whole, err := s.isWhole(s.front.Read(ctx, []rows.Address{{Partition: partition, Name: stateName}})[0], at)
	if err != nil {
		return err
	}
	if whole {
		return s.scanFront(ctx, at, after, each)
	}

	return s.scanBoth(ctx, at, after, each)
}

func (s *Store) scanFront(ctx context.Context, at rows.Address, after string, each func(string, []byte) error) error {
	return s.front.Scan(ctx, at.Partition, at.Collection, after, func(field string, b []byte) error {
		value, err := decodeValue(b)
		if err != nil {
			return s.malformed(err, at)
		}
		if value == nil {
			return nil
		}
		return each(field, value)
	})
}

// scanBoth merges the rows of both stores. The front's version of a row wins.
func (s *Store) scanBoth(ctx context.Context, at rows.Address, after string, each func(string, []byte) error) error {
	front := begin(ctx, s.front, at, after)
	defer front.stop()
	back := begin(ctx, s.back, at, after)
	defer back.stop()

	for front.ok || back.ok {
		first := front
		if !front.ok || back.ok && back.field < front.field {
			first = back
		}
		field, value := first.field, first.value
		var err error
		if first == front {
			value, err = decodeValue(value)
		}
		if err == nil && value != nil {
			err = each(field, value)
		}
		if err != nil {
			return err
		}

		if back.ok && back.field == field {
			back.move()
		}
		if front.ok && front.field == field {
			front.move()
		}
	}

	if front.err != nil {
		return front.err
	}

	return back.err
}

// scan iterates over a Scan one row at a time.
type scan struct {
	field string
	value []byte
	ok    bool // field and value are valid; false: the scan has ended
	err   error

	next func() (string, []byte, bool)
	stop func()
}

func begin(ctx context.Context, of rows.Store, at rows.Address, after string) *scan {
	s := &scan{}
	s.next, s.stop = iter.Pull2(func(yield func(string, []byte) bool) {
		err := of.Scan(ctx, at.Partition, at.Collection, after, func(field string, value []byte) error {
			if !yield(field, value) {
				return errStopped
			}
			return nil
		})
		if err != nil && err != errStopped {
			s.err = err
		}
	})
	s.move()

	return s
}

var errStopped = errors.New("stopped")

func (s *scan) move() { s.field, s.value, s.ok = s.next() }
