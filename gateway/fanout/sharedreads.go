package fanout

import (
	"context"
	"time"

	"golang.org/x/sync/singleflight"
)

// SharedReads makes concurrent reads of one thing one call of the store. The zero SharedReads is ready for use.
type SharedReads[T any] struct{ group singleflight.Group }

// sharedRead is what one call of the store returned.
type sharedRead[T any] struct {
	began  time.Time
	values []T
}

// Read returns what read returns for one caller, or for another one whose call is under way. That call must not have
// begun longer than lag ago: a store that falls silent, or a process that is suspended meanwhile, may answer late. The
// result is shared, so nobody changes it.
func (s *SharedReads[T]) Read(
	ctx context.Context, key string, lag, limit time.Duration, read func(context.Context) ([]T, error),
) ([]T, error) {
	oldest := time.Now().Add(-lag)

	for {
		shared := s.group.DoChan(key, func() (any, error) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit) // the first caller may leave
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
			// It began too long ago. The next round begins a call, or shares one that is younger.
		}
	}
}

// Forget makes those who read from now on share no call that is under way.
func (s *SharedReads[T]) Forget(key string) { s.group.Forget(key) }
