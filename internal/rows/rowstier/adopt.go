package rowstier

import (
	"context"
	"errors"
	"fmt"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Front is a fast store that may have been used without a back, as Redis alone is.
type Front interface {
	rows.Store
	// Contents calls each with the names of collections of a partition, and the IDs that it remembers: all of all
	// partitions, some at a time, in any order, perhaps more than once. What is made or deleted meanwhile may be
	// missing.
	Contents(ctx context.Context, each func(partition int, collections []string, ids []rows.ID) error) error
}

var _ rows.Store = Front(nil)

// adoptedName is a row that the back gets after everything that a front had alone.
var adoptedName = rows.Name{Collection: collection, Field: "adopted"}

// Adopted reports whether the back has what partitions of the front had without it, or will have it in a moment. A
// partition that nobody has claimed yet is not adopted.
func (s *Store) Adopted(ctx context.Context, partitions ...int) (bool, error) {
	addresses := make([]rows.Address, len(partitions))
	for i, id := range partitions {
		addresses[i] = rows.Address{Partition: id, Name: stateName}
	}

	for i, row := range s.front.Read(ctx, addresses) {
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

// adoptEach brings what a front had alone to the back, until ctx ends.
func (s *Store) adoptEach(ctx context.Context) {
	for wake.Wait(ctx, s.cfg.DrainEvery, nil) {
		claims := s.adopting(ctx)
		if len(claims) == 0 {
			continue
		}
		if err := s.adopt(ctx, claims); err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: what was in the fast store alone is not in the lasting one yet")
		}
	}
}

// adopting returns the partitions of this process whose front has something that the back has not got and can get now,
// with the epochs of their claims.
func (s *Store) adopting(ctx context.Context) map[int]uint64 {
	claims := map[int]uint64{}
	for id := range s.partitions {
		epoch, adopts := s.partitions[id].adopts()
		if !adopts {
			continue
		}
		if s.cfg.MayAdopt != nil && s.cfg.MayAdopt(ctx, id) != nil {
			continue
		}
		claims[id] = epoch
	}

	return claims
}

// adopt brings everything in partitions of the front to the back, as if it had just changed, some of it at a time. A
// process that ends meanwhile leaves it to the next owner, who begins again.
func (s *Store) adopt(ctx context.Context, claims map[int]uint64) error {
	front, ok := s.front.(Front)
	if !ok {
		return errors.New("the fast store cannot list its rows")
	}

	type place struct {
		partition  int
		collection string
	}
	done := map[place]bool{}
	err := front.Contents(ctx, func(id int, collections []string, ids []rows.ID) error {
		epoch, isOurs := claims[id]
		if !isOurs {
			return nil
		}
		if err := s.adoptIDs(ctx, id, epoch, ids); err != nil {
			return err
		}

		for _, of := range collections {
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

// finishAdoption has the front say that the back has everything, once it does.
func (s *Store) finishAdoption(ctx context.Context, claims map[int]uint64) error {
	for id, epoch := range claims {
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

	for id, epoch := range claims {
		s.partitions[id].adopted(epoch)
	}

	return nil
}

// adoptAtOnce is how many rows wait for the back before more are added.
const adoptAtOnce = 10_000

// awaitRoom drains until few enough rows of a partition wait.
func (s *Store) awaitRoom(ctx context.Context, id int) error {
	return s.drainUntil(ctx, func() bool { return s.partitions[id].dirty() < adoptAtOnce })
}

// adoptIDs has IDs wait for the back.
func (s *Store) adoptIDs(ctx context.Context, id int, epoch uint64, ids []rows.ID) error {
	if err := s.awaitRoom(ctx, id); err != nil {
		return err
	}
	s.partitions[id].add(epoch, nil, ids)

	return nil
}

// adoptCollection has all rows of a collection wait for the back.
func (s *Store) adoptCollection(ctx context.Context, id int, epoch uint64, of string) error {
	if err := s.awaitRoom(ctx, id); err != nil {
		return err
	}

	// Nothing is drained between the scan and the note of what it found. So a row that changes meanwhile is noted as
	// changed, and its newer value is not replaced.
	defer s.hold()()

	at := rows.Address{Partition: id, Name: rows.Name{Collection: of}}
	found := map[rows.Name][]byte{}
	err := s.scanFront(ctx, at, "", func(field string, value []byte) error {
		found[rows.Name{Collection: of, Field: field}] = value
		return nil
	})
	if err != nil {
		return err
	}
	s.partitions[id].add(epoch, found, nil)

	return nil
}

// drainUntil drains until something is done.
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

// adopts returns the claim of a partition, and whether its front has something that the back can get. A front that
// has no token yet waits for the next commit of the owner: after a kill the back would have rows of a front that
// nobody knows.
func (p *partition) adopts() (epoch uint64, adopts bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	isNameless := p.unsaid && p.changed

	return p.epoch, p.owner != "" && p.state.adopts && !isNameless
}

// add has rows and IDs wait for the back, except rows that do already, if the partition is still claimed as it was.
func (p *partition) add(epoch uint64, found map[rows.Name][]byte, ids []rows.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.epoch != epoch {
		return
	}
	if p.pending == nil {
		p.pending = map[rows.Name][]byte{}
	}
	for name, value := range found {
		if !p.isDirtyLocked(name) {
			p.pending[name] = value
		}
	}
	p.ids = append(p.ids, ids...)
}

func (p *partition) isClean(name rows.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return !p.isDirtyLocked(name)
}

// adopted notes that the back has everything.
func (p *partition) adopted(epoch uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.epoch == epoch {
		p.state.adopts = false
		p.changed = true
	}
}
