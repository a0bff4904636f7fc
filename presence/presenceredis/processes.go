package presenceredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
	"headcount/scripts"
)

// seed is a sample of the hash of pages. Processes with another hash would look for a page
// in another bucket.
var seed = strconv.Itoa(presence.Bucket("headcount", 1<<30))

// What Facts.Postgres says of the PostgreSQL of the counters in the same Redis.
const (
	PostgresNone        = "none"
	PostgresTiered      = "behind 2" // it is the durable store behind Redis; "behind" is of older releases
	PostgresSharedExact = "beside"   // it has the exact counters of all regions
)

// postgresMend returns a remedy for a setting of PostgreSQL that does not fit the counters
// in this Redis.
func postgresMend(theirs, ours string) string {
	const older = "behind"
	isTiered := theirs == PostgresTiered || theirs == older
	unknown := theirs == older || theirs == ""

	if ours == PostgresTiered && unknown {
		return "processes of an older release use this Redis, and keep what PostgreSQL does not have yet under other " +
			"names; end all of them with SIGTERM, which persists it, then start this release"
	}
	if ours == PostgresTiered && theirs == PostgresNone {
		return "processes without --postgres use this Redis; end all of them, then start them with --postgres, " +
			"and its counters are carried into PostgreSQL"
	}
	if ours == PostgresNone && isTiered {
		return "the counters of this Redis are persisted in PostgreSQL; give this process their --postgres, or carry " +
			"them over (headcount export --redis URL --postgres URL) and import them into an empty Redis"
	}
	return "the counters of this Redis were kept with other --postgres and --peer flags; give this process the same, " +
		"or export them and import them into an empty Redis"
}

// facts returns the names and values that renew.lua compares.
func (s *Store) facts() []any {
	// The format comes first. Where there are facts, renew.lua refuses a Redis that lacks the first one, and adds
	// others.
	facts := []any{
		formatFact, s.at().format,
		"partitions", s.cfg.Partitions, "buckets", s.cfg.Buckets,
		"region", s.cfg.Facts.Region, "seed", seed, "secret", s.cfg.Facts.Secret,
	}

	if n := s.cfg.Facts.Counters; n != 0 {
		facts = append(facts, "counters", n)
	}
	if is := s.cfg.Facts.Postgres; is != "" {
		facts = append(facts, "postgres", is)
	}
	if n := s.cfg.Facts.Webhooks; n != 0 {
		facts = append(facts, "webhooks", n)
	}

	return facts
}

// Renew implements presence.Processes. Every running process has the facts in memory,
// and writes them again when Redis was emptied. A starting process without facts waits
// for that without a lease, for Config.FactsWait from its first call on.
func (s *Store) Renew(
	ctx context.Context, p presence.Process, ttl time.Duration,
) (processes []presence.Process, now time.Time, err error) {
	// Names and roles are words of one line in Redis.
	if p.Name == "" || strings.ContainsAny(strings.Join(p.Roles, ""), ", ") {
		return nil, now, fmt.Errorf("presenceredis: renew: %q with the roles %q is not a valid process",
			p.Name, p.Roles)
	}

	leases, err := s.renew(ctx, p, ttl)
	if err != nil {
		return nil, now, fmt.Errorf("presenceredis: renew the lease of %s: %w", p.Name, err)
	}

	for _, l := range leases {
		processes = append(processes, l.Process)
		if l.Name == p.Name {
			now = l.ends.Add(-ttl) // the script has just made this lease, so its end shows the time of Redis
		}
	}

	return processes, now, nil
}

// lease is the lease of a process.
type lease struct {
	presence.Process
	ends time.Time // by the clock of Redis
}

// Values of the mode in which renew.lua handles missing facts.
const (
	mayNotWrite = "0"
	mayWrite    = "1"
	wasAccepted = "2" // write them, and skip the comparison
)

func (s *Store) factsMode() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.factsHeld {
		return wasAccepted
	}

	missing := !s.factsMissing.IsZero()
	if missing && time.Since(s.factsMissing) >= s.cfg.FactsWait {
		return mayWrite
	}
	return mayNotWrite
}

func (s *Store) renew(ctx context.Context, p presence.Process, ttl time.Duration) (leases []lease, err error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	restore, add := s.ourSeals()
	args := []any{
		p.Name, p.Incarnation, strings.Join(p.Roles, ","), ttl.Milliseconds(), s.factsMode(),
		len(restore) / 2, len(add) / 2,
	}
	run := &scriptRun{
		Script: scripts.Renew,
		Keys:   []string{factsKey, leasesKey},
		Args:   slices.Concat(args, restore, add, s.facts()),
	}

	if err := s.conn.Run(ctx, []*scriptRun{run}); err != nil {
		return nil, err
	}

	reply := make([]string, 0, 16)
	for _, v := range run.Reply.([]any) {
		reply = append(reply, v.(string))
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	switch reply[0] {
	case "missing":
		// The waiting begins with the first call that found nothing, see Config.FactsWait.
		if s.factsMissing.IsZero() {
			s.factsMissing = time.Now()
		}
		if s.sealsMissing.IsZero() {
			s.sealsMissing = time.Now()
		}
		return nil, presence.ErrNoFacts
	case "differs":
		return nil, fmt.Errorf("%w: %s", presence.ErrFacts, s.difference(reply[1], reply[2]))
	case "wait":
		return nil, fmt.Errorf("%w: a process that starts or ends may be of an older release, or have no --postgres",
			presence.ErrUnavailable)
	case "taken":
		return nil, fmt.Errorf("%w: another process called %s has a lease for %s ms more",
			presence.ErrNameTaken, p.Name, reply[1])
	}

	sealed, _ := strconv.Atoi(reply[1])
	first := 2 + 2*sealed
	// This comes before the facts count as accepted: without the key this process would hash users in another way.
	if err := s.takeSealsLocked(reply[2:first]); err != nil {
		return nil, err
	}
	s.factsHeld = true
	s.factsMissing = time.Time{}

	for i := first; i+1 < len(reply); i += 2 {
		l, err := parseLease(reply[i], reply[i+1])
		if err != nil {
			return nil, err
		}
		leases = append(leases, l)
	}

	slices.SortFunc(leases, func(a, b lease) int { return strings.Compare(a.Name, b.Name) })
	return leases, nil
}

// difference returns which fact differs in Redis, with a remedy.
func (s *Store) difference(fact, theirs string) string {
	if problem := s.cfg.Facts.problem(fact, theirs); problem != "" {
		return problem
	}

	ours := s.facts()
	i := slices.Index(ours, any(fact))
	return fmt.Sprintf("%s is %q here and %q in Redis", fact, fmt.Sprint(ours[i+1]), theirs)
}

// problem says how a fact in Redis differs from the one in f, with a remedy. It returns nothing about a fact that f
// does not have.
func (f Facts) problem(fact, theirs string) string {
	switch fact {
	case "region":
		return fmt.Sprintf("this Redis belongs to the region %q, and not to %q; correct the URL or the name",
			theirs, f.Region)
	case "secret":
		return "--cluster-secret differs; give every process the same"
	case formatFact:
		return fmt.Sprintf("the data in Redis is of format %q, this version knows %s and %s; run the version that "+
			"wrote it, or empty this Redis while nothing of it runs", cmp.Or(theirs, "1"), formatNumbered, formatEven)
	case "counters":
		return fmt.Sprintf("the counters in Redis are of format %q, this version knows %d, and serves none of them "+
			"until they are carried over: end all processes, then \"headcount export --redis URL\" of the release "+
			"that wrote them, then \"headcount import --redis URL\" of this one", theirs, f.Counters)
	case "postgres":
		return postgresMend(theirs, f.Postgres)
	case "webhooks":
		return fmt.Sprintf("the webhooks' data in Redis is of format %q, this version knows %d; run the version that "+
			"wrote it, or delete the keys hc:{w:* and the field webhooks of hc:{c}:facts while nothing of it runs",
			theirs, f.Webhooks)
	}
	return ""
}

// parseLease parses "end incarnation roles".
func parseLease(name, text string) (lease, error) {
	fields := strings.SplitN(text, " ", 3)
	if len(fields) != 3 {
		return lease{}, fmt.Errorf("%w: a lease of %q", ErrForeign, name)
	}

	ends, endsErr := strconv.ParseInt(fields[0], 10, 64)
	incarnation, err := strconv.ParseUint(fields[1], 10, 64)
	if err := errors.Join(endsErr, err); err != nil {
		return lease{}, fmt.Errorf("%w: a lease of %q: %w", ErrForeign, name, err)
	}

	l := lease{presence.Process{Name: name, Incarnation: incarnation}, time.UnixMilli(ends)}
	if fields[2] != "" {
		l.Roles = strings.Split(fields[2], ",")
	}

	return l, nil
}

// Leave implements presence.Processes.
func (s *Store) Leave(ctx context.Context, p presence.Process) error {
	// The script ends the lease of this incarnation alone: a new run may have one by now.
	args := []any{p.Name, p.Incarnation}
	err := s.conn.Run(ctx, []*scriptRun{{Script: scripts.Leave, Keys: []string{leasesKey}, Args: args}})
	if err != nil {
		return fmt.Errorf("presenceredis: end the lease of %s: %w", p.Name, err)
	}
	return nil
}
