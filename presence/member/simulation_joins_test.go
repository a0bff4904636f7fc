package member

import (
	"context"
	"sync"

	"headcount/presence"
	"headcount/presence/presencemem"
)

// past knows which users are included in every version of a page's count. With it the test can check that a count that
// a user receives includes the user.
type past struct {
	*sync.Mutex
	members map[int][]presence.Member // by partition
	users   map[string]map[presence.Version]map[presence.User]struct{}
	counts  map[presence.Count]struct{} // what was counted: pages, versions and numbers of users
}

func newPast() past {
	return past{
		Mutex:   &sync.Mutex{},
		members: map[int][]presence.Member{},
		users:   map[string]map[presence.Version]map[presence.User]struct{}{},
		counts:  map[presence.Count]struct{}{},
	}
}

// write makes changes, and records the versions that they get. The lock is held meanwhile, because a user may receive a
// version before the write has returned.
func (p past) write(
	ctx context.Context, store *presencemem.Store, changes []presence.Change,
) (outcomes []presence.Outcome) {
	p.Lock()
	defer p.Unlock()

	outcomes = store.Write(ctx, changes)
	for i, c := range changes {
		if outcomes[i].Err != nil {
			continue
		}

		// The members are read from the store, not computed from the change: the test must not repeat the store's
		// logic.
		snaps, err := store.Load(context.Background(), []presence.Claim{c.Claim})
		must(err)
		p.members[c.Partition] = snaps[0].Members
	}

	// Counts are recorded only now, with all members known: one count may include several partitions.
	for _, o := range outcomes {
		for _, c := range o.Counts {
			p.record(c)
		}
	}

	return outcomes
}

// record records which users the count includes.
func (p past) record(c presence.Count) {
	users := map[presence.User]struct{}{}
	for _, members := range p.members {
		for _, m := range members {
			if m.Page == c.Page {
				users[m.User] = struct{}{}
			}
		}
	}

	versions := p.users[c.Page]
	if versions == nil {
		versions = map[presence.Version]map[presence.User]struct{}{}
		p.users[c.Page] = versions
	}
	versions[c.Version] = users
	p.counts[presence.Count{Page: c.Page, Version: c.Version, Users: c.Users}] = struct{}{}
}

// lacks reports whether the user is missing from that version of the page's count. A version that no write has made
// lacks everybody.
func (p past) lacks(page string, v presence.Version, u presence.User) bool {
	p.Lock()
	defer p.Unlock()

	_, has := p.users[page][v][u]
	return !has
}

// isMade reports whether a write has made that count, under that version.
func (p past) isMade(page string, v presence.Version, users int64) bool {
	p.Lock()
	defer p.Unlock()

	_, is := p.counts[presence.Count{Page: page, Version: v, Users: users}]
	return is
}
