package member

import (
	"context"
	"slices"
	"sync"
	"time"

	"headcount/internal/outage"
	"headcount/presence"
)

// A dispatcher pushes nothing while nothing changes. Without greetings, a gateway could not notice that a dispatcher
// does not reach it any more, and would keep showing old counts as current. So each process with a dispatcher greets
// every gateway about once a second, with a push without updates. If a gateway has received nothing from a dispatcher
// for almost PresenceTimeout, the counts of the dispatcher's buckets are stale. They stay stale until the dispatcher
// reaches the gateway again, or another one serves the buckets.

// greets is among the roles in the lease of a dispatcher that greets. Releases before this one do not greet, and their
// silence means nothing.
const greets = "greets"

// greetings records when each dispatcher last reached this gateway.
type greetings struct {
	timeout time.Duration

	mu sync.Mutex
	// lastGreeted has the dispatchers that greet, each with the time when it last reached this process or, before that,
	// when its lease was first seen. expect bounds it to the members.
	lastGreeted map[string]time.Time
}

// every is the time between two greetings of one gateway.
func (g *greetings) every() time.Duration { return min(time.Second, g.timeout/7) }

// record records that a dispatcher has reached this process.
func (g *greetings) record(from string, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// Names that are no members would make the map grow without bound.
	if _, expected := g.lastGreeted[from]; expected {
		g.lastGreeted[from] = now
	}
}

// expect sets the dispatchers that greet. began reports whether a dispatcher has just started, so that it must be given
// time for its first greeting.
func (g *greetings) expect(names []string, began func(name string) bool, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()

	latest := make(map[string]time.Time, len(names))
	for _, name := range names {
		last, expected := g.lastGreeted[name]
		if !expected || began(name) {
			last = now
		}
		latest[name] = last
	}

	g.lastGreeted = latest
}

// silent returns the dispatchers that have not reached this process for too long, sorted.
func (g *greetings) silent(now time.Time) (names []string) {
	g.mu.Lock()
	defer g.mu.Unlock()

	for name, last := range g.lastGreeted {
		// Less by one greeting, so that the counts are marked within the timeout.
		if now.Sub(last) > g.timeout-g.every() {
			names = append(names, name)
		}
	}
	slices.Sort(names)

	return names
}

// greet greets the other gateways until ctx ends. A gateway that does not answer delays no greeting of another.
func (m *Member) greet(ctx context.Context) error {
	every := m.greetings.every()
	for outage.Sleep(ctx, every) {
		// A gateway that does not answer until the next greeting misses one.
		limited, cancel := context.WithTimeout(ctx, every)
		var all sync.WaitGroup
		for _, p := range m.Members() {
			if p.Name != m.self.Name && slices.Contains(p.Roles, presence.RoleGateway) {
				all.Go(func() { _ = m.parts.Calls.PushUpdates(limited, p.Name, nil) }) // the gateway notices what fails
			}
		}

		all.Wait()
		cancel()
	}

	return nil
}

// watchDispatchers marks the buckets of silent dispatchers as stale in the gateway, until ctx ends.
func (m *Member) watchDispatchers(ctx context.Context) error {
	var silent []string
	var buckets []int

	for outage.Sleep(ctx, m.greetings.every()/4) {
		now := m.greetings.silent(time.Now())
		for _, name := range now {
			if !slices.Contains(silent, name) {
				m.log.Warn().Str("dispatcher", name).
					Msg("a dispatcher does not reach this gateway; counts that come from it are stale")
			}
		}

		for _, name := range silent {
			if !slices.Contains(now, name) {
				m.log.Info().Str("dispatcher", name).Msg("counts are no longer stale because of that dispatcher")
			}
		}
		silent = now

		// In every look, since the table may change while the same dispatchers are silent.
		theirs := m.bucketsOf(silent)
		if !slices.Equal(theirs, buckets) {
			buckets = theirs
			m.parts.Gateway.Silent(buckets)
		}
	}

	return nil
}

// bucketsOf returns the buckets of dispatchers, in the present table.
func (m *Member) bucketsOf(dispatchers []string) (buckets []int) {
	t := m.table.Load()
	if t == nil {
		return nil
	}

	for _, name := range dispatchers {
		buckets = append(buckets, t.BucketsOf(name)...)
	}
	slices.Sort(buckets)

	return buckets
}
