package node

import (
	"context"
	"time"

	"headcount/presence"
)

// usersCall asks an actor about users of its partition.
type usersCall struct {
	users  []presence.User
	answer chan<- usersAnswer // has room for the answer
}

type usersAnswer struct {
	states []presence.UserState // in the order of usersCall.users
	err    error
}

// Users returns the states of users, in their order. Its error is presence.ErrNotOwner if the node does not own one of their
// partitions, or does not know all users of it yet, or ctx's error.
func (n *Node) Users(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	places := map[int][]int{} // of users, by partition
	for i, u := range users {
		id := u.Partition(len(n.actors))
		places[id] = append(places[id], i)
	}
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
		select {
		case p.mail <- &usersCall{some, answer}:
		case <-p.ended:
			return nil, presence.ErrNotOwner
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		answers[id], actors[id] = answer, p
	}
	states := make([]presence.UserState, len(users))
	for id, at := range places {
		select {
		case a := <-answers[id]:
			if a.err != nil {
				return nil, a.err
			}
			for i, place := range at {
				states[place] = a.states[i]
			}
		case <-actors[id].ended:
			return nil, presence.ErrNotOwner
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return states, nil
}

// answer answers a call about users. While gateways have yet to report who is there, the actor does not know who is not.
func (p *partition) answer(c *usersCall) {
	if !p.complete() {
		c.answer <- usersAnswer{err: presence.ErrNotOwner}
		return
	}
	states := make([]presence.UserState, len(c.users))
	for i, u := range c.users {
		first := p.users[u]
		if first == nil {
			continue
		}
		pages := map[*page]struct{}{}
		for s := first; s != nil; s = s.next {
			for _, pp := range s.list {
				pages[pp.page] = struct{}{}
			}
		}
		states[i] = presence.UserState{Since: time.Unix(int64(first.since), 0), Pages: len(pages)}
	}
	c.answer <- usersAnswer{states: states}
}
