package pusher

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestParseEvent(t *testing.T) {
	for text, want := range map[string]Event{
		`{"event":"pusher:subscribe","data":{"auth":"","channel":"news"}}`: {Subscribe, "news"},
		`{"event":"pusher:unsubscribe","data":{"channel":"a/b \u00e9"}}`:   {Unsubscribe, "a/b é"},
		`{"event":"pusher:ping","data":{}}`:                                {Ping, ""},
		`{"event":"pusher:ping","data":"{}"}`:                              {Ping, ""},
		`{"event":"pusher:pong"}`:                                          {Pong, ""},
		`{"event":"client-x","channel":"c","data":[1]}`:                    {"client-x", ""},
	} {
		if e, err := ParseEvent([]byte(text)); err != nil || e != want {
			t.Errorf("%s: %+v, %v; want %+v", text, e, err, want)
		}
	}

	for text, want := range map[string]string{
		``:                             "JSON object",
		`[]`:                           "JSON object",
		`null`:                         `"event"`,
		`{"event":1}`:                  "JSON object",
		`{"data":{"channel":"x"}}`:     `"event"`,
		`{"event":"pusher:subscribe"}`: `"channel"`,
		`{"event":"pusher:subscribe","data":{"channel":null}}`:           `"channel"`,
		`{"event":"pusher:unsubscribe","data":"{\"channel\":\"news\"}"}`: `"channel"`,
	} {
		if e, err := ParseEvent([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want %s", text, e, err, want)
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want string // empty: accepted
	}{
		{CheckEvent("client-typing"), "not passed on"},
		{CheckEvent("pusher:cache"), `"pusher:cache" has no meaning`},
		{CheckEvent(Signin), ""},
		{CheckEvent(Ping), ""},
		{CheckChannel("presence-room"), "who is there"},
		{CheckChannel("private-encrypted-room"), "authorization"},
		{CheckChannel("cache-room"), ""},
		{CheckKey("app-key_1"), ""},
		{CheckKey("counter"), "of the page app"},
		{CheckKey(""), "letters"},
		{CheckKey("a/b"), "letters"},
	} {
		refused := tc.err != nil
		if refused != (tc.want != "") || refused && !strings.Contains(tc.err.Error(), tc.want) {
			t.Errorf("the error is %v, want %q", tc.err, tc.want)
		}
	}
}

// A client parses an event as JSON, and its data, if that is a string, as JSON again.
func TestEventsAreRead(t *testing.T) {
	const page = `say "hi" \ é`
	for text, want := range map[string]string{
		string(AppendEstablished(nil, "1.2",
			1500*time.Millisecond)): `pusher:connection_established {"activity_timeout":2,"socket_id":"1.2"}`,
		string(AppendEstablished(nil, "1.2",
			time.Millisecond)): `pusher:connection_established {"activity_timeout":1,"socket_id":"1.2"}`,
		string(AppendSucceeded(nil,
			page)): `pusher_internal:subscription_succeeded` + page + ` {}`,
		string(AppendCount(nil, page,
			12)): `pusher_internal:subscription_count` + page + ` {"subscription_count":12}`,
		string(AppendNoSignin(nil)): `pusher:error {"code":4009,` +
			`"message":"nobody can sign in here: this server only counts, and knows visitors by a cookie or a token"}`,
		string(AppendPong(nil)): `pusher:pong {}`,
		string(AppendError(nil, CodeUnknownKey,
			"a \"b\"\x00")): `pusher:error {"code":4001,"message":"a \"b\"\u0000"}`,
		string(AppendSubscriptionError(nil, "\x00", CodeUnauthorized, "not there")): "pusher:subscription_error\x00 " +
			`{"error":"not there","status":4009,"type":"SubscriptionError"}`,
	} {
		var e struct {
			Event, Channel string
			Data           any
		}

		if err := json.Unmarshal([]byte(text), &e); err != nil {
			t.Fatalf("%s: %v", text, err)
		}

		if data, ok := e.Data.(string); ok {
			if err := json.Unmarshal([]byte(data), &e.Data); err != nil {
				t.Fatalf("%s: %v", data, err)
			}
		}

		// Marshal writes the keys in order.
		data, err := json.Marshal(e.Data)
		if got := e.Event + e.Channel + " " + string(data); err != nil || got != want {
			t.Errorf("the client reads %s, %v, want %s", got, err, want)
		}
	}
}
