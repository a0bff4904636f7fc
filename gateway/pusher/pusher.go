// Package pusher reads and writes the events of Pusher's protocol, version 7, as far as counting needs them. It knows
// no connections: for package gateway they are the messages of an ordinary WebSocket in other words.
//
// A channel is the page of its name: to subscribe is to join it, to unsubscribe is to leave it. The server sends
// pusher_internal:subscription_succeeded when the join is stored, then pusher_internal:subscription_count, which has
// the count, and again when that changes. Nothing else is published: channels with an authorization, with lists of
// their members or with events of their clients are refused. Where a client of Headcount would be asked to reconnect,
// or get an error and a close code, a client of Pusher gets a close code of Pusher.
package pusher

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

// Version is the version of the protocol, which a client names in its URL. Clients that offer a subprotocol offer
// Subprotocol.
const (
	Version     = "7"
	Subprotocol = "pusher-channels-protocol-" + Version
)

// Codes of errors and of close frames. After 40xx a client must not connect again as before, after 41xx it waits a
// second, after 42xx it connects at once.
const (
	CodeUnknownKey   = 4001
	CodeVersion      = 4007
	CodeUnauthorized = 4009
	CodeOverCapacity = 4100
	CodeReconnect    = 4200
	CodePongTimeout  = 4201
	CodeRejected     = 4301
)

// Events of clients.
const (
	Subscribe   = "pusher:subscribe"
	Unsubscribe = "pusher:unsubscribe"
	Ping        = "pusher:ping"
	Pong        = "pusher:pong"
	Signin      = "pusher:signin"
)

// Event is an event of a client.
type Event struct {
	Name    string
	Channel string // of Subscribe and Unsubscribe
}

// ParseEvent reads an event.
func ParseEvent(text []byte) (Event, error) {
	var e struct {
		Event *string
		Data  json.RawMessage
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return Event{}, fmt.Errorf("an event is a JSON object: %w", err)
	}

	if e.Event == nil {
		return Event{}, errors.New(`an event is a JSON object with "event", its name`)
	}

	// Of other events the data means nothing here, so it may be anything.
	if *e.Event != Subscribe && *e.Event != Unsubscribe {
		return Event{Name: *e.Event}, nil
	}

	var data struct{ Channel *string }
	if err := json.Unmarshal(e.Data, &data); err != nil || data.Channel == nil {
		return Event{}, fmt.Errorf(`the data of %s is a JSON object with "channel", a name`, *e.Event)
	}

	return Event{*e.Event, *data.Channel}, nil
}

var known = []string{Subscribe, Unsubscribe, Ping, Pong, Signin}

// CheckEvent returns why a client may not send an event of that name, or nil.
func CheckEvent(name string) error {
	if slices.Contains(known, name) {
		return nil
	}
	if strings.HasPrefix(name, "client-") {
		return errors.New("events of clients are not passed on: this server only counts")
	}

	return fmt.Errorf("the event %q has no meaning here; there are %s, %s and %s",
		presence.Excerpt(name), Subscribe, Unsubscribe, Ping)
}

// CheckChannel returns why nobody may subscribe to a channel of that kind, or nil. Its name may still be no page.
func CheckChannel(name string) error {
	switch {
	case strings.HasPrefix(name, "presence-"):
		return errors.New("a presence channel says who is there, and this server says only how many: " +
			"subscribe to a channel without presence- and bind pusher:subscription_count")
	case strings.HasPrefix(name, "private-"):
		return errors.New("a private channel needs an authorization, which this server does not check: " +
			"subscribe to a channel without private-")
	default:
		return nil
	}
}

var (
	plain = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	// taken are the last parts of the paths of the page that is called app.
	taken = []string{"counter", "stats", "widget"}
)

// CheckKey returns why key cannot be the key of an app, or nil.
func CheckKey(key string) error {
	switch {
	case !plain.MatchString(key):
		return errors.New("a key has 1 to 64 letters, digits, - and _")
	case slices.Contains(taken, key):
		return fmt.Errorf("/app/%s is a path of the page app", key)
	default:
		return nil
	}
}

// AppendEstablished appends the first event. A client that has received nothing for the time activity sends a Ping.
func AppendEstablished(b []byte, socket string, activity time.Duration) []byte {
	// Rounded up, since a client must not ping before the time is over, and 0 would mean at once.
	seconds := max(activity.Milliseconds()+999, 1000) / 1000

	const event = `{"event":"pusher:connection_established","data":"{\"socket_id\":\"%s\",\"activity_timeout\":%d}"}`

	return fmt.Appendf(b, event, socket, seconds)
}

// AppendSucceeded appends the event that confirms a subscription. Like that of AppendCount, its channel must be a page.
func AppendSucceeded(b []byte, channel string) []byte {
	b = append(b, `{"event":"pusher_internal:subscription_succeeded","channel":`...)
	b = presence.AppendString(b, channel)

	return append(b, `,"data":"{}"}`...)
}

// AppendCount appends the event with the count of a channel.
func AppendCount(b []byte, channel string, count int64) []byte {
	b = append(b, `{"event":"pusher_internal:subscription_count","channel":`...)
	b = presence.AppendString(b, channel)
	b = append(b, `,"data":"{\"subscription_count\":`...)
	b = strconv.AppendInt(b, count, 10)

	return append(b, `}"}`...)
}

// AppendPong appends the answer to a Ping.
func AppendPong(b []byte) []byte { return append(b, `{"event":"pusher:pong","data":"{}"}`...) }

// AppendNoSignin appends the answer to a Signin. Libraries send one each time that they connect, if the page has called
// signin: it is no mistake of theirs.
func AppendNoSignin(b []byte) []byte {
	const text = "nobody can sign in here: this server only counts, and knows visitors by a cookie or a token"
	return AppendError(b, CodeUnauthorized, text)
}

// AppendError appends an error, which libraries give to the listeners of the connection.
func AppendError(b []byte, code int, message string) []byte {
	data := map[string]any{"code": code, "message": message}
	return appendJSON(b, map[string]any{"event": "pusher:error", "data": data})
}

// AppendSubscriptionError appends the error of one channel, which libraries give to the listeners of the channel.
func AppendSubscriptionError(b []byte, channel string, code int, message string) []byte {
	return appendJSON(b, map[string]any{
		"event": "pusher:subscription_error", "channel": channel,
		"data": map[string]any{"type": "SubscriptionError", "error": message, "status": code},
	})
}

func appendJSON(b []byte, event map[string]any) []byte {
	text, err := json.Marshal(event)
	if err != nil {
		panic(err) // strings and numbers
	}

	return append(b, text...)
}
