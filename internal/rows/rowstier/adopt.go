package rowstier

import (
	"context"
	"errors"
	"fmt"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Lister is a fast store that may have been used alone, as Redis without PostgreSQL is: it can list its rows.
type Lister interface {
	rows.Store
	// Contents calls each with names of collections and remembered IDs of a partition. Together the calls cover all
	// partitions, in any order, perhaps repeatedly. Collections and IDs that are created or deleted during the call may
	// be missing.
	Contents(ctx context.Context, each func(partition int, collections []string, ids []rows.ID) error) error
}

var _ rows.Store = Lister(nil)

// adoptedName is a row that is written to the durable store after all rows that the fast store had when it was used
// alone. Once this row is drained, so are all the others.
var adoptedName = rows.Name{Collection: collection, Field: "adopted"}

// Adopted reports whether the durable store has all rows that partitions of the fast store had when that was used
// alone. A partition that no process has claimed yet is not adopted.
func (s *Store) Adopted(ctx context.Context, partitions ...int) (bool, error) {
	addresses := make([]rows.Address, len(partitions))
	for i, id := range partitions {
		addresses[i] = rows.Address{Partition: id, Name: stateName}
	}

	// From the fast store, which every process can read: another one may be adopting.
	for i, row := range s.fast.Read(ctx, addresses) {
		if row.Err != nil || row.Value == nil {
			return false, row.Err
		}
		is, err := decodeState(row.Value)
		if err != nil || is.adopts {
			return false, s.malformed(err, addresses[i])
		}
	}

	return true, nil
}

// adoptEach copies the rows of a fast store that was used alone to the durable store, until ctx ends.
func (s *Store) adoptEach(ctx context.Context) {
	for wake.Wait(ctx, s.cfg.DrainEvery, nil) {
		claims := s.adopting(ctx)
		if len(claims) == 0 {
			continue
		}
		if err := s.adopt(ctx, claims); err != nil {
			s.cfg.Log.Debug().Err(err).
				Msg("counters: copying from Redis to the PostgreSQL that was added behind it failed; retrying")
		}
	}
}

// adopting returns this process's partitions that are still to be adopted and may be adopted now, with the epochs of
// their claims.
func (s *Store) adopting(ctx context.Context) map[int]uint64 {
	claims := map[int]uint64{}
	for id := range s.partitions {
		epoch, adopts := s.partitions[id].adopts()
		if !adopts {
			continue
		}
		// MayAdopt comes last, because it may read a store.
		if s.cfg.MayAdopt != nil && s.cfg.MayAdopt(ctx, id) != nil {
			continue
		}
		claims[id] = epoch
	}

	return claims
}

// adopt copies all rows of the partitions to the durable store in portions, as if the rows had just changed. If this
// process ends before it has finished, the next owner starts over.
func (s *Store) adopt(ctx context.Context, claims map[int]uint64) error {
	fast, ok := s.fast.(Lister)
	if !ok {
		return errors.New("the fast store cannot list its rows")
	}

	type place struct {
		partition  int
		collection string
	}
	done := map[place]bool{}
	err := fast.Contents(ctx, func(id int, collections []string, ids []rows.ID) error {
		// Contents lists all partitions, and each owner adopts its own.
		epoch, isOurs := claims[id]
		if !isOurs {
			return nil
		}
		if err := s.adoptIDs(ctx, id, epoch, ids); err != nil {
			return err
		}

		for _, of := range collections {
			// The tier's own rows do not belong in the durable store. Other collections may be named repeatedly.
			isOfTier := of == collection || of == dirtyRows
			at := place{id, of}
			if isOfTier || done[at] {
				continue
			}
			if err := s.adoptCollection(ctx, id, epoch, of); err != nil {
				return err
			}
			done[at] = true
		}

		return nil
	})
	if err != nil {
		return err
	}

	return s.finishAdoption(ctx, claims)
}

// finishAdoption waits until the durable store has everything, and then records that in the states.
func (s *Store) finishAdoption(ctx context.Context, claims map[int]uint64) error {
	for id, epoch := range claims {
		// After everything else: a drain takes all that is dirty at once, so when this row is drained, so is the rest.
		s.partitions[id].add(epoch, map[rows.Name][]byte{adoptedName: {1}}, nil)
	}
	areClean := func() bool {
		for id := range claims {
			if !s.partitions[id].isClean(adoptedName) {
				return false
			}
		}

		return true
	}
	if err := s.drainUntil(ctx, areClean); err != nil {
		return err
	}

	// The next commit of each owner writes the state, so a process that dies before starts over.
	for id, epoch := range claims {
		s.partitions[id].adopted(epoch)
	}

	return nil
}

// adoptedAtOnce bounds the undrained rows of a partition during its adoption: above it, adopt drains before it adds
// more.
const adoptedAtOnce = 10_000

// awaitRoom drains until the partition has fewer than adoptedAtOnce undrained rows.
func (s *Store) awaitRoom(ctx context.Context, id int) error {
	return s.drainUntil(ctx, func() bool { return s.partitions[id].countDirty() < adoptedAtOnce })
}

// adoptIDs marks IDs as undrained.
func (s *Store) adoptIDs(ctx context.Context, id int, epoch uint64, ids []rows.ID) error {
	if err := s.awaitRoom(ctx, id); err != nil {
		return err
	}
	s.partitions[id].add(epoch, nil, ids)

	return nil
}

// adoptCollection marks all rows of a collection as undrained.
func (s *Store) adoptCollection(ctx context.Context, id int, epoch uint64, of string) error {
	if err := s.awaitRoom(ctx, id); err != nil {
		return err
	}

	// Holding the lock keeps drains out until the scan's rows are added. So a row that changes during the scan is still
	// dirty at that point, and add does not replace its newer value.
	release, err := s.hold(ctx)
	if err != nil {
		return err
	}
	defer release()

	at := rows.Address{Partition: id, Name: rows.Name{Collection: of}}
	found := map[rows.Name][]byte{}
	err = s.scanFast(ctx, at, "", func(field string, value []byte) error {
		found[rows.Name{Collection: of, Field: field}] = value
		return nil
	})
	if err != nil {
		return err
	}
	s.partitions[id].add(epoch, found, nil)

	return nil
}

// drainUntil drains until done returns true.
func (s *Store) drainUntil(ctx context.Context, done func() bool) error {
	for !done() {
		if _, err := s.drain(ctx); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("rowstier: %w", err)
		}
	}

	return nil
}

// adopts returns the epoch of the partition's claim, and whether its rows are to be copied to the durable store now. A
// fast store whose token is not stored yet has to wait for the owner's next commit: if the process were killed before
// that, the durable store would have rows of a fast store that cannot be identified.
func (p *partition) adopts() (epoch uint64, adopts bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	lacksToken := p.drained.unconfirmed && p.stateChanged

	return p.epoch, p.owner != "" && p.state.adopts && !lacksToken
}

// add marks rows and IDs as undrained, unless the claim with that epoch has ended. Rows that are dirty already keep
// their newer values.
func (p *partition) add(epoch uint64, found map[rows.Name][]byte, ids []rows.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()

	// Another process owns the partition now, and adopts it itself.
	if p.epoch != epoch {
		return
	}
	for name, value := range found {
		if !p.isDirtyLocked(name) {
			p.dirty.put(name, value)
		}
	}
	p.dirty.ids = append(p.dirty.ids, ids...)
}

func (p *partition) isClean(name rows.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return !p.isDirtyLocked(name)
}

// adopted records that the durable store has everything, unless the claim with that epoch has ended.
func (p *partition) adopted(epoch uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.epoch == epoch {
		p.state.adopts = false
		p.stateChanged = true
	}
}
