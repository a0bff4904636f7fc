package node

import (
	"context"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/presence"
	"headcount/tracing"
)

// maxTraced bounds the traced joins of one write of a partition. What is beyond it has no spans of
// the store; a gateway traces one join a second.
const maxTraced = 16

// owns begins the span of a traced join, from here to its acknowledgement.
func (p *partition) owns(above *tracing.Parent) trace.Span {
	_, span := p.node.cfg.Tracer.Start(above.Within(context.Background()), "owner")
	return span
}

// put hands the changes to the store. Each traced join among them has a span of the call. What the
// store does below it is told of the first one: the others were in the same call.
func (n *Node) put(ctx context.Context, batch []*partition, changes []presence.Change) []presence.Outcome {
	if n.cfg.Tracer == nil {
		return n.store.Write(ctx, changes)
	}
	type call struct {
		trace.Span
		change int
	}
	var calls []call
	within := ctx
	for i, p := range batch {
		p.out.mu.Lock()
		for _, owner := range p.out.writing {
			below, span := tracing.Start(trace.ContextWithSpan(ctx, owner), "store")
			if len(calls) == 0 {
				within = below
			}
			calls = append(calls, call{span, i})
		}
		p.out.mu.Unlock()
	}
	outcomes := n.store.Write(within, changes)
	for _, c := range calls {
		if outcomes[c.change].Err != nil {
			c.SetStatus(codes.Error, "")
		}
		c.End()
	}
	return outcomes
}
