// Package webhook reports changes of pages, users and counters to servers of the operator: it
// sends signed events to URLs, in batches.
//
// # From a count to an event
//
// For every hook and page (or counter) a [Store] keeps the state last reported: that it is occupied, that it is over
// the threshold, or the greatest count of the day. The dispatcher of a bucket passes the bucket's counts to
// [Service.Received], which compares them with the reported states. A difference becomes a [Change]: the store
// atomically replaces the reported state and puts the event into the hook's outbox. It refuses the change if the
// reported state is not Change.Was any more. So if two processes see the same change, or one process repeats a change
// because it received no answer, there is only one event. A process that begins to serve a bucket reads the reported
// states and the present counts, and reports the changes that no process saw.
//
// Counters are handled in the same way, except that each process judges the counters that it has
// changed itself ([Service.Changed]). It reads a counter before it reports it, because another process may have
// reported it, and once more Settle later, because another one may have reported the opposite at the same
// moment. The reported state is the time of the event. From time to time each process looks at all
// counters that are reported as over: another one may have ended between a fall and the end of Settle.
//
// Users are handled in the same way, too. The gateway that stores a user's arrival reports it
// ([Service.Arrived]): only gateways know the ids of users. The node that owns the user's partition
// notices the departure ([Service.Departed]), however the user left, and judges it Settle later: it
// reads the reported state, asks the owner whether the user is absent, and then replaces that state.
// Each arrival replaces the state, too, so the departure of a user who has come back meanwhile is
// refused. Departures that no process has judged are found by the owner of the hook's bucket, which
// compares all reported users with those present once a minute. Users that are counted again without an
// arrival, such as those whom their owner let time out while it did not reach the gateway, are found by
// the gateway, which compares its connections with the reported states as often. The id is in the
// reported state and in the outbox, sealed with the first key, because a store has no ids of users in
// the clear.
//
// A rise is reported at once. A fall (an empty page, or a count back at the threshold) must last for
// Settle, and the count is then read from the store before it is reported. A new peak is reported
// after Settle, too, because it may rise further. Where every count is reported, a change is reported at
// once, unless one of the page was less than the hook's interval ago: then the page is due at the end of it,
// and its newest count is read. That includes the return to 0.
//
// A process may stand still between any two steps, and another one go on in its place. So a change is
// reported only if what it was judged by was received or read a short time ago, see Service.isLate; otherwise
// that is read again. And a fall that was due long ago has to last for Settle once more: what was
// low then, and is low now, may have been high in between.
//
// # From an event to a receiver
//
// One process at a time sends the outbox of a hook: the dispatcher that owns the hook's bucket. Its
// sender takes the oldest events as a batch. The store freezes the batch: until it is acknowledged,
// every Take returns the same events, in every process. So a batch that is sent again, even by
// another process, has the same webhook-id, a hash of the body, and the same body.
//
// Messages have the form of "Standard Webhooks": an id, a time, and an HMAC-SHA256 over both and the
// body.
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

// ErrUnavailable means that the store cannot be reached now. The call may have taken effect or
// not, and is safe to repeat.
var ErrUnavailable = errors.New("the store of webhooks is unavailable")

// Bounds.
const (
	MaxHooks  = 32                 // hooks of one server
	MaxQueue  = 10_000             // events in one outbox; beyond the bound the oldest are dropped
	MaxBatch  = 100                // events in one message
	MaxAge    = 24 * time.Hour     // of an event that the receiver does not accept; older ones are dropped
	KeptFor   = 7 * 24 * time.Hour // how long a store keeps the data of a hook that no process serves
	maxChange = 256                // changes in one call to a store
)

// Types of events.
const (
	Occupied    = "page.occupied" // a page has its first user
	Vacated     = "page.vacated"  // a page has no users any more
	Over        = "page.over"     // the count passed the threshold
	Peak        = "page.peak"     // the greatest count of the day so far
	Count       = "page.count"    // the count has changed, perhaps several times
	CounterOver = "counter.over"  // the value passed the threshold
	Online      = "user.online"   // a user is on a page, and was on none
	Offline     = "user.offline"  // a user is on no page any more
)

// Event is one event in a message. ID is the first field in JSON.
type Event struct {
	ID        string    `json:"id"`
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"` // when the change was noticed, in UTC, whole milliseconds
	Site      string    `json:"site"`
	Page      string    `json:"page,omitempty"`
	Count     *int64    `json:"count,omitempty"` // of the page
	User      string    `json:"user,omitempty"`  // in the outbox: sealed
	Counter   string    `json:"counter,omitempty"`
	Value     *int64    `json:"value,omitempty"`     // of the counter
	Threshold *int64    `json:"threshold,omitempty"` // that was passed
	Day       string    `json:"day,omitempty"`       // of a peak, in UTC
	Version   string    `json:"version,omitempty"`   // of the count or the counter; a peak has none
}

// newEvent returns an event of this moment with an id of its own. It is not of the moment at which a round began: the
// process may have stood still since, and what was reported meanwhile would have a later time.
func newEvent(kind, name string) Event {
	// The key of the name goes into another field, by what the event is about.
	site, _ := presence.SplitName(name)

	return Event{
		ID: "evt_" + rand.Text(), Type: kind, Timestamp: time.Now().UTC().Truncate(time.Millisecond), Site: site.Name(),
	}
}

func (e Event) encode() string {
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // cannot happen: all fields are plain
	}

	return string(text)
}

// Change replaces the reported state of a subject and puts an event into the outbox of its hook, in
// one step, if Was is the reported state. With Was equal to Is it only reads the state.
type Change struct {
	Hook    string // Hook.ID
	Subject string // the name of a page or counter, or the hash of a user
	Was, Is string // reported states; empty: none, or reset
	Event   string // as JSON; empty: the change has no event
	kind    string // type of the event, for metrics; stores do not keep it
}

// Store keeps the reported states and the outboxes. Its methods may be called from any goroutine.
// Their errors are ErrUnavailable.
type Store interface {
	// Report makes changes, each in one step, and returns the reported states of their subjects,
	// in the order of changes: Change.Is, if the change was made by this call or before. dropped
	// is the number of oldest events that were dropped because an outbox had MaxQueue events.
	Report(ctx context.Context, changes []Change) (reported []string, dropped int, err error)
	// Reported returns the reported states of a hook, by subject.
	Reported(ctx context.Context, hook string) (map[string]string, error)
	// Take returns the oldest events of an outbox, at most MaxBatch, and freezes them: until
	// Acknowledge, every Take returns the same events. It returns none if the outbox is empty.
	// waiting is the number of all events in the outbox.
	Take(ctx context.Context, hook string) (events []string, waiting int, err error)
	// Acknowledge removes the first n of the frozen events from the outbox, if first is still the first of them. None
	// are frozen then.
	Acknowledge(ctx context.Context, hook, first string, n int) error
}

// report makes changes by as many calls of the store as they need.
func report(ctx context.Context, s Store, changes []Change) (reported []string, dropped int, err error) {
	// A script with all of them would hold up Redis.
	for chunk := range slices.Chunk(changes, maxChange) {
		some, n, err := s.Report(ctx, chunk)
		dropped += n
		// The changes before this chunk are made, so the caller gets their states.
		if err != nil {
			return reported, dropped, err
		}

		reported = append(reported, some...)
	}

	return reported, dropped, nil
}
