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

// pollEvery is the time between two polls.
const pollEvery = time.Second

// Polled knows the values of topics for which no updates are published.
type Polled interface {
	// Values calls found with the value of each topic that can be read now, and whether the value may be incomplete. A
	// value is a JSON object with members. Values returns when ctx ends, or within seconds.
	Values(ctx context.Context, topics []presence.Topic, found func(t presence.Topic, value string, stale bool))
}

// Poll is a Source that polls the values of the wanted topics once a second, for all subscribers together, and passes
// changed values to the hub. A newly wanted topic is polled at once. While a topic cannot be read, its last known value
// is stale, and the JSON says so. Any goroutine may call the methods.
type Poll struct {
	hub  interface{ Update(u presence.Update) }
	from Polled
	wake chan struct{} // has capacity 1: there is a topic without a value
	seq  uint64        // of the updates; never starts again for a topic that is wanted again. Only Run uses it

	mu     sync.Mutex                      // guards values; may be locked while holding the hub's lock
	values map[presence.Topic]*polledValue // of the wanted topics
}

// polledValue is the last value of a topic that was passed to the hub.
type polledValue struct {
	text  string // empty: not found yet
	stale bool
}

// json returns the value, with the member that marks it as stale if it is.
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

	// The hub's lock is held, so the value is asked for later, by Run.
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

// Run polls until ctx ends. Only Run passes updates to the hub.
func (p *Poll) Run(ctx context.Context) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()

	for {
		fresh := false // poll only topics without a value
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
			// A copy, because found changes the value.
			topics[t] = *value
		}
	}

	return topics
}

// ask polls topics, and passes changed values to the hub.
func (p *Poll) ask(ctx context.Context, topics map[presence.Topic]polledValue) {
	p.from.Values(ctx, slices.Collect(maps.Keys(topics)), func(t presence.Topic, value string, stale bool) {
		delete(topics, t) // what is left in the end could not be read
		p.found(t, polledValue{value, stale})
	})

	for t, last := range topics {
		// Without a value there is nothing to mark as stale.
		if last.text != "" {
			p.found(t, polledValue{last.text, true})
		}
	}
}

// found passes a value to the hub if it has changed.
func (p *Poll) found(t presence.Topic, value polledValue) {
	p.mu.Lock()
	last := p.values[t]
	news := last != nil && value != *last // nil: nobody wants it any more
	if news {
		*last = value
	}
	p.mu.Unlock()

	if news {
		// Without the lock: the hub calls Want and Unwant while it holds its own.
		p.seq++
		// These updates never leave the process.
		version := presence.Version{Incarnation: 1, Sequence: p.seq}
		p.hub.Update(presence.Update{Topic: t, Version: version, Value: value.json()})
	}
}
