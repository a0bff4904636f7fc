package notifier

import (
	"context"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/unread"
)

// Run reads stale users and pages again, until ctx ends.
func (s *Sums) Run(ctx context.Context) {
	retry := time.NewTimer(time.Hour)
	retry.Stop()

	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-retry.C:
		}

		err := s.catchUp(ctx)
		if err == nil || ctx.Err() != nil {
			failed = 0
			continue
		}

		failed++
		if failed == 1 {
			s.cfg.Log.Warn().Err(err).Msg("unread counts could not be read; retrying")
		}
		retry.Reset(outage.Pause(failed))
	}
}

// catchUp reads all stale users and pages. A user or page that cannot be read stays stale for
// the next call.
func (s *Sums) catchUp(ctx context.Context) error {
	for {
		// Until nothing is left, because a change during a read marks its user or page again.
		users, pages := s.todo()
		if len(users)+len(pages) == 0 {
			return nil
		}

		if err := s.readUsers(ctx, users); err != nil {
			return err
		}
		for _, p := range pages {
			if err := s.readAuthors(ctx, p); err != nil {
				return err
			}
		}
	}
}

// todo returns stale users, at most readUsers, and all stale pages. What could not be read before comes one by one, and
// only when nothing else is left: it may fail for long, and must not hold up the others.
func (s *Sums) todo() (users []*Sum, pages []*page) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for f, failed := range s.staleUsers {
		if failed == 0 && len(users) < readUsers {
			users = append(users, f)
		}
	}
	for p, failed := range s.stalePages {
		if failed == 0 {
			pages = append(pages, p)
		}
	}

	if len(users)+len(pages) == 0 {
		return s.failedLocked()
	}
	return users, pages
}

// failedLocked returns the stale user or page whose read failed longest ago, so that each gets its turn.
func (s *Sums) failedLocked() (users []*Sum, pages []*page) {
	first := s.failures + 1
	for f, failed := range s.staleUsers {
		if failed < first {
			first = failed
			users = []*Sum{f}
		}
	}
	for p, failed := range s.stalePages {
		if failed < first {
			first = failed
			users = nil
			pages = []*page{p}
		}
	}

	return users, pages
}

func (s *Sums) readUsers(ctx context.Context, users []*Sum) error {
	if len(users) == 0 {
		return nil
	}

	ids := make([]unread.User, len(users))
	s.mu.Lock()
	for i, f := range users {
		ids[i] = f.user
		// Before the read, so that a later change marks the user again.
		delete(s.staleUsers, f)
	}
	s.mu.Unlock()

	rctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	states, err := s.followService.Read(rctx, ids...)

	s.mu.Lock()
	defer s.mu.Unlock()

	if err != nil {
		s.failures++
	}
	for i, f := range users {
		switch {
		case s.users[f.user] != f: // the user has gone
		case err != nil:
			s.staleUsers[f] = s.failures
		default:
			s.replace(f, states[i])
		}
	}

	return err
}

// readAuthors reads the own changes that do not reach the newest level of a page, and counts the level in their
// follows.
func (s *Sums) readAuthors(ctx context.Context, p *page) error {
	since, wanted, asked := s.beginAuthors(p)
	if len(asked) == 0 {
		return nil // no user follows it any more, or their own changes were read with their records
	}

	users := make([]unread.User, len(asked))
	for i, fo := range asked {
		users[i] = fo.user.user
	}
	rctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	l, owns, err := s.cfg.Store.Authors(rctx, p.page, since, users)

	s.mu.Lock()
	defer s.mu.Unlock()

	// The last follower of the page has gone, and the next one has made another entry.
	if s.pages[p.page] != p {
		return err
	}
	if err != nil {
		s.failures++
		s.stalePages[p] = s.failures
		return err
	}

	// A follow that was added during the read is asked about next. So is one whose own changes were read meanwhile on
	// the other side of a loss of data, or the store has lost data since the question.
	for _, fo := range asked {
		if fo.own.continues(since, l) {
			fo.own.learn(l, owns[fo.user.user].Changes)
		}
	}

	p.receive(l)
	isComplete := s.countLocked(p, l)

	hasNews := p.newest.Newer(wanted)
	switch {
	case isComplete:
		p.vain = 0
	case hasNews: // came during the read, or with it
		s.askLocked(p)
	default:
		s.askedInVainLocked(p)
	}

	return nil
}

// beginAuthors returns the follows whose own changes do not reach the newest level of the page, that level, and the
// Level.By after which its authors have to be read.
func (s *Sums) beginAuthors(p *page) (since int64, wanted unread.Level, asked []*follow) {
	s.mu.Lock()
	defer s.mu.Unlock()

	delete(s.stalePages, p)
	if s.pages[p.page] != p {
		return 0, wanted, nil
	}

	wanted = p.newest
	since = wanted.By
	for _, fo := range p.follows {
		if fo.own.reaches(wanted) {
			continue
		}
		asked = append(asked, fo)

		// In another incarnation own changes are counted from the beginning.
		known := int64(0)
		if fo.own.incarnation == wanted.Incarnation {
			known = fo.own.by
		}
		since = min(since, known)
	}

	if len(asked) == 0 {
		p.vain = 0 // otherwise the next follow would wait for a question
	}

	return since, wanted, asked
}

// StoreBack makes Run read every user again, after an outage or a loss of data of the store.
func (s *Sums) StoreBack() {
	s.mu.Lock()
	defer s.mu.Unlock()

	for _, f := range s.users {
		s.staleUsers[f] = 0
	}
	for p := range s.stalePages {
		s.stalePages[p] = 0
	}
	wake.Signal(s.wake)
}
