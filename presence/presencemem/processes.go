package presencemem

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"headcount/presence"
)

// lease is the lease of a process. It ends at until.
type lease struct {
	presence.Process
	until time.Time
}

// Renew implements presence.Processes. Usually only the process that has this store
// in its memory keeps a lease. There are no facts: no other process can have other
// settings.
func (s *Store) Renew(_ context.Context, p presence.Process, ttl time.Duration) ([]presence.Process, time.Time, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	now := time.Now()
	for name, l := range s.leases { // bounds leases to those renewed in the last ttl
		if !now.Before(l.until) {
			delete(s.leases, name)
		}
	}

	if old, held := s.leases[p.Name]; held && old.Incarnation != p.Incarnation {
		return nil, now, fmt.Errorf("presencemem: renew the lease of %s: %w", p.Name, presence.ErrNameTaken)
	}

	// The lease keeps a copy, because the caller may change its slice between two renewals.
	p.Roles = slices.Clone(p.Roles)
	s.leases[p.Name] = lease{p, now.Add(ttl)}

	all := make([]presence.Process, 0, len(s.leases))
	for _, l := range s.leases {
		all = append(all, l.Process)
	}
	slices.SortFunc(all, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })

	return all, now, nil
}

// Leave implements presence.Processes.
func (s *Store) Leave(_ context.Context, p presence.Process) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	// Another run may have taken the name since.
	if s.leases[p.Name].Incarnation == p.Incarnation {
		delete(s.leases, p.Name)
	}

	return nil
}

// Parts returns a page's count and each region's part of it. An embedded store has no
// peers, so its region has all users.
func (s *Store) Parts(_ context.Context, page string) (presence.Count, []presence.Part, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	c := s.count(page)
	return c, []presence.Part{{Region: s.cfg.Region, Users: c.Users}}, nil
}
