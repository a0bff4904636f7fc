package fanout

import (
	"context"
	"time"

	"golang.org/x/sync/singleflight"
)

// SharedReads lets concurrent reads of the same key share one call of the store. The zero value is ready for use.
type SharedReads[T any] struct{ group singleflight.Group }

// sharedRead is the result of one call of the store.
type sharedRead[T any] struct {
	began  time.Time
	values []T
}

// Read returns the result of read, or that of another caller's read in progress. The shared read must not have begun
// longer than lag ago, because a store that stalls, or a process that is suspended, may deliver its result late. The
// result is shared, so callers must not modify it.
func (s *SharedReads[T]) Read(
	ctx context.Context, key string, lag, limit time.Duration, read func(context.Context) ([]T, error),
) ([]T, error) {
	oldest := time.Now().Add(-lag)

	for {
		shared := s.group.DoChan(key, func() (any, error) {
			// The call outlives the first caller, because others may wait for it.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
			defer cancel()

			began := time.Now()
			values, err := read(ctx)
			return sharedRead[T]{began, values}, err
		})

		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case r := <-shared:
			is := r.Val.(sharedRead[T])
			if r.Err != nil || !is.began.Before(oldest) {
				return is.values, r.Err
			}
			// The call began too long ago. The next round begins another one, or shares one that is younger.
		}
	}
}

// Forget keeps later reads of key from sharing a call that is in progress now.
func (s *SharedReads[T]) Forget(key string) { s.group.Forget(key) }
