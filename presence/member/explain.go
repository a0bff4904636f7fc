package member

import (
	"context"

	"golang.org/x/sync/errgroup"

	"headcount/presence"
)

// Explain returns what this region's count of a page, or of a site, is made of: what all processes know of it. If a
// process does not answer, Moving is set.
func (m *Member) Explain(ctx context.Context, page string) presence.Parts {
	processes := m.Members()
	found := make([]presence.Parts, len(processes))

	var calls errgroup.Group
	for i, process := range processes {
		calls.Go(func() (err error) {
			found[i], err = m.partsOf(ctx, process.Name, page)
			// The sum lacks what a process that does not answer knows.
			found[i].Moving = found[i].Moving || err != nil
			return nil
		})
	}
	_ = calls.Wait()

	var sum presence.Parts
	for _, parts := range found {
		sum.Add(parts)
	}
	// While a partition has no owner, or two, the parts do not add up.
	sum.Moving = sum.Moving || sum.Settled != m.partitions

	return sum
}

func (m *Member) partsOf(ctx context.Context, process, page string) (presence.Parts, error) {
	if process == m.self.Name {
		return m.ReceiveExplain(ctx, page)
	}

	return m.parts.Calls.Explain(ctx, process, page)
}

// ReceiveExplain returns what this process knows of a count.
func (m *Member) ReceiveExplain(ctx context.Context, page string) (parts presence.Parts, err error) {
	if m.parts.Node != nil {
		parts, err = m.parts.Node.Explain(ctx, page)
	}
	if m.parts.Gateway != nil {
		parts.Add(m.parts.Gateway.Explain(page))
	}

	return parts, err
}
