package notifier

import (
	"context"
	"math"
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

// todo returns stale users, at most readUsers, and all stale pages.
func (s *Sums) todo() (users []*Sum, pages []*page) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for f := range s.staleUsers {
		if len(users) == readUsers {
			break
		}
		users = append(users, f)
	}
	for p := range s.stalePages {
		pages = append(pages, p)
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

	for i, f := range users {
		switch {
		case s.users[f.user] != f: // the user has gone
		case err != nil:
			s.staleUsers[f] = struct{}{}
		default:
			s.replace(f, states[i])
		}
	}

	return err
}

// readAuthors reads the authors of a page's changes since its own changes are known, and applies the level.
func (s *Sums) readAuthors(ctx context.Context, p *page) error {
	since, wanted, users := s.beginAuthors(p)
	if len(users) == 0 {
		return nil // no user follows it any more
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
		s.stalePages[p] = struct{}{}
		return err
	}

	// The store has lost data since the question. A number of the old incarnation leaves out own changes of the new
	// one, so they are asked for from the beginning.
	if since > 0 && l.Incarnation != p.level.Incarnation {
		s.levelLocked(p, l, math.MaxInt64)
		return nil
	}

	// A follow that was read meanwhile may have brought a newer level.
	if !p.level.Newer(l) {
		s.applyLocked(p, l, owns)
		// A follow that was added during the read may know fewer own changes.
		p.authors = min(p.lowest, l.By)
	}

	lost := wanted.Newer(l)
	if lost && !p.newest.Newer(wanted) && !p.knowsAuthors(wanted) {
		s.askedInVainLocked(p)
		return nil
	}

	// A newer level may have come during the read, which had to wait for it.
	p.vain = 0
	s.levelLocked(p, l, math.MaxInt64)

	return nil
}

// beginAuthors returns the Level.By after which the authors of a page have to be read, the level that they are needed
// for, and the users that follow the page.
func (s *Sums) beginAuthors(p *page) (since int64, wanted unread.Level, users []unread.User) {
	s.mu.Lock()
	defer s.mu.Unlock()

	delete(s.stalePages, p)
	if s.pages[p.page] != p {
		return 0, wanted, nil
	}

	// In another incarnation own changes are counted from the beginning.
	if p.newest.Incarnation == p.level.Incarnation {
		since = p.authors
	}
	p.lowest = math.MaxInt64 // a follow that is added during the read lowers it again
	users = make([]unread.User, len(p.follows))
	for i, fo := range p.follows {
		users[i] = fo.user.user
	}

	return since, p.newest, users
}

// StoreBack makes Run read every user again, after an outage or a loss of data of the store.
func (s *Sums) StoreBack() {
	s.mu.Lock()
	defer s.mu.Unlock()

	for _, f := range s.users {
		s.staleUsers[f] = struct{}{}
	}
	wake.Signal(s.wake)
}
