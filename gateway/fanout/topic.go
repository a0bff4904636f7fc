package fanout

import (
	"time"

	"headcount/presence"
)

// topic is one with subscribers in a shard. The shard's lock guards it.
type topic struct {
	name    presence.Topic
	encoder Encoder
	update  presence.Update
	gen     uint32 // grows with every new update; 0: it is not known yet
	subs    []subscription
	queued  bool          // in due
	at      time.Duration // when to look
	scanned time.Duration // when all subscribers were last looked at

	// texts are the update in the forms that subscribers want, each encoded once
	// for all of them: at most one for each form.
	texts []text
}

// text is a topic's update in one form.
type text struct {
	form  Form
	gen   uint32 // of the topic, when it was made
	bytes []byte // written without the lock, changed only by run
	shown uint64 // as Encode returned it
}

// subscription is one subscriber of a topic.
type subscription struct {
	sub   *Subscriber
	gen   uint32        // of the last update sent, or seen to be what the client has
	ready bool          // false while it is held
	asked bool          // a subscribe is to be answered
	form  Form          //
	at    time.Duration // when the last update was sent
	shown uint64        // text.shown of what the client has; 0: whatever comes is sent
}

// text is t's update in that form.
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
