package notifier

import (
	"math"

	"headcount/internal/wake"
	"headcount/presence"
	"headcount/unread"
)

// page is a page that connected users follow.
type page struct {
	page    string
	level   unread.Level // applied to all follows
	follows []*follow
	newest  unread.Level // received; applied once its authors were read
	authors int64        // the own changes of every follow are complete up to this Level.By
	lowest  int64        // the lowest such Level.By of a follow that was added since the authors were last read
}

// Update implements fanout.Watcher, for the levels of pages and the records of users.
// Updates may arrive in any order, and repeatedly.
func (s *Sums) Update(u presence.Update) {
	switch u.Kind {
	case unread.KindLevel:
		s.updateLevel(u)
	case unread.KindRecord:
		s.updateRecord(u)
	}
}

func (s *Sums) updateLevel(u presence.Update) {
	l, ok := unread.LevelOf(u)

	s.mu.Lock()
	defer s.mu.Unlock()

	p := s.pages[u.Name()]
	if ok && p != nil {
		s.levelLocked(p, l, math.MaxInt64)
	}
}

func (s *Sums) updateRecord(u presence.Update) {
	user, ok := unread.UserOf(u)

	s.mu.Lock()
	defer s.mu.Unlock()

	f := s.users[user]
	if !ok || f == nil {
		return
	}

	if !f.known || u.Version.Compare(f.version) > 0 {
		s.staleUsers[f] = struct{}{}
		wake.Signal(s.wake)
	}
}

// levelLocked handles a level of a page that was received, or that was read together with a follow
// whose own changes are complete up to Level.By ownUpTo; math.MaxInt64 means that there is no
// such follow.
func (s *Sums) levelLocked(p *page, l unread.Level, ownUpTo int64) {
	p.lowest = min(p.lowest, ownUpTo)
	if l.Incarnation <= p.level.Incarnation { // otherwise own belongs to the level that is applied below
		p.authors = min(p.authors, ownUpTo)
	}

	if l.Newer(p.newest) {
		p.newest = l
	}

	n := p.newest
	same := n.Incarnation == p.level.Incarnation
	if same {
		n.Before = p.level.Before // a published level does not have it
	}

	// The sums need no read of the authors while every own change up to this level is known.
	authorsKnown := same && n.By <= p.authors
	neverChanged := n.By == 0 && p.level.Incarnation == 0
	if !authorsKnown && !neverChanged {
		s.stalePages[p] = struct{}{}
		wake.Signal(s.wake)
		return
	}

	if n.Newer(p.level) {
		s.applyLocked(p, n, nil)
		p.authors = min(p.authors, n.By)
	}
}

// applyLocked makes l the page's level, and sends the new sum to the connections of each user
// whose sum changes. owns has the users' own changes.
func (s *Sums) applyLocked(p *page, l unread.Level, owns map[unread.User]unread.Own) {
	p.level = l
	for _, fo := range p.follows {
		if fo.ownOf != l.Incarnation {
			fo.own = unread.Own{}
			fo.ownOf = l.Incarnation
		}
		if own, ok := owns[fo.user.user]; ok && own.Changes >= fo.own.Changes {
			fo.own = own
		}

		count := fo.stored.Unread(l, fo.own)
		if count == fo.count {
			continue
		}

		diff := count - fo.count
		fo.count = count
		if fo.user.adopting {
			continue
		}

		fo.user.sum += diff
		for _, c := range fo.user.conns {
			c.SendUnread(fo.user.sum, false)
		}
	}
}
