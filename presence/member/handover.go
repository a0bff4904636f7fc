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
	m.leaving.Store(true)
	if t := m.table.Load(); !m.alone && (t == nil || !m.last(t)) {
		if m.parts.Node != nil {
			m.parts.Node.HandOver()
		}
		wake.Signal(m.renewNow)
		outage.Sleep(ctx, handOverTime)
	}
	m.end(ctx)
}

// last reports whether no other process could take over.
func (m *Member) last(t *ring.Table) bool {
	return len(t.PartitionsOf(m.self.Name)) == m.partitions && len(t.BucketsOf(m.self.Name)) == m.buckets ||
		m.parts.Node == nil && m.parts.Dispatcher == nil
}

// end ends the lease for good.
func (m *Member) end(ctx context.Context) {
	m.renewing <- struct{}{}
	defer func() { <-m.renewing }()
	m.ended = true
	lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), renewLimit)
	defer cancel()
	if err := m.parts.Store.Leave(lctx, m.self); err != nil {
		m.log.Warn().Err(err).Msg("the lease could not be ended; the lease expires by itself")
	}
}
