package node

import (
	"cmp"
	"context"
	"time"

	"headcount/presence"
)

// lastSeenTimeout bounds the wait for the store's part of an answer, so that an unavailable store does not delay the
// answer which users are present. It is shorter than the second after which redisconn reports a failure of Redis.
const lastSeenTimeout = 900 * time.Millisecond

// usersRequest asks an actor about users of its partition.
type usersRequest struct {
	users  []presence.User
	answer chan<- usersAnswer // has room for the answer
}

func (c *usersRequest) deliver(p *partition) { c.answer <- p.answer(c.users) }

type usersAnswer struct {
	states []presence.UserState // in the order of usersRequest.users
	err    error
}

// Users returns the states of users, in their order. Its error is presence.ErrNotOwner if the node does not own one of
// their partitions, or does not know all users of it yet, or ctx's error.
func (n *Node) Users(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	// Memory has the state from before the suspension, and another node may own the partitions by now. A user who came
	// back there would be absent here.
	if n.hasStoodStill() {
		return nil, presence.ErrNotOwner
	}

	places := map[int][]int{} // of users, by partition
	for i, u := range users {
		id := u.Partition(len(n.actors))
		places[id] = append(places[id], i)
	}

	// Each owner answers for its own users, and the answers are put together in the caller's order.
	answers := map[int]chan usersAnswer{}
	actors := map[int]*partition{}
	for id, at := range places {
		p := n.actors[id].Load()
		if p == nil {
			return nil, presence.ErrNotOwner
		}

		some := make([]presence.User, len(at))
		for i, place := range at {
			some[i] = users[place]
		}

		answer := make(chan usersAnswer, 1)
		if err := p.ask(ctx, &usersRequest{some, answer}); err != nil {
			return nil, err
		}

		answers[id] = answer
		actors[id] = p
	}

	// All actors have their questions by now, so the slowest one determines the wait, not their sum.
	states := make([]presence.UserState, len(users))
	for id, at := range places {
		a, err := await(ctx, actors[id], answers[id])
		err = cmp.Or(err, a.err)
		if err != nil {
			return nil, err
		}

		for i, place := range at {
			states[place] = a.states[i]
		}
	}

	n.lastSeen(ctx, users, states)
	return states, nil
}

// lastSeen asks the store when the absent users departed. If the store does not answer, those times stay zero.
func (n *Node) lastSeen(ctx context.Context, users []presence.User, states []presence.UserState) {
	if n.cfg.LastSeen == nil {
		return
	}

	var places []int
	var absent []presence.User
	for i, s := range states {
		// A departure that the owner still has is newer than any in the store.
		if s.Since.IsZero() && s.LastSeen.IsZero() {
			places = append(places, i)
			absent = append(absent, users[i])
		}
	}

	if len(absent) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, lastSeenTimeout)
	defer cancel()

	times, err := n.cfg.LastSeen.LastSeen(ctx, absent)
	if err != nil {
		n.cfg.Log.Debug().Err(err).Msg("the store could not be asked when users were last present")
		return
	}

	for i, place := range places {
		states[place].LastSeen = times[i]
	}
}

// answer answers a question about users. Until all gateways have reported their users, the actor cannot tell who is
// absent.
func (p *partition) answer(users []presence.User) usersAnswer {
	if !p.takeover.complete {
		return usersAnswer{err: presence.ErrNotOwner}
	}

	states := make([]presence.UserState, len(users))
	for i, u := range users {
		first := p.users[u]
		if first == nil {
			states[i].LastSeen = p.out.departed(u)
			continue
		}

		// Two tabs at two gateways may be on one page.
		pages := map[*page]struct{}{}
		for s := first; s != nil; s = s.next {
			for _, pp := range s.list {
				pages[pp.page] = struct{}{}
			}
		}

		states[i] = presence.UserState{Since: time.Unix(int64(first.since), 0), Pages: len(pages)}
	}

	return usersAnswer{states: states}
}
