package fanout

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

// pollEvery is the time between two questions of a Poll.
const pollEvery = time.Second

// Polled knows the values of topics that nobody publishes.
type Polled interface {
	// Values calls found with the value of each topic that can be read now, and whether it may lack something.
	// A value is a JSON object with members. Values returns when ctx ends, or within seconds.
	Values(ctx context.Context, topics []presence.Topic, found func(t presence.Topic, value string, stale bool))
}

// Poll is a Source that asks for the values of the topics that are wanted, once a second for all subscribers
// together, and passes those that have changed to the hub. A topic that is wanted anew is asked for at once. The last
// known value of a topic that cannot be read is stale, and its JSON says so. Any goroutine may call the methods.
type Poll struct {
	hub  interface{ Update(u presence.Update) }
	from Polled
	wake chan struct{} // holds one: there is a topic without a value
	seq  uint64        // of the updates, also of a topic that is wanted again; Run's own

	mu     sync.Mutex                      // guards values; the hub's lock may be held when it is taken
	values map[presence.Topic]*polledValue // of the topics that are wanted
}

// polledValue is the last value of a topic, as it was passed to the hub.
type polledValue struct {
	text  string // empty: not found yet
	stale bool
}

// json returns the value with the mark of stale ones.
func (v polledValue) json() string {
	if !v.stale {
		return v.text
	}

	return strings.TrimSuffix(v.text, "}") + `,"stale":true}`
}

// NewPoll returns a Poll that does nothing until Run.
func NewPoll(hub interface{ Update(u presence.Update) }, from Polled) *Poll {
	return &Poll{hub: hub, from: from, wake: make(chan struct{}, 1), values: map[presence.Topic]*polledValue{}}
}

// Want implements Source.
func (p *Poll) Want(t presence.Topic) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.values[t] = &polledValue{}

	wake.Signal(p.wake)
}

// Unwant implements Source.
func (p *Poll) Unwant(t presence.Topic) {
	p.mu.Lock()
	defer p.mu.Unlock()

	delete(p.values, t)
}

// Wanted reports whether t is wanted, and how many topics are.
func (p *Poll) Wanted(t presence.Topic) (wanted bool, all int) {
	p.mu.Lock()
	defer p.mu.Unlock()

	_, wanted = p.values[t]

	return wanted, len(p.values)
}

// Run asks until ctx ends. It alone passes updates to the hub.
func (p *Poll) Run(ctx context.Context) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()

	for {
		fresh := false // only topics without a value
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.wake:
			fresh = true
		}

		p.ask(ctx, p.due(fresh))
	}
}

// due returns the topics that are wanted, or only those without a value.
func (p *Poll) due(fresh bool) map[presence.Topic]polledValue {
	p.mu.Lock()
	defer p.mu.Unlock()

	topics := make(map[presence.Topic]polledValue, len(p.values))
	for t, value := range p.values {
		if !fresh || value.text == "" {
			topics[t] = *value
		}
	}

	return topics
}

// ask passes the values of topics to the hub that are news.
func (p *Poll) ask(ctx context.Context, topics map[presence.Topic]polledValue) {
	p.from.Values(ctx, slices.Collect(maps.Keys(topics)), func(t presence.Topic, value string, stale bool) {
		delete(topics, t) // what is left in the end could not be read
		p.found(t, polledValue{value, stale})
	})

	for t, last := range topics {
		if last.text != "" {
			p.found(t, polledValue{last.text, true})
		}
	}
}

// found passes a value that is news to the hub.
func (p *Poll) found(t presence.Topic, value polledValue) {
	p.mu.Lock()
	last := p.values[t]
	news := last != nil && value != *last // nil: nobody wants it any more
	if news {
		*last = value
	}
	p.mu.Unlock()

	if news {
		p.seq++
		version := presence.Version{Incarnation: 1, Sequence: p.seq} // these updates never leave the process
		p.hub.Update(presence.Update{Topic: t, Version: version, Value: value.json()})
	}
}
