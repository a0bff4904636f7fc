package notifier

import (
	"math"
	"time"

	"headcount/internal/outage"
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
	vain    int          // how often in a row the store was asked for the authors and did not have newest
	again   *time.Timer  // asks once more; nil: nothing was asked in vain yet
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
	if f.known && u.Version.Compare(f.version) <= 0 {
		return // it is read already
	}

	s.staleUsers[f] = struct{}{}
	wake.Signal(s.wake)
}

// levelLocked handles a level of a page that was received, or that was read together with a follow
// whose own changes are complete up to Level.By ownUpTo; math.MaxInt64 means that there is no
// such follow.
func (s *Sums) levelLocked(p *page, l unread.Level, ownUpTo int64) {
	p.lowest = min(p.lowest, ownUpTo)
	// If the incarnation is newer, ownUpTo belongs to the level that is applied below, not to the present one.
	if l.Incarnation <= p.level.Incarnation {
		p.authors = min(p.authors, ownUpTo)
	}
	if l.Newer(p.newest) {
		p.newest = l
		p.vain = 0 // the store was not asked for this one
	}

	n := p.newest
	if n.Incarnation == p.level.Incarnation {
		n.Before = p.level.Before // a published level does not have it
	}
	// Without their authors, users would find their own changes unread.
	if !p.knowsAuthors(n) {
		// After a question in vain a pause is under way.
		if p.vain == 0 {
			s.askLocked(p)
		}
		return
	}

	p.vain = 0
	if n.Newer(p.level) {
		s.applyLocked(p, n, nil)
		p.authors = min(p.authors, n.By)
	}
}

// askLocked has Run read the authors of a page.
func (s *Sums) askLocked(p *page) {
	s.stalePages[p] = struct{}{}
	wake.Signal(s.wake)
}

// askedInVainLocked has Run read the authors of a page again after a pause, because the store does not have the level
// that was received: it has lost it. A store that knows of the loss soon gives all levels another incarnation. To ask
// without a pause until then would keep both busy.
func (s *Sums) askedInVainLocked(p *page) {
	p.vain++
	pause := outage.Pause(p.vain)
	if p.again != nil {
		p.again.Reset(pause)
		return
	}

	p.again = time.AfterFunc(pause, func() {
		s.mu.Lock()
		defer s.mu.Unlock()

		isHere := s.pages[p.page] == p
		if isHere && p.vain > 0 {
			s.askLocked(p)
		}
	})
}

// knowsAuthors reports whether the own changes of every follow are complete up to a level, so that it can be applied.
func (p *page) knowsAuthors(l unread.Level) bool {
	return l.Incarnation == p.level.Incarnation && l.By <= p.authors
}

// applyLocked makes l the page's level, and sends the new sum to the connections of each user
// whose sum changes. owns has the users' own changes.
func (s *Sums) applyLocked(p *page, l unread.Level, owns map[unread.User]unread.Own) {
	p.level = l
	for _, fo := range p.follows {
		// Own changes of another incarnation say nothing about this one.
		if fo.ownOf != l.Incarnation {
			fo.setOwn(unread.Own{}, l.Incarnation)
		}
		// A user's own changes only grow, so fewer of them were read earlier.
		own, ok := owns[fo.user.user]
		if ok && own.Changes >= fo.own.Changes {
			fo.own = own
		}

		diff := fo.recount(l)
		// While follows are being replaced, the sum is wrong and is added up at the end.
		if diff != 0 && !fo.user.replacing {
			fo.user.setSum(fo.user.sum + diff)
		}
	}
}

// setOwn sets the user's own changes in an incarnation of the page's level.
func (fo *follow) setOwn(own unread.Own, incarnation uint64) {
	fo.own = own
	fo.ownOf = incarnation
}

// recount counts what is unread at a level, and returns by how much that has changed.
func (fo *follow) recount(l unread.Level) (diff int64) {
	before := fo.count
	fo.count = fo.stored.Unread(l, fo.own)

	return fo.count - before
}

// setSum sets the sum, and sends it to the user's connections.
func (f *Sum) setSum(sum int64) {
	f.sum = sum
	for _, c := range f.conns {
		c.SendUnread(sum, false)
	}
}
