package notifier

import (
	"math"

	"headcount/presence"
	"headcount/unread"
)

// page is a page that users here follow.
type page struct {
	page    string
	level   unread.Level
	follows []*follow
	newest  unread.Level // the newest level received; its authors may have to be read before it is applied
	authors int64        // up to this Level.By, own is right in every follow
	lowest  int64        // the smallest bound for authors since the authors were last read
}

// Update implements fanout.Watcher, for the levels of pages and the records of users.
// Updates may come in any order, repeated or not.
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
	if p := s.pages[u.Name()]; ok && p != nil {
		s.level(p, l, math.MaxInt64)
	}
}

func (s *Sums) updateRecord(u presence.Update) {
	user, ok := unread.UserOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.users[user]; ok && f != nil && (!f.known || u.Version.Compare(f.version) > 0) {
		s.staleUsers[f] = struct{}{}
		s.wakeUp()
	}
}

// level takes a level of a page. Up to the Level.By right, own is right in the follow
// that the level came with; math.MaxInt64 means that it came with none. The caller
// holds mu.
func (s *Sums) level(p *page, l unread.Level, ownUpTo int64) {
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
		n.Before = p.level.Before // if n was heard, it does not say so
	}
	switch {
	case same && n.By <= p.authors, n.By == 0 && p.level.Incarnation == 0:
		if n.Newer(p.level) {
			s.apply(p, n, nil)
			p.authors = min(p.authors, n.By)
		}
	default:
		s.stalePages[p] = struct{}{}
		s.wakeUp()
	}
}

// apply makes l the page's level. owns has the changes that users made themselves.
// apply sends the new sum to the connections of each user whose sum changes.
func (s *Sums) apply(p *page, l unread.Level, owns map[unread.User]unread.Own) {
	p.level = l
	for _, fo := range p.follows {
		if fo.ownOf != l.Incarnation {
			fo.own, fo.ownOf = unread.Own{}, l.Incarnation
		}
		if own, ok := owns[fo.of.user]; ok && own.Changes >= fo.own.Changes {
			fo.own = own
		}
		count := fo.stored.Unread(l, fo.own)
		if count == fo.count {
			continue
		}
		diff := count - fo.count
		fo.count = count
		if fo.of.adopting {
			continue
		}
		fo.of.sum += diff
		for _, c := range fo.of.conns {
			c.Tell(fo.of.sum, false)
		}
	}
}
