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
	lookAt  time.Duration // when the next pass goes through subs; 0: the topic is not in shard.due
	scanned time.Duration // when a pass last went through subs
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
	early uint8         // how many of its next updates may be late, see dueAt
	at    time.Duration // when the last update was sent
	shown uint64        // text.shown of what the client has; 0: it gets the next update in any case
}

// subscriptionState says which updates a subscription gets.
type subscriptionState uint8

const (
	following subscriptionState = iota // the next update
	asking                             // also the current update, as the answer to a subscribe request
	held                               // none until Subscriber.Ready
	// overdue: it was held for too long, and gets updates marked as stale until Subscriber.Ready
	overdue
)

// waits reports whether the subscription waits for Subscriber.Ready.
func (s subscriptionState) waits() bool { return s == held || s == overdue }

// earlyUpdates is how many updates a new subscription may get late. With the default interval a page fills for 5 s
// meanwhile.
const earlyUpdates = 10

// dueAt returns when a subscription that has got an update is due for the next one, an interval after the last. When
// many come to a page within seconds, each of them would get all the counts on the way to the last one. So a new
// subscription to a topic that changes all the time waits until it has not changed for a fifth of the interval, but for
// no more than one further interval: the count that stays comes as early as to all others, and a change that comes
// alone at once.
func (t *topic) dueAt(sub *subscription, interval time.Duration) time.Duration {
	at := sub.at + interval
	isAlone := t.before == 0 || t.changed-t.before >= interval
	if sub.early == 0 || isAlone {
		return at
	}

	return min(max(at, t.changed+interval/5), at+interval)
}

// text returns the update of t in a form, marked as stale if requested.
func (t *topic) text(form Form, stale bool) *text {
	i := slices.IndexFunc(t.texts, func(x text) bool { return x.form == form && x.stale == stale })
	if i < 0 {
		i = len(t.texts)
		t.texts = append(t.texts, text{form: form, stale: stale})
	}

	x := &t.texts[i]
	// The first subscriber of a form pays for the encoding, and all others share it.
	if x.gen != t.gen {
		x.gen = t.gen
		update := t.update
		update.Stale = update.Stale || stale
		x.bytes, x.shown = t.encoder.Encode(x.bytes[:0], update, form)
	}

	return x
}
