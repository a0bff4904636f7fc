// Package webhook tells servers of the operator what happens on pages and with counters: it
// sends signed, batched events to URLs.
//
// # From a count to an event
//
// Of every hook and page (or counter) a [Store] keeps what was last told: that it is occupied,
// that it is over the threshold, or the greatest count of the day. [Pages] hears the counts of
// the buckets that its dispatcher serves, compares them with what was told, and where they differ
// makes a [Change]: in one step the store replaces what was told and puts the event into the
// hook's outbox. The step is refused when something else was told meanwhile. So of two processes
// that see the same change, or of one that repeats a step of which it heard no answer, only one
// step makes an event. A process that begins to serve a bucket reads what was told, and the counts
// of now, and tells what changed while nobody looked.
//
// [Counters] does the same for counters: each process looks at those that it has changed itself.
//
// What goes up is told at once. What goes down has to stay down for Settle, and is read from the
// store again then: an empty page, and a count that is back at the threshold. A new peak gathers
// for as long.
//
// # From an event to a receiver
//
// One process at a time has the outbox of a hook: the dispatcher that owns the hook's bucket. Its
// sender takes the oldest events as a batch. The store seals the batch: until it is done, every
// take returns the same events, to whichever process. So a batch that is sent again, by whoever,
// has the same webhook-id and the same body.
//
// The messages are those of "Standard Webhooks": an id, a time, and an HMAC-SHA256 over both and
// the body.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"headcount/presence"
)

// ErrUnavailable says that the store cannot be reached now. A call may or may not have taken
// effect, and is safe to repeat.
var ErrUnavailable = errors.New("the store of webhooks is unavailable")

// Bounds.
const (
	MaxHooks  = 32                 // of one server
	MaxQueue  = 10_000             // events in one outbox; beyond it the oldest are dropped
	MaxBatch  = 100                // events in one message
	MaxAge    = 24 * time.Hour     // of an event that no receiver took; older ones are dropped
	KeptFor   = 7 * 24 * time.Hour // what is kept of a hook that no process serves
	maxChange = 256                // changes in one call of a store
)

// Types of events.
const (
	Occupied    = "page.occupied" // somebody came to an empty page
	Vacated     = "page.vacated"  // nobody is on the page any more
	Over        = "page.over"     // the count passed the threshold
	Peak        = "page.peak"     // the greatest count of the day so far
	CounterOver = "counter.over"  // the value passed the threshold
)

// Event is what a receiver is told. ID is the first field in JSON.
type Event struct {
	ID        string    `json:"id"`
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"` // when it was noticed, in UTC, whole milliseconds
	Site      string    `json:"site"`
	Page      string    `json:"page,omitempty"`
	Count     *int64    `json:"count,omitempty"` // of the page
	Counter   string    `json:"counter,omitempty"`
	Value     *int64    `json:"value,omitempty"`     // of the counter
	Threshold *int64    `json:"threshold,omitempty"` // that was passed
	Day       string    `json:"day,omitempty"`       // of a peak, in UTC
	Version   string    `json:"version,omitempty"`   // of the count or the counter; a peak has none
}

// newEvent returns an event of now with an id of its own.
func newEvent(kind, name string, now time.Time) Event {
	site, _ := presence.SplitName(name)
	return Event{ID: "evt_" + rand.Text(), Type: kind, Timestamp: now.UTC().Truncate(time.Millisecond), Site: site.Name()}
}

func (e Event) encode() string {
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // it has texts and numbers alone
	}
	return string(text)
}

// Change replaces what was told of a subject, and puts an event into the outbox of its hook, in
// one step, if Was is what was told last.
type Change struct {
	Hook    string // Hook.ID
	Subject string // the name of a page or counter
	Was, Is string // empty: nothing was told, or what was told is over
	Event   string // as JSON; empty: nobody is told
	kind    string // of the event, for metrics; no store keeps it
}

// Store keeps what was told, and the outboxes. Its methods may be called from any goroutine. Their
// errors are ErrUnavailable.
type Store interface {
	// Tell makes changes, each in one step, and returns what is told of their subjects now, in
	// the order of changes, which is Change.Is where the change was made before or by this call.
	// Dropped is how many of the oldest events an outbox lost, because it had MaxQueue.
	Tell(ctx context.Context, changes []Change) (told []string, dropped int, err error)
	// Told returns what was told of all subjects of a hook.
	Told(ctx context.Context, hook string) (map[string]string, error)
	// Take returns the oldest events of an outbox, MaxBatch at most, and seals them: until Done,
	// every Take returns the same ones. None: the outbox is empty. Waiting is how many there are.
	Take(ctx context.Context, hook string) (events []string, waiting int, err error)
	// Done removes the sealed events from the outbox, if first is still the first of them.
	Done(ctx context.Context, hook, first string) error
}

// tell makes changes by as many calls as they need.
func tell(ctx context.Context, s Store, changes []Change) (told []string, dropped int, err error) {
	for chunk := range slices.Chunk(changes, maxChange) {
		some, n, err := s.Tell(ctx, chunk)
		dropped += n
		if err != nil {
			return told, dropped, err
		}
		told = append(told, some...)
	}
	return told, dropped, nil
}
