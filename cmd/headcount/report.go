package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/rs/zerolog"

	"headcount/dashboard"
	"headcount/dispatcher"
	"headcount/presence"
)

// reporter says how this process is, by the metrics it has.
type reporter struct {
	registry   *prometheus.Registry
	dispatcher *dispatcher.Dispatcher // nil without the role
	log        zerolog.Logger
}

// newReporter registers the collectors of sys, which must be complete.
func newReporter(sys *system, dp *dispatcher.Dispatcher, log zerolog.Logger) (*reporter, error) {
	r := &reporter{registry: prometheus.NewRegistry(), dispatcher: dp, log: log}
	for _, c := range append(sys.collectors, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})) {
		if err := r.registry.Register(c); err != nil {
			return nil, fmt.Errorf("report: %w", err)
		}
	}
	return r, nil
}

// report takes as long as reading the metrics.
func (r *reporter) report() presence.Report {
	load, err := dashboard.Load(r.registry)
	if err != nil {
		r.log.Debug().Err(err).Msg("some metrics could not be read for a report")
	}
	report := presence.Report{Load: load}
	if r.dispatcher != nil {
		report.Top = r.dispatcher.Top(presence.TopPages)
	}
	return report
}

// alone is the one process over the embedded store, as a dashboard sees it.
func alone(cfg Config) func() []presence.Process {
	self := []presence.Process{{Name: localName, Roles: cfg.Roles, Incarnation: uint64(time.Now().UnixMilli())}}
	return func() []presence.Process { return self }
}

// lookAt makes a gateway's dashboard of a board that is made later.
func lookAt(board **dashboard.Board) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) { return (*board).JSON(ctx) }
}

// showMembers notes who is there for whoIsThere. It is membership's.
func (p *process) showMembers() {
	members := make([]presence.Process, 0, len(p.seen))
	for _, s := range p.seen {
		members = append(members, s.Process)
	}
	slices.SortFunc(members, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })
	p.members.Store(&members)
}

// whoIsThere returns who is there, this process among them once it takes part. Any
// goroutine may call it.
func (p *process) whoIsThere() []presence.Process {
	if members := p.members.Load(); members != nil {
		return *members
	}
	return nil
}
