package unread

import (
	"context"
	"slices"
	"time"
)

// reset holds the connections of one user that have sent a read message and wait for
// the answer, each once.
type reset struct{ asked []Conn }

// Read resets the unread count of c's user, and sends c the count when that is done.
// It does not wait.
func (s *Sums) Read(f *Sum, c Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.reset == nil { // otherwise the goroutine that resets now does it once more
		f.reset = &reset{}
		s.cfg.Group.Go(func() { s.answer(f) })
	}
	if !slices.Contains(f.reset.asked, c) {
		f.reset.asked = append(f.reset.asked, c)
	}
}

// answer resets the count until no connection asks for it any more. At most one
// goroutine per user runs it. It rests between two resets, so no client can keep the
// store busy with read messages.
func (s *Sums) answer(f *Sum) {
	for {
		s.mu.Lock()
		rest := f.rested - time.Since(s.born)
		s.mu.Unlock()
		time.Sleep(rest)
		s.mu.Lock()
		asked := f.reset.asked
		if f.reset.asked = nil; len(asked) == 0 {
			f.reset = nil
		}
		s.mu.Unlock()
		if len(asked) == 0 { // the connections that asked are served or gone
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), bookPatience)
		state, err := s.book.Reset(ctx, f.user)
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
			for _, c := range asked {
				c.Tell(f.sum, true)
			}
		}
		s.mu.Unlock()
	}
}
