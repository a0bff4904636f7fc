package member

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"golang.org/x/sync/errgroup"

	"headcount/internal/outage"
	"headcount/presence"
)

// Users returns the states of up to presence.MaxAsked users of this region, in their order: one call for each
// owner of their partitions. While a partition changes its owner, it asks again until ctx ends.
func (m *Member) Users(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	for {
		states, err := m.usersOnce(ctx, users)
		if !errors.Is(err, presence.ErrNotOwner) {
			return states, err
		}

		if !outage.Sleep(ctx, holdRetry) {
			return nil, fmt.Errorf("users: %w: %w", presence.ErrUnavailable, err)
		}
	}
}

func (m *Member) usersOnce(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	t := m.table.Load()
	if t == nil {
		return nil, presence.ErrNotOwner
	}

	places := map[string][]int{} // of users, by owner
	for i, u := range users {
		owner, ok := t.Node(u.Partition(m.partitions))
		if !ok {
			return nil, presence.ErrNotOwner
		}
		places[owner] = append(places[owner], i)
	}

	states := make([]presence.UserState, len(users))
	// Half an answer is of no use, so the first failure ends the other calls.
	calls, ctx := errgroup.WithContext(ctx)
	for owner, at := range places {
		calls.Go(func() error {
			some := make([]presence.User, len(at))
			for i, place := range at {
				some[i] = users[place]
			}

			found, err := m.usersOf(ctx, owner, some)
			if err != nil {
				return err
			}

			for i, place := range at {
				states[place] = found[i]
			}
			return nil
		})
	}

	if err := calls.Wait(); err != nil {
		return nil, err
	}
	return states, nil
}

func (m *Member) usersOf(ctx context.Context, owner string, users []presence.User) ([]presence.UserState, error) {
	if owner == m.self.Name {
		return m.parts.Node.Users(ctx, users)
	}
	return m.parts.Calls.Users(ctx, owner, users)
}

// Present returns which of up to presence.MaxAsked users are on a page, by one call for each owner of their partitions.
// It leaves out those whose owner is not known, or does not answer.
func (m *Member) Present(ctx context.Context, users []presence.User) map[presence.User]bool {
	t := m.table.Load()
	if t == nil {
		return nil
	}

	of := map[string][]presence.User{} // by owner
	for _, u := range users {
		owner, ok := t.Node(u.Partition(m.partitions))
		if ok {
			of[owner] = append(of[owner], u)
		}
	}

	var mu sync.Mutex
	present := map[presence.User]bool{}
	var calls sync.WaitGroup
	for owner, some := range of {
		calls.Go(func() {
			states, err := m.usersOf(ctx, owner, some)
			if err != nil {
				return
			}

			mu.Lock()
			defer mu.Unlock()
			for i, state := range states {
				present[some[i]] = !state.Since.IsZero()
			}
		})
	}
	calls.Wait()

	return present
}

// Connected returns the users who are on a page by a connection to this process, with their qualified names. A user
// with several connections may come several times.
func (m *Member) Connected() iter.Seq2[presence.User, string] {
	// Without the role no user is connected.
	if m.parts.Gateway == nil {
		return func(func(presence.User, string) bool) {}
	}

	return m.parts.Gateway.Connected()
}

// ReceiveUsers answers another process about users whose partitions this one owns.
func (m *Member) ReceiveUsers(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	if m.parts.Node == nil {
		return nil, presence.ErrNotOwner
	}
	return m.parts.Node.Users(ctx, users)
}
