package notifier

import (
	"context"
	"slices"
	"time"
)

// reset has the read messages of one user's connections since the last reset began.
type reset struct {
	waiting []Conn   // each once
	all     bool     // reset all pages
	pages   []string // pages to reset unless all, each once, at most maxPages; further pages stay unread
}

const maxPages = 100

// Read resets the unread count of a page for c's user, or of all pages if page is empty.
// It does not wait; c gets the count when the reset is done.
func (s *Sums) Read(f *Sum, c Conn, page string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if f.reset == nil { // otherwise its goroutine runs another reset
		f.reset = &reset{}
		s.cfg.Group.Go(func() { s.runResets(f) })
	}
	if !slices.Contains(f.reset.waiting, c) {
		f.reset.waiting = append(f.reset.waiting, c)
	}

	if page == "" {
		f.reset.all = true
		return
	}

	isNew := !slices.Contains(f.reset.pages, page)
	if isNew && len(f.reset.pages) < maxPages {
		f.reset.pages = append(f.reset.pages, page)
	}
}

// runResets resets the user's count until no connection asks for it. At most one goroutine
// per user runs it. It pauses between two resets, so that no client can keep the store
// busy.
func (s *Sums) runResets(f *Sum) {
	for {
		s.mu.Lock()
		rest := f.rested - time.Since(s.born)
		s.mu.Unlock()
		time.Sleep(rest)

		s.mu.Lock()
		todo := *f.reset
		waiting := todo.waiting
		*f.reset = reset{}
		if len(waiting) == 0 { // all connections that asked have been served, or are gone
			f.reset = nil
		}
		s.mu.Unlock()

		if len(waiting) == 0 {
			return
		}

		ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
		if todo.all {
			todo.pages = nil
		}

		state, err := s.followService.Reset(ctx, f.user, todo.pages...)
		cancel()
		if err != nil {
			s.cfg.Log.Debug().Err(err).Msg("an unread count could not be reset; it stays as it is")
		}

		s.mu.Lock()
		f.rested = time.Since(s.born) + s.cfg.Rest
		if err == nil {
			s.adoptLocked(f, state)
		}
		if f.known {
			for _, c := range waiting {
				c.SendUnread(f.sum, true)
			}
		}
		s.mu.Unlock()
	}
}
