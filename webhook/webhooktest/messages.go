package webhooktest

import (
	"encoding/json"

	"headcount/webhook"
)

// Messages are the messages that a receiver has got. It checks that a repeated message has not changed, and that an
// event comes in only one message. One goroutine at a time may use it.
type Messages struct {
	broken func(promise, format string, args ...any)
	bodies map[string]string // by the ids of messages
	in     map[string]string // the ids of messages, by the ids of their events
}

// NewMessages returns Messages that call broken for each promise that is broken.
func NewMessages(broken func(promise, format string, args ...any)) *Messages {
	return &Messages{broken: broken, bodies: map[string]string{}, in: map[string]string{}}
}

// Take adds a message, and returns those of its events that have not come before.
func (m *Messages) Take(id, body string) (events []webhook.Event) {
	was, again := m.bodies[id]
	if again && was != body {
		m.broken("once", "message %s came as %s and as %s", id, was, body)
	}
	m.bodies[id] = body

	var message struct {
		Data struct{ Events []webhook.Event }
	}
	if err := json.Unmarshal([]byte(body), &message); err != nil || len(message.Data.Events) == 0 {
		m.broken("–", "message %s is %s, %v", id, body, err)
	}

	for _, e := range message.Data.Events {
		in, known := m.in[e.ID]
		if known && in != id {
			m.broken("once", "event %s came in %s and in %s", e.ID, in, id)
		}
		m.in[e.ID] = id
		if !known {
			events = append(events, e)
		}
	}

	return events
}
