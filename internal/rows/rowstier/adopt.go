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
	// Contents returns the names of all collections of a partition, and the IDs that it remembers. What is made or deleted
	// meanwhile may be missing.
	Contents(ctx context.Context, partition int) (collections []string, ids []rows.ID, err error)
}

var _ rows.Store = Front(nil)

// adoptedName is a row that the back gets after everything that a front had alone.
var adoptedName = rows.Name{Collection: collection, Field: "adopted"}

// Adopted reports whether the back has what each partition of the front had without it, or will have it in a moment.
func (s *Store) Adopted(ctx context.Context) (bool, error) {
	for id := range rows.Partitions {
		is, err := s.IsAdopted(ctx, id)
		if err != nil || !is {
			return false, err
		}
	}

	return true, nil
}

// IsAdopted is Adopted for one partition. A partition that nobody has claimed yet is not adopted.
func (s *Store) IsAdopted(ctx context.Context, partition int) (bool, error) {
	at := rows.Address{Partition: partition, Name: stateName}
	row := s.front.Read(ctx, []rows.Address{at})[0]
	if row.Err != nil || row.Value == nil {
		return false, row.Err
	}
	is, err := decodeState(row.Value)

	return err == nil && !is.adopts, s.malformed(err, at)
}

// adoptEach brings what a front had alone to the back, until ctx ends.
func (s *Store) adoptEach(ctx context.Context) {
	for wake.Wait(ctx, s.cfg.DrainEvery, nil) {
		for id := range s.partitions {
			epoch, adopts := s.partitions[id].adopts()
			if !adopts {
				continue
			}
			err := s.adopt(ctx, &s.partitions[id], epoch)
			if err != nil {
				s.cfg.Log.Debug().Err(err).Int("partition", id).Msg("counters: what was in the fast store alone is not in the lasting one yet")
			}
		}
	}
}

// adopt brings everything in a partition of the front to the back, as if it had just changed, some of it at a time. A
// process that ends meanwhile leaves it to the next owner.
func (s *Store) adopt(ctx context.Context, p *partition, epoch uint64) error {
	front, ok := s.front.(Front)
	if !ok {
		return errors.New("the fast store cannot list its rows")
	}
	if s.cfg.MayAdopt != nil {
		if err := s.cfg.MayAdopt(ctx, p.id); err != nil {
			return err
		}
	}

	collections, ids, err := front.Contents(ctx, p.id)
	if err != nil {
		return err
	}
	for _, of := range collections {
		if of == collection || of == dirtyRows {
			continue
		}
		if err := s.adoptCollection(ctx, p, epoch, of); err != nil {
			return err
		}
	}
	p.add(epoch, map[rows.Name][]byte{adoptedName: {1}}, ids)

	if err := s.drainUntil(ctx, func() bool { return p.isClean(adoptedName) }); err != nil {
		return err
	}
	p.adopted(epoch)

	return nil
}

// adoptAtOnce is how many rows wait for the back before more are added.
const adoptAtOnce = 10_000

// adoptCollection has all rows of a collection wait for the back.
func (s *Store) adoptCollection(ctx context.Context, p *partition, epoch uint64, of string) error {
	if err := s.drainUntil(ctx, func() bool { return p.dirty() < adoptAtOnce }); err != nil {
		return err
	}

	// Nothing is drained between the scan and the note of what it found. So a row that changes meanwhile is noted as
	// changed, and its newer value is not replaced.
	s.draining.Lock()
	defer s.draining.Unlock()

	at := rows.Address{Partition: p.id, Name: rows.Name{Collection: of}}
	found := map[rows.Name][]byte{}
	err := s.scanFront(ctx, at, "", func(field string, value []byte) error {
		found[rows.Name{Collection: of, Field: field}] = value
		return nil
	})
	if err != nil {
		return err
	}
	p.add(epoch, found, nil)

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

// adopts returns the claim of a partition, and whether its front has something that the back has not got.
func (p *partition) adopts() (epoch uint64, adopts bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.epoch, p.owner != "" && p.state.adopts
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
		if !p.isDirty(name) {
			p.pending[name] = value
		}
	}
	p.ids = append(p.ids, ids...)
}

func (p *partition) isClean(name rows.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return !p.isDirty(name)
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
