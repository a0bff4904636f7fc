package notifier

import (
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
	"headcount/unread"
)

// page is a page that connected users follow.
type page struct {
	page    string
	follows []*follow
	newest  unread.Level // received or read; counted in each follow whose own changes reach it
	vain    int          // how often in a row the store was asked for the authors of newest in vain
	again   *time.Timer  // asks once more; nil: nothing was asked in vain yet
}

// own has a user's own changes of a page. A level is counted for a user only if the own changes reach it. Otherwise
// users would find their own changes unread, or changes from before a loss of data.
type own struct {
	incarnation uint64 // of the level up to which they are complete
	by          int64  // its Level.By
	changes     int64  // how many they are; a few may be later than that level
}

// reaches reports whether the own changes are complete up to a level.
func (o *own) reaches(l unread.Level) bool { return o.incarnation == l.Incarnation && l.By <= o.by }

// learn applies own changes that were read and are complete up to a level.
func (o *own) learn(l unread.Level, changes int64) {
	was := *o
	*o = own{l.Incarnation, l.By, changes}

	// Within an incarnation own changes only grow, so fewer of them were read earlier.
	if was.incarnation == l.Incarnation {
		o.by = max(o.by, was.by)
		o.changes = max(o.changes, was.changes)
	}
}

// continues reports whether o is complete up to level l together with the changes between a Level.By and l.
func (o *own) continues(since int64, l unread.Level) bool {
	if o.incarnation == l.Incarnation {
		return since <= o.by
	}
	return o.incarnation < l.Incarnation && since == 0 // all changes of a newer incarnation
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
	if !ok || p == nil {
		return
	}

	was := p.newest
	isNews := p.receive(l)
	if !isNews {
		return
	}

	// Without a look at each follow: nobody's own changes reach a new change with an author.
	hasAuthors := l.Incarnation != was.Incarnation || l.By > was.By
	if hasAuthors || !s.countLocked(p, l) {
		s.askLocked(p)
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

	s.staleUsers[f] = 0
	wake.Signal(s.wake)
}

// receive handles a level of the page that was published or read. It reports whether the level is the newest now.
func (p *page) receive(l unread.Level) (isNews bool) {
	// A published level has no Before. It is the same for all levels of an incarnation.
	if l.Incarnation == p.newest.Incarnation {
		p.newest.Before = max(p.newest.Before, l.Before)
		l.Before = p.newest.Before
	}

	isNews = l.Newer(p.newest)
	if isNews {
		p.newest = l
		p.vain = 0 // the store was not asked for this one
	}

	return isNews
}

// readLocked handles the level that was read together with a follow and the user's own changes.
func (s *Sums) readLocked(fo *follow, l unread.Level) {
	p := fo.page
	isComplete := true
	// The read may know a newer level before its publication arrives.
	if p.receive(l) {
		isComplete = s.countLocked(p, l)
	} else {
		isComplete = fo.countNewest(l)
	}

	// After a question in vain a pause is under way.
	if !isComplete && p.vain == 0 {
		s.askLocked(p)
	}
}

// countLocked counts each follow of a page, see countNewest, and sends the new sum to the connections of each user
// whose sum changes. It reports whether all own changes reach the newest level.
func (s *Sums) countLocked(p *page, read unread.Level) (isComplete bool) {
	isComplete = true
	for _, fo := range p.follows {
		before := fo.count
		isComplete = fo.countNewest(read) && isComplete
		diff := fo.count - before

		// While follows are being replaced, the sum is wrong and is added up at the end.
		if diff != 0 && !fo.user.replacing {
			fo.user.setSum(fo.user.sum + diff)
		}
	}

	return isComplete
}

// askLocked has Run read the authors of a page.
func (s *Sums) askLocked(p *page) {
	// A page whose read failed waits for its turn.
	if _, waits := s.stalePages[p]; !waits {
		s.stalePages[p] = 0
	}
	wake.Signal(s.wake)
}

// askedInVainLocked has Run read the authors of a page again after a pause. Mostly the store does not have the level
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

// countNewest counts what is unread at the newest level of the page. If the own changes do not reach that, it takes the
// level that was just read; if they do not reach this either, the count stays. It reports whether they reach the
// newest.
func (fo *follow) countNewest(read unread.Level) (reached bool) {
	newest := fo.page.newest
	if fo.own.reaches(newest) {
		fo.recount(newest)
		return true
	}

	if fo.own.reaches(read) {
		fo.recount(read)
	}
	return false
}

// recount counts what is unread at a level.
func (fo *follow) recount(l unread.Level) {
	fo.count = fo.stored.Unread(l, unread.Own{Changes: fo.own.changes})
}

// setSum sets the sum, and sends it to the user's connections.
func (f *Sum) setSum(sum int64) {
	f.sum = sum
	for _, c := range f.conns {
		c.SendUnread(sum, false)
	}
}
