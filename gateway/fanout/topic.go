package fanout

import (
	"time"

	"headcount/presence"
)

// topic is a topic with subscribers in a shard. The shard's lock guards it.
type topic struct {
	name    presence.Topic
	encoder Encoder
	update  presence.Update
	gen     uint32 // grows with every new update; 0: there is none yet
	subs    []subscription
	lookAt  time.Duration // when a pass goes through subs again; 0: the topic is not in shard.due
	scanned time.Duration // when a pass last went through subs

	// texts has the update in each form that subscribers want, encoded once for all of them.
	texts []text
}

// text is a topic's update in one form.
type text struct {
	form  Form
	gen   uint32 // topic.gen when it was made
	bytes []byte // written to clients without the lock, and changed only by run
	shown uint64 // as Encode returned it
}

// subscription is one subscriber of a topic.
type subscription struct {
	sub   *Subscriber
	gen   uint32 // topic.gen of the last update that was sent, or that the client did not need
	state subscriptionState
	form  Form
	at    time.Duration // when the last update was sent
	shown uint64        // text.shown of what the client has; 0: it gets the next update whatever that is
}

// subscriptionState says what a subscription waits for.
type subscriptionState uint8

const (
	following subscriptionState = iota // it gets the next update
	asking                             // it also gets the present update, as the answer to a subscribe
	held                               // it gets nothing until Subscriber.Ready
)

// text returns the update of t in a form.
func (t *topic) text(form Form) *text {
	i := 0
	for i < len(t.texts) && t.texts[i].form != form {
		i++
	}
	if i == len(t.texts) {
		t.texts = append(t.texts, text{form: form})
	}
	x := &t.texts[i]
	if x.gen != t.gen {
		x.gen = t.gen
		x.bytes, x.shown = t.encoder.Encode(x.bytes[:0], t.update, form)
	}
	return x
}
