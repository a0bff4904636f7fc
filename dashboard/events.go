package dashboard

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/presence"
)

const (
	watchEvery = time.Second
	maxEvents  = 100 // beyond the bound the oldest is forgotten
)

// event is an event that this process has seen.
type event struct {
	At   int64  `json:"at"` // unix ms
	Text string `json:"text"`
}

// events are the last events. Watch adds to them; any goroutine may read them.
type events struct {
	mu  sync.Mutex
	all []event // the oldest first
}

func (e *events) add(text string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	if len(e.all) == maxEvents {
		e.all = slices.Delete(e.all, 0, 1)
	}
	e.all = append(e.all, event{time.Now().UnixMilli(), text})
}

func (e *events) newest() []event {
	e.mu.Lock()
	defer e.mu.Unlock()

	newest := slices.Clone(e.all)
	slices.Reverse(newest)
	return append([]event{}, newest...) // not null
}

// around is the state of this process, of the other processes and of the regions at one moment.
type around struct {
	trouble   string            // why this process is not ready; "": it is
	processes map[string]string // incarnation -> name and roles of the process
	regions   map[string]string // other region -> what is wrong; "": nothing
}

// look returns the present state; was is the last one. A leaving process has no roles any more, so
// look keeps its former text, or has its name alone.
func (b *Board) look(was around) around {
	now := around{processes: map[string]string{}, regions: map[string]string{}}

	if err := b.cfg.Ready(); err != nil {
		now.trouble = err.Error()
	}

	for _, p := range b.cfg.Members.Members() {
		incarnation := presence.IncarnationName(p.Name, p.Incarnation)

		// By incarnation, so that a process that restarts at once is one that left and one that joined.
		now.processes[incarnation] = cmp.Or(was.processes[incarnation], p.Name)
		if len(p.Roles) > 0 {
			now.processes[incarnation] = fmt.Sprintf("%s (%s)", p.Name, strings.Join(p.Roles, ", "))
		}
	}

	// Of this process alone: what a dispatcher elsewhere sees is an event there.
	for _, p := range b.cfg.Report.Peers() {
		switch {
		case p.LeftOut:
			now.regions[p.Name] = "is silent, and totals leave it out"
		case max(p.Heard, p.Lag) > silence:
			now.regions[p.Name] = "is silent"
		default:
			now.regions[p.Name] = ""
		}
	}

	return now
}

// Watch records events until ctx ends. It asks no other process.
func (b *Board) Watch(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()

	b.events.add(fmt.Sprintf("This process, %s, has started.", b.cfg.Self))
	was := b.look(around{})
	began := false // no events before this process is ready: the processes that it finds then joined earlier

	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		is := b.look(was)
		began = began || was.trouble == ""
		if began {
			b.compare(was, is)
		}

		was = is
	}
}

// compare adds an event for each difference between two states.
func (b *Board) compare(was, is around) {
	switch {
	case is.trouble == was.trouble:
	case is.trouble == "":
		b.events.add("This process is ready again.")
	default:
		b.events.add(fmt.Sprintf("This process is not ready: %s.", is.trouble))
	}

	// Processes that left come first, since a restart is a leave and then a join.
	for _, incarnation := range slices.Sorted(maps.Keys(was.processes)) {
		if _, stays := is.processes[incarnation]; !stays {
			b.events.add("A process left: " + was.processes[incarnation] + ".")
		}
	}

	for _, incarnation := range slices.Sorted(maps.Keys(is.processes)) {
		if _, was := was.processes[incarnation]; !was {
			b.events.add("A process joined: " + is.processes[incarnation] + ".")
		}
	}

	for _, name := range slices.Sorted(maps.Keys(is.regions)) {
		now, before := is.regions[name], was.regions[name]
		switch {
		case now == before: // nothing to report
		case now == "":
			b.events.add(fmt.Sprintf("The region %s is heard again.", name))
		default:
			b.events.add(fmt.Sprintf("The region %s %s.", name, now))
		}
	}
}
