package fanout

import (
	"slices"
	"time"

	"headcount/presence"
)

// topic is a topic with subscribers in a shard. The shard's lock guards it.
type topic struct {
	name    presence.Topic
	encoder Encoder
	update  presence.Update
	gen     uint32 // incremented with each new update; 0: there is none yet
	subs    []subscription
	scanAt  time.Duration // when subs are scanned next; 0: the topic is not in shard.due
	scanned time.Duration // when subs were last scanned
	changed time.Duration // when the newest update came
	before  time.Duration // when the one before it came; 0: there was none

	// texts has the update in each form that subscribers want, encoded once for all of them.
	texts []text
}

// text is a topic's update in one form.
type text struct {
	form  Form
	stale bool   // the update is marked as stale even if it is not
	gen   uint32 // topic.gen of the encoded update
	bytes []byte // written to clients without the lock; only run changes it
	shown uint64 // as Encode returned it
}

// subscription is the subscription of one subscriber to a topic.
type subscription struct {
	sub   *Subscriber
	gen   uint32 // topic.gen of the last update that was sent, or that the client did not need
	state subscriptionState
	form  Form
	early uint8         // how many of its next updates still count as its first ones, see dueAt
	at    time.Duration // when the last update was sent
	shown uint64        // text.shown of what the client has; 0: it gets the next update in any case
}

// subscriptionState says which updates a subscription gets.
type subscriptionState uint8

const (
	following subscriptionState = iota // the next update
	asking                             // also the current update, as the answer to a subscribe request
	withheld                           // none until Subscriber.Ready
	// overdue: it was withheld for too long, and gets updates marked as stale until Subscriber.Ready
	overdue
)

// asks reports whether the client waits for an answer to a subscribe request.
func (x *subscription) asks() bool { return x.state == asking || x.state == overdue && x.gen == 0 }

// answered ends what asks reports.
func (x *subscription) answered() {
	if x.state == asking {
		x.state = following
	}
}

// earlyUpdates is how many updates count as the first ones of a subscription, which dueAt puts off while people arrive.
// With the default interval that is 5 s of a page that fills.
const earlyUpdates = 10

// dueAt returns when a subscription that has got an update is due for the next one: an interval after the last.
//
// When many people come to a page within seconds, each of them would get every count on the way to the final one. So
// the first updates of a subscription wait while the topic keeps changing: until it has not changed for a fifth of the
// interval, but for one further interval at most. The final count then comes as early as to everybody else. A change
// that comes alone does not wait.
func (t *topic) dueAt(x *subscription, interval time.Duration) time.Duration {
	at := x.at + interval
	isAlone := t.before == 0 || t.changed-t.before >= interval
	if x.early == 0 || isAlone {
		return at
	}

	return min(max(at, t.changed+interval/5), at+interval)
}

// text returns the update of t in a form, marked as stale if requested.
func (t *topic) text(form Form, stale bool) *text {
	i := slices.IndexFunc(t.texts, func(one text) bool { return one.form == form && one.stale == stale })
	if i < 0 {
		i = len(t.texts)
		t.texts = append(t.texts, text{form: form, stale: stale})
	}

	encoded := &t.texts[i]
	// The first subscriber of a form pays for the encoding, and all others share it.
	if encoded.gen != t.gen {
		encoded.gen = t.gen
		update := t.update
		update.Stale = update.Stale || stale
		encoded.bytes, encoded.shown = t.encoder.Encode(encoded.bytes[:0], update, form)
	}

	return encoded
}
