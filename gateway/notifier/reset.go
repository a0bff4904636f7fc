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
	f.reset.add(c, page)
}

// add adds a read message.
func (r *reset) add(c Conn, page string) {
	// A connection gets one answer, however often it asked meanwhile.
	if !slices.Contains(r.waiting, c) {
		r.waiting = append(r.waiting, c)
	}
	if page == "" {
		r.all = true
		return
	}

	if len(r.pages) < maxPages && !slices.Contains(r.pages, page) {
		r.pages = append(r.pages, page)
	}
}

// isNothing reports whether no page is to be reset. A connection that has asked may be gone by now.
func (r *reset) isNothing() bool { return !r.all && len(r.pages) == 0 }

// runResets resets the user's count until no connection asks for it. At most one goroutine
// per user runs it. It pauses between two resets, so that no client can keep the store
// busy.
func (s *Sums) runResets(f *Sum) {
	for {
		s.mu.Lock()
		rest := f.rested - time.Since(s.born)
		s.mu.Unlock()
		// The rest is negative, and the sleep none, if the last reset is longer ago.
		time.Sleep(rest)

		todo := s.takeReset(f)
		if todo.isNothing() {
			return
		}

		pages := todo.pages
		// For the service, no pages are all of them.
		if todo.all {
			pages = nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
		state, err := s.followService.Reset(ctx, f.user, pages...)
		cancel()
		if err != nil {
			s.cfg.Log.Debug().Err(err).Msg("an unread count could not be reset; it stays as it is")
		}

		s.mu.Lock()
		f.rested = time.Since(s.born) + s.cfg.Rest
		if err == nil {
			s.replace(f, state)
		}
		// After an error too: whoever asked learns that the count has stayed as it was.
		if f.known {
			for _, c := range todo.waiting {
				c.SendUnread(f.sum, true)
			}
		}
		s.mu.Unlock()
	}
}

// takeReset returns what connections have asked for. If that is nothing, runResets has ended by then, and the next read
// message starts it again.
func (s *Sums) takeReset(f *Sum) reset {
	s.mu.Lock()
	defer s.mu.Unlock()

	todo := *f.reset
	f.reset = &reset{}
	// Under the same lock as the look, so that a message which comes now starts another goroutine.
	if todo.isNothing() {
		f.reset = nil
	}

	return todo
}
