package dashboard

import (
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
	maxEvents  = 100 // beyond, the oldest is forgotten
)

// event is something that happened, as this process saw it.
type event struct {
	At   int64  `json:"at"` // unix ms
	Text string `json:"text"`
}

// events are the last that happened. Watch adds to them, any goroutine reads them.
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

// around is what one look at this process and those around it sees.
type around struct {
	trouble   string            // why this process is not ready; "": it is
	processes map[string]string // life -> its name and roles
	regions   map[string]string // the others -> what is wrong; "": nothing
}

// look looks again after was. A process that leaves has no roles any more, and keeps its text.
func (b *Board) look(was around) around {
	now := around{processes: map[string]string{}, regions: map[string]string{}}
	if err := b.cfg.Ready(); err != nil {
		now.trouble = err.Error()
	}
	for _, p := range b.cfg.Members.Members() {
		life := presence.IncarnationName(p.Name, p.Incarnation)
		if now.processes[life] = was.processes[life]; len(p.Roles) > 0 {
			now.processes[life] = fmt.Sprintf("%s (%s)", p.Name, strings.Join(p.Roles, ", "))
		}
	}
	for _, p := range b.cfg.Report.Report().Peers {
		switch {
		case p.LeftOut:
			now.regions[p.Name] = "is silent, and totals leave it out"
		case max(p.Heard, p.Lag).Seconds() > silence:
			now.regions[p.Name] = "is not heard any more"
		default:
			now.regions[p.Name] = ""
		}
	}
	return now
}

// Watch notes what happens, for the dashboard, until ctx ends. It asks no other process.
func (b *Board) Watch(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	b.events.add(fmt.Sprintf("This process, %s, has started.", b.cfg.Self))
	was := b.look(around{})
	began := false // who is there when the first look finds this process ready did not come then
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		is := b.look(was)
		if began = began || was.trouble == ""; began {
			b.compare(was, is)
		}
		was = is
	}
}

// compare notes what is different.
func (b *Board) compare(was, is around) {
	switch {
	case is.trouble == was.trouble:
	case is.trouble == "":
		b.events.add("This process is ready again.")
	default:
		b.events.add(fmt.Sprintf("This process is not ready: %s.", is.trouble))
	}
	for _, life := range slices.Sorted(maps.Keys(was.processes)) {
		if _, stays := is.processes[life]; !stays {
			b.events.add("A process went: " + was.processes[life] + ".")
		}
	}
	for _, life := range slices.Sorted(maps.Keys(is.processes)) {
		if _, was := was.processes[life]; !was {
			b.events.add("A process came: " + is.processes[life] + ".")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is.regions)) {
		switch now, before := is.regions[name], was.regions[name]; {
		case now == before:
		case now == "":
			b.events.add(fmt.Sprintf("The region %s is heard again.", name))
		default:
			b.events.add(fmt.Sprintf("The region %s %s.", name, now))
		}
	}
}
