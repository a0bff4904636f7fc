package unread

import (
	"context"
	"sync"
	"time"

	"headcount/presence/unread"
)

type presenceOf struct {
	user unread.User
	page string
}

// Moved says that a connection of the user has joined or left a page. Its Joined must
// say so before: then either Moved sees that the user follows something, or whoever
// finds that out sees where the user is. Joins of those who follow nothing, which are
// most, do not wait for each other.
func (s *Sums) Moved(f *Sum, name string) {
	if !f.follower.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if fo := f.follows[name]; fo != nil {
		s.attend(fo)
	}
}

// attend notes that the store must learn whether the user is present here. It does
// nothing if the follow is not away-only, or the store knows it already. The caller
// holds mu.
func (s *Sums) attend(fo *follow) {
	if !fo.stored.AwayOnly {
		return
	}
	at := presenceOf{fo.of.user, fo.page.page}
	here := s.present(fo, at)
	_, told := s.told[at]
	if pending, ok := s.presences[at]; ok {
		told = pending
	}
	if here != told {
		s.presences[at] = here
		s.wakeUp()
	}
}

// present reports whether a connection here has joined the page, or the grace of one
// that ended is not over. The caller holds mu.
func (s *Sums) present(fo *follow, at presenceOf) bool {
	if end, ok := s.graces[at]; ok && time.Now().Before(end) {
		return true
	}
	conns := fo.of.conns
	return len(conns) > 0 && conns[0].Joined(at.page) // it answers for all connections of the user
}

func (s *Sums) tellPresence(ctx context.Context, at presenceOf, here bool) error {
	rctx, cancel := context.WithTimeout(ctx, bookPatience)
	defer cancel()
	if err := s.book.Attend(rctx, at.user, at.page, s.cfg.Life, here); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if here {
		s.told[at] = struct{}{}
	} else {
		delete(s.told, at)
	}
	if s.presences[at] == here { // otherwise the presence has changed meanwhile
		delete(s.presences, at)
	}
	return nil
}

// graceEnded notes the users whose grace is over and who have not come back. It
// reports whether Run must write presences to the store.
func (s *Sums) graceEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for at, end := range s.graces {
		if now.Before(end) {
			continue
		}
		delete(s.graces, at)
		if f := s.users[at.user]; f != nil {
			if fo := f.follows[at.page]; fo != nil {
				s.attend(fo)
				continue
			}
		}
		s.presences[at] = false
	}
	return len(s.presences) > 0
}

// lasting notes the presences that must be written again, since their page has
// changed since the last write.
func (s *Sums) lasting() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at := range s.told {
		f := s.users[at.user]
		if f == nil {
			continue
		}
		if fo := f.follows[at.page]; fo != nil && fo.page.level.All-fo.own.Changes > fo.stored.Held && s.present(fo, at) {
			s.presences[at] = true
		}
	}
}

// OthersChanged counts again the follows for which gateways have stored a presence: a
// gateway among them may have died.
func (s *Sums) OthersChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.users {
		again := false
		for _, fo := range f.follows {
			if len(fo.stored.Through) > 0 {
				fo.count, again = fo.stored.Unread(fo.page.level, fo.own, s), true
			}
		}
		if again && f.known {
			s.sum(f)
		}
	}
}

// Depart writes to the store that no user is present here any more. It is for a
// gateway that shuts down, after its clients have gone. A presence that is not written
// before ctx ends counts as if the gateway had been killed.
func (s *Sums) Depart(ctx context.Context) {
	s.mu.Lock()
	left := make(chan presenceOf, len(s.told)+len(s.presences))
	for at := range s.told {
		left <- at
	}
	for at := range s.presences {
		if _, twice := s.told[at]; !twice {
			left <- at
		}
	}
	clear(s.presences)
	clear(s.graces)
	s.mu.Unlock()
	close(left)
	var wg sync.WaitGroup
	for range min(len(left), 16) {
		wg.Go(func() {
			for at := range left {
				if err := s.book.Attend(ctx, at.user, at.page, s.cfg.Life, false); err != nil && ctx.Err() == nil {
					s.log.Warn().Err(err).Msg("the end of a presence could not be stored")
				}
			}
		})
	}
	wg.Wait()
}
