package member

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/ring"
)

const (
	holdRetry = 100 * time.Millisecond // pause while a partition changes its owner
	// clockError is more than the clocks of two gateways should differ by. A change of a hold that was overtaken is
	// tried again only if it is not older than this: the client of an older one may have given up.
	clockError = 500 * time.Millisecond
)

// applyTable makes t the table. It passes the parts their partitions and buckets, and the
// gateway the partitions that have moved.
func (m *Member) applyTable(old, t *ring.Table) {
	// Store the table before the parts are told, so that what they send then goes to the new owners.
	m.table.Store(t)
	m.tableChanges.Inc()

	if m.parts.Datagrams != nil {
		m.parts.Datagrams.SetTable(t.Hash())
	}

	if !m.leaving.Load() { // a leaving process keeps what it owns until the others have taken over
		if m.parts.Node != nil {
			m.parts.Node.Own(t.PartitionsOf(m.self.Name))
		}
		if m.parts.Dispatcher != nil {
			m.parts.Dispatcher.Own(t.BucketsOf(m.self.Name))
		}
		if m.parts.Regions != nil {
			m.parts.Regions.Own(t.BucketsOf(m.self.Name))
		}
	}

	if m.parts.Gateway != nil {
		m.parts.Gateway.OwnersChanged(m.moved(old, t))
	}
}

// moved returns the partitions whose owner in t is not the one in old. old may be nil.
func (m *Member) moved(old, t *ring.Table) (partitions []int) {
	for id := range m.partitions {
		was, had := "", false
		if old != nil {
			was, had = old.Node(id)
		}
		if now, has := t.Node(id); now != was || has != had {
			partitions = append(partitions, id)
		}
	}

	return partitions
}

// SendBeat sends a beat to the owner of its partition. Without an owner it drops
// the beat.
func (m *Member) SendBeat(b *heartbeat.Beat) {
	t := m.table.Load()
	if t == nil {
		return
	}

	owner, ok := t.Node(b.Partition)
	switch {
	case !ok:
	case owner == m.self.Name:
		m.parts.Node.Deliver(b)
	default:
		m.parts.Datagrams.SendBeat(owner, b)
	}
}

// ReceiveBeat takes a beat from another process.
func (m *Member) ReceiveBeat(b *heartbeat.Beat) {
	if m.parts.Node != nil {
		m.parts.Node.Deliver(b)
	}
}

// SendReply sends an owner's reply to a gateway.
func (m *Member) SendReply(to string, r *heartbeat.Reply) {
	if to == m.self.Name {
		m.ReceiveReply(r)
	} else if m.parts.Datagrams != nil {
		m.parts.Datagrams.SendReply(to, r)
	}
}

// ReceiveReply takes a reply from another process.
func (m *Member) ReceiveReply(r *heartbeat.Reply) {
	if m.parts.Gateway != nil {
		m.parts.Gateway.Receive(r)
	}
}

// Disagree renews the lease soon, because another process has another table. Usually one
// of the two does not know yet that a process has joined or left.
func (m *Member) Disagree(string, uint64) {
	m.disagreements.Inc()
	wake.Signal(m.renewSoon)
}

// PushUpdates sends updates to an incarnation of a gateway. If that incarnation has ended,
// the next one of the same process may receive the updates, which does no harm.
func (m *Member) PushUpdates(ctx context.Context, incarnation string, updates []presence.Update) error {
	to := presence.ProcessOf(incarnation)
	here := to == m.self.Name && m.parts.Gateway != nil

	switch {
	case here:
		m.parts.Gateway.Push(updates)
		return nil
	case m.parts.Calls == nil:
		return fmt.Errorf("push updates to %s: %w: there is no other process", to, presence.ErrUnavailable)
	default:
		return m.parts.Calls.PushUpdates(ctx, to, updates)
	}
}

// ReceiveUpdates takes updates that another process pushed. Without updates it is a greeting.
func (m *Member) ReceiveUpdates(from string, updates []presence.Update) {
	if m.parts.Gateway != nil {
		// Each push, whatever it carries, shows that the dispatcher reaches this process.
		m.greetings.record(from, time.Now())
		m.parts.Gateway.Push(updates)
	}
}

// resumePeriod is how long after a suspension the process may still receive requests that were sent before or during
// it. They may have waited in the system's buffers for any time; their clients may have given up, and have asked for
// the opposite elsewhere.
const resumePeriod = time.Second

// errResumed refuses a hold after a suspension, see resumePeriod.
var errResumed = fmt.Errorf("hold: %w: the process was suspended a moment ago", presence.ErrUnavailable)

// Hold asks the owner of the user's partition to take or end a hold, again while the partition changes its owner, until
// ctx ends. It refuses a hold when the process was suspended a moment ago.
func (m *Member) Hold(ctx context.Context, u presence.User, page string, on bool) error {
	if m.standstill.EndedWithin(resumePeriod) {
		return errResumed
	}

	change := presence.HoldChange{User: u, Page: page, On: on, Asked: time.Now()}
	for {
		err := m.holdOnce(ctx, change)
		recent := time.Since(change.Asked) < clockError
		overtaken := errors.Is(err, presence.ErrOvertaken) && recent

		switch {
		// The partition moves. It does no harm if both owners make the change.
		case errors.Is(err, presence.ErrNotOwner):
		case overtaken:
			// The other change may have been made before this one came, at a gateway whose clock is ahead.
			change.Asked = time.Now()
		default:
			return err
		}

		if !outage.Sleep(ctx, holdRetry) {
			return fmt.Errorf("hold: %w: %w", presence.ErrUnavailable, err)
		}
	}
}

func (m *Member) holdOnce(ctx context.Context, change presence.HoldChange) error {
	t := m.table.Load()
	if t == nil {
		return presence.ErrNotOwner
	}

	owner, ok := t.Node(change.User.Partition(m.partitions))
	switch {
	case !ok:
		return presence.ErrNotOwner
	case owner == m.self.Name:
		return m.parts.Node.Hold(ctx, change)
	default:
		return m.parts.Calls.Hold(ctx, owner, change)
	}
}

// ReceiveHold takes or ends a hold for another process, which waits no longer than presence.HoldTimeout from the
// change's time on. It refuses a hold when this process was suspended a moment ago.
func (m *Member) ReceiveHold(ctx context.Context, change presence.HoldChange) error {
	switch {
	case m.parts.Node == nil:
		return presence.ErrNotOwner
	case m.standstill.EndedWithin(resumePeriod):
		return errResumed
	}

	// The change may have waited on its way, and its sender waits no longer than this.
	ctx, cancel := context.WithDeadline(ctx, change.Asked.Add(presence.HoldTimeout))
	defer cancel()

	return m.parts.Node.Hold(ctx, change)
}
