package redisstore

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

// factsPoll is how often a starting process looks whether the facts are there.
const factsPoll = 200 * time.Millisecond

// seed tells hashes of pages apart: processes with another would look for a page
// in another bucket.
var seed = strconv.Itoa(presence.Bucket("headcount", 1<<30))

// facts are what renew.lua compares, in pairs.
func (s *Store) facts() []any {
	return []any{
		"partitions", s.cfg.Partitions, "buckets", s.cfg.Buckets,
		"region", s.cfg.Facts.Region, "seed", seed, "secret", s.cfg.Facts.Secret,
	}
}

// Renew implements presence.Processes. The facts are in the memory of every
// running process: when they are missing from Redis, because it was emptied, the
// running ones write them again. A starting one gives them Config.FactsWait to do
// so, without a lease; if ctx ends before, the next call waits for the rest.
func (s *Store) Renew(ctx context.Context, p presence.Process, ttl time.Duration) ([]presence.Process, error) {
	if p.Name == "" || strings.ContainsAny(strings.Join(p.Roles, ""), ", ") {
		return nil, fmt.Errorf("redisstore: renew: %q with roles %q is no process", p.Name, p.Roles)
	}
	for {
		processes, missing, err := s.renew(ctx, p, ttl, s.mayWriteFacts())
		if err != nil {
			return nil, fmt.Errorf("redisstore: renew the lease of %s: %w", p.Name, err)
		}
		if !missing {
			return processes, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("redisstore: renew the lease of %s: %w: no cluster facts yet: %w", p.Name, presence.ErrUnavailable, ctx.Err())
		case <-time.After(factsPoll):
		}
	}
}

// mayWriteFacts reports whether this process may write its facts when there are none.
func (s *Store) mayWriteFacts() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.factsHeld || !s.factsMissing.IsZero() && time.Since(s.factsMissing) >= s.cfg.FactsWait
}

func (s *Store) renew(ctx context.Context, p presence.Process, ttl time.Duration, mayWrite bool) (processes []presence.Process, missing bool, err error) {
	cl := &call{script: "renew", keys: []string{factsKey, leasesKey}, args: append([]any{
		p.Name, strconv.FormatUint(p.Incarnation, 10), strings.Join(p.Roles, ","), ttl.Milliseconds(), flag(mayWrite),
	}, s.facts()...)}
	if err := s.run(ctx, []*call{cl}); err != nil {
		return nil, false, err
	}
	reply := make([]string, 0, 16)
	for _, v := range cl.reply.([]any) {
		reply = append(reply, v.(string))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch reply[0] {
	case "missing":
		if s.factsMissing.IsZero() {
			s.factsMissing = time.Now()
		}
		return nil, true, nil
	case "differs":
		ours := s.facts()
		i := slices.Index(ours, any(reply[1]))
		return nil, false, fmt.Errorf("%w: %s is %q here and %q in Redis", presence.ErrFacts, reply[1], fmt.Sprint(ours[i+1]), reply[2])
	case "taken":
		return nil, false, fmt.Errorf("%w: another process called %s has a lease for %s ms more", presence.ErrNameTaken, p.Name, reply[1])
	}
	s.factsHeld, s.factsMissing = true, time.Time{}
	for i := 1; i+1 < len(reply); i += 2 {
		q, err := parseLease(reply[i], reply[i+1])
		if err != nil {
			return nil, false, fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
		}
		processes = append(processes, q)
	}
	slices.SortFunc(processes, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })
	return processes, false, nil
}

// parseLease reads "end incarnation roles".
func parseLease(name, lease string) (presence.Process, error) {
	fields := strings.SplitN(lease, " ", 3)
	if len(fields) != 3 {
		return presence.Process{}, fmt.Errorf("%w: a lease of %q", ErrForeign, name)
	}
	incarnation, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		return presence.Process{}, fmt.Errorf("%w: a lease of %q: %w", ErrForeign, name, err)
	}
	p := presence.Process{Name: name, Incarnation: incarnation}
	if fields[2] != "" {
		p.Roles = strings.Split(fields[2], ",")
	}
	return p, nil
}

// Leave implements presence.Processes.
func (s *Store) Leave(ctx context.Context, p presence.Process) error {
	err := s.run(ctx, []*call{{script: "leave", keys: []string{leasesKey}, args: []any{p.Name, strconv.FormatUint(p.Incarnation, 10)}}})
	if err != nil {
		return fmt.Errorf("redisstore: end the lease of %s: %w", p.Name, err)
	}
	return nil
}
