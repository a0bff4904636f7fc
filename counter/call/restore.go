package call

import (
	"context"
	"sync"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

var _ counter.Restorer = (*Store)(nil)

// Restore implements counter.Restorer. It restores all counters of a partition or none; after an error some partitions
// may have been restored.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	by := map[int]*owner.Restore{}
	for i := range copies {
		partition := placeOfKind(copies[i].Key, copies[i].Kind)
		if by[partition] == nil {
			by[partition] = &owner.Restore{Rules: rules}
		}
		by[partition].Copies = append(by[partition].Copies, copies[i])
	}

	return s.restore(ctx, by)
}

// RestoreDeleted implements counter.Restorer.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	by := map[int]*owner.Restore{}
	for partition := range rows.Partitions {
		by[partition] = &owner.Restore{Deleted: deleted}
	}
	_, err := s.restore(ctx, by)

	return err
}

func (s *Store) restore(ctx context.Context, by map[int]*owner.Restore) (restored int, err error) {
	var mu sync.Mutex // guards the results
	var wg sync.WaitGroup
	// Each partition has an owner of its own, so no part has to wait for another one.
	for partition, part := range by {
		wg.Go(func() {
			answer, failed := s.do(ctx, owner.Call{Partition: partition, More: &owner.More{Restore: part}})
			mu.Lock()
			defer mu.Unlock()
			if failed == nil {
				restored += answer.More.Restored
			}
			if failed != nil {
				err = failed
			}
		})
	}
	wg.Wait()

	return restored, err
}
