package fanout

import (
	"context"
	"sync"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

// pollEvery is the time between two questions of a Poll.
const pollEvery = time.Second

// Polled knows the values of topics that nobody publishes.
type Polled interface {
	// Values calls found with the value of each topic that can be read now. A value is not empty. Values
	// returns when ctx ends, or within seconds.
	Values(ctx context.Context, topics []presence.Topic, found func(t presence.Topic, value string))
}

// Poll is a Source that asks for the values of the topics that are wanted, once a second for all subscribers
// together, and passes those that have changed to the hub. A topic that is wanted anew is asked for at once.
// Any goroutine may call the methods.
type Poll struct {
	hub  interface{ Update(u presence.Update) }
	from Polled
	wake chan struct{} // holds one: there is a topic without a value
	seq  uint64        // of the updates, also of a topic that is wanted again; Run's own

	mu     sync.Mutex                // guards values; the hub's lock may be held when it is taken
	values map[presence.Topic]string // of the topics that are wanted; empty: not found yet
}

// NewPoll returns a Poll that does nothing until Run.
func NewPoll(hub interface{ Update(u presence.Update) }, from Polled) *Poll {
	return &Poll{hub: hub, from: from, wake: make(chan struct{}, 1), values: map[presence.Topic]string{}}
}

// Want implements Source.
func (p *Poll) Want(t presence.Topic) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.values[t] = ""
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
		p.mu.Lock()
		var topics []presence.Topic
		for t, value := range p.values {
			if !fresh || value == "" {
				topics = append(topics, t)
			}
		}
		p.mu.Unlock()
		p.from.Values(ctx, topics, p.found)
	}
}

// found passes a value that is news to the hub.
func (p *Poll) found(t presence.Topic, value string) {
	p.mu.Lock()
	last, wanted := p.values[t]
	news := wanted && value != last
	if news {
		p.values[t] = value
	}
	p.mu.Unlock()
	if news {
		p.seq++
		p.hub.Update(presence.Update{Topic: t, Version: presence.Version{Incarnation: 1, Sequence: p.seq}, Value: value})
	}
}
