package member

import (
	"context"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence/ring"
)

// handOverTime is how long a leaving process keeps working, so that the others can take
// over its partitions and buckets first.
const handOverTime = 2*renewEvery + 500*time.Millisecond

// Leave hands over the process's partitions and buckets, and ends its lease. Run must not
// end before Leave returns.
func (m *Member) Leave(ctx context.Context) {
	// From now on the process is not ready, and no new table gives it anything or takes anything from it.
	m.leaving.Store(true)

	t := m.table.Load()
	// Where nobody can take over, waiting would only put off the end.
	last := m.alone || t != nil && m.last(t)
	if !last {
		if m.parts.Node != nil {
			m.parts.Node.HandOver()
		}

		// The other processes see a lease without roles and take over, while this process keeps serving what it owns.
		wake.Signal(m.renewNow)
		outage.Sleep(ctx, handOverTime)
	}

	m.end(ctx)
}

// last reports whether no other process could take over.
func (m *Member) last(t *ring.Table) bool {
	ownsNothing := m.parts.Node == nil && m.parts.Dispatcher == nil
	ownsAll := len(t.PartitionsOf(m.self.Name)) == m.partitions && len(t.BucketsOf(m.self.Name)) == m.buckets

	return ownsAll || ownsNothing
}

// end ends the lease for good.
func (m *Member) end(ctx context.Context) {
	// A renewal that is under way would bring the lease back after it has ended.
	m.renewing <- struct{}{}
	defer func() { <-m.renewing }()

	m.ended = true

	// Try this even if the time to shut down is over: otherwise the next run of this process waits until the lease
	// expires.
	lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), renewLimit)
	defer cancel()

	if err := m.parts.Store.Leave(lctx, m.self); err != nil {
		m.log.Warn().Err(err).Msg("the lease could not be ended; the lease expires by itself")
	}
}
