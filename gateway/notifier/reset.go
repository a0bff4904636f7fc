package notifier

import (
	"context"
	"slices"
	"time"
)

// reset is what the connections of one user have asked for with read messages.
type reset struct {
	waiting []Conn   // they wait for the answer, each once
	all     bool     // pages that the user follows
	pages   []string // else these, each once, and at most maxPages: of a further one the count says that it is not read
}

const maxPages = 100

// Read resets the unread count of a page for c's user, or of all pages if page is empty, and sends c the count when that
// is done. It does not wait.
func (s *Sums) Read(f *Sum, c Conn, page string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.reset == nil { // otherwise the goroutine that resets now does it once more
		f.reset = &reset{}
		s.cfg.Group.Go(func() { s.runResets(f) })
	}
	if !slices.Contains(f.reset.waiting, c) {
		f.reset.waiting = append(f.reset.waiting, c)
	}
	switch {
	case page == "":
		f.reset.all = true
	case len(f.reset.pages) < maxPages && !slices.Contains(f.reset.pages, page):
		f.reset.pages = append(f.reset.pages, page)
	}
}

// runResets resets the count until no connection asks for it any more. At most one
// goroutine per user runs it. It rests between two resets, so no client can keep the
// store busy with read messages.
func (s *Sums) runResets(f *Sum) {
	for {
		s.mu.Lock()
		rest := f.rested - time.Since(s.born)
		s.mu.Unlock()
		time.Sleep(rest)
		s.mu.Lock()
		todo := *f.reset
		waiting := todo.waiting
		if *f.reset = (reset{}); len(waiting) == 0 {
			f.reset = nil
		}
		s.mu.Unlock()
		if len(waiting) == 0 { // the connections that asked are served or gone
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
		if todo.all {
			todo.pages = nil
		}
		state, err := s.followService.Reset(ctx, f.user, todo.pages...)
		cancel()
		if err != nil {
			s.log.Debug().Err(err).Msg("an unread count could not be reset; it stays as it is")
		}
		s.mu.Lock()
		f.rested = time.Since(s.born) + s.rest
		if err == nil {
			s.adopt(f, state)
		}
		if f.known {
			for _, c := range waiting {
				c.Tell(f.sum, true)
			}
		}
		s.mu.Unlock()
	}
}
