package conn

import (
	"slices"
	"strings"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/fanout"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// mineForm is the form of a counter's frame for a connection whose user is a member of the set.
// Form 0 is the frame for any other connection, and eventForm is an event.
const mineForm fanout.Form = 1

// CounterEncoder encodes counters. It implements fanout.Encoder.
type CounterEncoder struct{}

// Encode implements fanout.Encoder.
func (CounterEncoder) Encode(b []byte, u presence.Update, form fanout.Form) (encoded []byte, shown uint64) {
	members, version, ok := counterapi.Members(u)
	if !ok {
		return b, 0
	}

	// The hub marks updates as stale after their JSON was made, so the JSON may lack the mark.
	if u.Stale && !saysStale(u) {
		// A key cannot match: its quotes are escaped.
		members = strings.Replace(members, `"exact":true`, `"exact":false`, 1) + `,"stale":true`
	}

	if form == eventForm {
		b = append(b, "event: counter\nid: "...)
		b = append(b, version...)
		b = append(b, "\ndata: {"...)
		b = append(b, members...)

		return append(b, "}\n\n"...), 0
	}

	// A frame begins with the length of its text, so the text is made first.
	text := append(make([]byte, 0, 256), `{"type":"counter",`...)
	text = append(text, members...)

	if form == mineForm {
		text = append(text, `,"mine":true`...)
	}

	return websocket.AppendFrame(b, websocket.Text, append(text, '}')), 0
}

// saysStale reports whether the value of an update marks the counter as stale.
func saysStale(u presence.Update) bool { return strings.HasSuffix(u.Value, `,"stale":true`) }

// readable returns the rules of these counters, or a fault about the first counter that the client may not read.
func (c *conn) readable(keys []string) ([]*counter.Rule, error) {
	rules := make([]*counter.Rule, len(keys))
	for i, key := range keys {
		_, rule, err := c.all.cfg.Counters.Find(c.site(), presence.KeyOf(key))
		if err != nil {
			return nil, badCounter(key, err)
		}

		if !c.server && !rule.Allows(counter.PublicRead) {
			return nil, counterNotPublic.about("counter", presence.KeyOf(key))
		}

		rules[i] = rule
	}

	return rules, nil
}

// subscribed returns the counters that the client subscribes to.
func (c *conn) subscribed() []string {
	if c.counters == nil {
		return nil
	}

	return *c.counters
}

// addCounter adds a counter to those that the client subscribes to.
func (c *conn) addCounter(key string) {
	if c.counters == nil {
		c.counters = new([]string)
	}
	*c.counters = append(*c.counters, key)
}

// subscribeCounters subscribes to counters, which the client may read and has room for.
// The frame of a set is held back until it is known whether the user is a member.
func (c *conn) subscribeCounters(keys []string, rules []*counter.Rule) {
	for i, key := range keys {
		topic := counterapi.Topic(key)
		switch {
		case slices.Contains(keys[:i], key): // once is enough
		case slices.Contains(c.subscribed(), key):
			// Whoever asks again is sent the value again.
			c.Renew(topic)
		case rules[i].Kind.KnowsMembers():
			c.addCounter(key)
			c.Withhold(topic) // first: View wants a subscription, and may call Mine at once
			c.all.cfg.Live.View(key, c.member(), c)
		default:
			c.addCounter(key)
			c.Renew(topic)
		}
	}
}

func (c *conn) unsubscribeCounters(keys []string) {
	for _, key := range keys {
		i := slices.Index(c.subscribed(), key)
		if i < 0 {
			continue
		}

		*c.counters = slices.Delete(*c.counters, i, i+1)
		c.Unsubscribe(counterapi.Topic(key))
		c.all.cfg.Live.Unview(key, c.member(), c)
	}
}

// Mine implements counterapi.Viewer.
func (c *conn) Mine(key string, is, again bool) {
	form := fanout.Form(0)
	if is {
		form = mineForm
	}

	topic := counterapi.Topic(key)
	// The form comes first: after Ready the frame goes out.
	c.Reform(topic, form, again)
	c.Ready(topic)
}

var counterNotPublic = faultOf(calls.ErrNotPublic,
	"this counter is not public; open it in its rule, or send an API key with the upgrade")

func badCounter(key string, err error) *fault {
	return faultOf(err, err.Error()).about("counter", presence.KeyOf(key))
}
