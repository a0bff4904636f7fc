package rowstier

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"headcount/internal/rows"
)

// Read implements rows.Store. An evicted row cannot be read while the durable store is unavailable.
func (s *Store) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	// The states are read after the rows. The commit that evicts the first row also makes the state say that the fast
	// store is not complete, so a row that was evicted just before it was read is not taken for a missing one.
	states := map[int]int{}
	asked := append([]rows.Address{}, addresses...)
	for _, at := range addresses {
		if _, is := states[at.Partition]; !is {
			states[at.Partition] = len(asked)
			asked = append(asked, rows.Address{Partition: at.Partition, Name: stateName})
		}
	}
	all := s.fast.Read(ctx, asked)
	found := all[:len(addresses)]

	// If the fast store is not complete, a row that it does not have may be in the durable store.
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
		complete, err := s.isComplete(is, at)
		switch {
		case err != nil:
			found[i].Err = err
		case !complete:
			missing = append(missing, i)
			elsewhere = append(elsewhere, at)
		}
	}
	if len(missing) == 0 {
		return found
	}

	for at, is := range s.durable.Read(ctx, elsewhere) {
		found[missing[at]] = is
	}

	return found
}

// isComplete reports whether the fast store has all rows, given the row of its state. Without that row the fast store
// may have lost everything, so it is not complete.
func (s *Store) isComplete(row rows.Found, at rows.Address) (bool, error) {
	if row.Err != nil || row.Value == nil {
		return false, row.Err
	}
	is, err := decodeState(row.Value)

	return is.complete, s.malformed(err, at)
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

	// The state is read before the rows. If rows are evicted during the scan, the durable store has had them all along.
	complete, err := s.isComplete(s.fast.Read(ctx, []rows.Address{{Partition: partition, Name: stateName}})[0], at)
	if err != nil {
		return err
	}
	if complete {
		return s.scanFast(ctx, at, after, each)
	}

	return s.scanBoth(ctx, at, after, each)
}

func (s *Store) scanFast(ctx context.Context, at rows.Address, after string, each func(string, []byte) error) error {
	return s.fast.Scan(ctx, at.Partition, at.Collection, after, func(field string, b []byte) error {
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

// scanBoth merges the rows of both stores. The fast store's version of a row wins.
func (s *Store) scanBoth(ctx context.Context, at rows.Address, after string, each func(string, []byte) error) error {
	fast := startScan(ctx, s.fast, at, after)
	defer fast.stop()
	durable := startScan(ctx, s.durable, at, after)
	defer durable.stop()

	for fast.ok || durable.ok {
		first := fast
		// Of two rows with one name the fast store's is newer. The other one is skipped below.
		isDurableFirst := !fast.ok || durable.ok && durable.field < fast.field
		if isDurableFirst {
			first = durable
		}
		field, value := first.field, first.value
		var err error
		if first == fast {
			value, err = decodeValue(value)
		}
		if err == nil && value != nil {
			err = each(field, value)
		}
		if err != nil {
			return err
		}

		if durable.ok && durable.field == field {
			durable.move()
		}
		if fast.ok && fast.field == field {
			fast.move()
		}
	}

	// A scan that has failed looks like one that has ended, so errors come to light only here.
	if fast.err != nil {
		return fast.err
	}

	return durable.err
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

func startScan(ctx context.Context, of rows.Store, at rows.Address, after string) *scan {
	s := &scan{}
	s.next, s.stop = iter.Pull2(func(yield func(string, []byte) bool) {
		err := of.Scan(ctx, at.Partition, at.Collection, after, func(field string, value []byte) error {
			if !yield(field, value) {
				return errStopped
			}
			return nil
		})
		// A caller that has enough ends the scan with that error.
		if err != nil && err != errStopped {
			s.err = err
		}
	})
	// The first row is at hand at once, so that scans can be merged.
	s.move()

	return s
}

var errStopped = errors.New("stopped")

func (s *scan) move() { s.field, s.value, s.ok = s.next() }
