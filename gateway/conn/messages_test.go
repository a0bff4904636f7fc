package conn

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/presence"
)

// Messages of clients are parsed into what they ask for.
func TestParseMessage(t *testing.T) {
	for text, want := range map[string]message{
		`{"type":"join","page":"p"}`:                    {kind: typeJoin, pages: []string{"p"}},
		`{"page":"a/b","x":[1],"type":"leave"}`:         {kind: typeLeave, pages: []string{"a/b"}},
		`{"type":"subscribe","pages":["p","*","p"]}`:    {kind: typeSubscribe, pages: []string{"p", "*", "p"}},
		`{"type":"subscribe","pages":[]}`:               {kind: typeSubscribe, pages: nil},
		`{"type":"unsubscribe","pages":["p"],"page":7}`: {kind: typeUnsubscribe, pages: []string{"p"}},
		`{"type":"subscribe","pages":["p"],"precision":2}`: {kind: typeSubscribe, pages: []string{"p"},
			precision: 2},
		`{"type":"unsubscribe","pages":["p"],"precision":"x"}`: {kind: typeUnsubscribe, pages: []string{"p"}},
		`{"type":"subscribe","counters":["views:1","a/b"]}`: {kind: typeSubscribe,
			counters: []string{"views:1", "a/b"}},
		`{"type":"unsubscribe","counters":["a"],"pages":["p"]}`: {
			kind: typeUnsubscribe, pages: []string{"p"}, counters: []string{"a"},
		},
		` {"type":"heartbeat"} `: {kind: typeHeartbeat, pages: nil},
		`{"type":"read"}`:        {kind: typeRead, pages: nil},
		// The names of members are case-sensitive, unlike those that encoding/json matches.
		`{"type":"join","page":"\u0041","Type":"bad"}`: {kind: typeJoin, pages: []string{"A"}},
	} {
		m, err := parseMessage([]byte(text))
		if err != nil || m.kind != want.kind || !slices.Equal(m.pages, want.pages) ||
			!slices.Equal(m.counters, want.counters) || m.precision != want.precision {
			t.Errorf("parseMessage(%s) = %+v, %v; want %+v", text, m, err, want)
		}
	}
}

// Each malformed message is answered with its own code.
func TestParseMessageFaults(t *testing.T) {
	for text, want := range map[string]string{
		``: calls.CodeBadJSON, `{`: calls.CodeBadJSON, `null`: calls.CodeBadJSON, `[]`: calls.CodeBadJSON,
		`"join"`: calls.CodeBadJSON, `{"type":"join"}x`: calls.CodeBadJSON,
		`{"type":1}`: calls.CodeBadJSON, `{"type":null}`: calls.CodeBadJSON,
		`{"type":"join","page":1}`: calls.CodeBadJSON, `{"type":"join","page":null}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":"p"}`: calls.CodeBadJSON, `{"type":"subscribe","pages":[1]}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":[null]}`:                 calls.CodeBadJSON,
		`{"type":"subscribe","pages":null}`:                   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":"2"}`:  calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":null}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":2.5}`:  calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":0}`:    calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":10}`:   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":-1}`:   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":257}`:  calls.CodeBadJSON,
		`{}`: calls.CodeBadType, `{"type":"Join","page":"p"}`: calls.CodeBadType,
		`{"TYPE":"join","page":"p"}`: calls.CodeBadType, `{"type":""}`: calls.CodeBadType,
		`{"type":"join"}`: calls.CodeBadPage, `{"type":"join","page":""}`: calls.CodeBadPage,
		`{"type":"join","page":"*"}`: calls.CodeBadPage, `{"type":"join","page":"\ud800"}`: calls.CodeBadPage,
		`{"type":"join","PAGE":"p"}`: calls.CodeBadPage, `{"type":"subscribe","pages":["p",""]}`: calls.CodeBadPage,
		`{"type":"subscribe"}`:                                    calls.CodeBadPage,
		`{"type":"subscribe","counters":null}`:                    calls.CodeBadJSON,
		`{"type":"subscribe","counters":{}}`:                      calls.CodeBadJSON,
		`{"type":"subscribe","counters":[1]}`:                     calls.CodeBadJSON,
		`{"type":"subscribe","counters":["a",null]}`:              calls.CodeBadJSON,
		`{"type":"subscribe","counters":[""]}`:                    calls.CodeBadCounter,
		`{"type":"unsubscribe","counters":["a*"]}`:                calls.CodeBadCounter,
		`{"type":"subscribe","counters":["a","."],"pages":["p"]}`: calls.CodeBadCounter,
		`{"type":"subscribe","counters":["a"],"pages":["."]}`:     calls.CodeBadPage,
	} {
		_, err := parseMessage([]byte(text))
		var f *fault
		if !errors.As(err, &f) || f.code != want {
			t.Errorf("parseMessage(%s) = %v, want %s", text, err, want)
		}
	}
}

// A fault names the page or counter in full, so that the client can find it.
func TestFaultsHaveWholeNames(t *testing.T) {
	long := strings.Repeat("é", 164)
	for _, text := range []string{
		`{"type":"join","page":"` + long + `"}`,
		`{"type":"subscribe","pages":["p","` + long + `"]}`,
		`{"type":"subscribe","counters":["` + long + `"]}`,
	} {
		_, err := parseMessage([]byte(text))
		var f *fault
		if !errors.As(err, &f) || f.value != long {
			t.Errorf("%.40s: the fault is %v, want one that names the whole key", text, err)
		}
	}
}

func FuzzParseMessage(f *testing.F) {
	for _, text := range []string{
		`{"type":"join","page":"p"}`, `{"type":"subscribe","pages":["p","*"]}`,
		`{"type":"subscribe","pages":["p"],"precision":2}`,
		`{"type":"subscribe","pages":["p"],"counters":["views:1","*"]}`, `{"type":"x\u0000"}`,
		`{"type":"join","page":"\ud800"}`, `null`, "{\"type\":\"\xff\"}",
		`{"type":"join","page":"é"}`, `{"type":"join","page":"p","page":"q"}`, `{"type":"join","page":"p\\"}`,
		`{"type":"join","page":""}`, `{"type":"join","page":"*"}`, "{\"type\":\"join\",\"page\":\"\x7f\"}",
	} {
		f.Add([]byte(text))
	}

	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseMessage(text)

		// The fast path for joins gives the same result as encoding/json.
		same, sameErr := decodeMessage(text)
		if !reflect.DeepEqual(m, same) || !reflect.DeepEqual(err, sameErr) {
			t.Fatalf("%q is parsed as %+v, %v; by encoding/json as %+v, %v", text, m, err, same, sameErr)
		}

		if err == nil {
			if m.precision > maxPrecision {
				t.Fatalf("%q let the precision %d pass", text, m.precision)
			}

			for _, page := range m.pages {
				if presence.CheckReadable(page) != nil {
					t.Fatalf("%q let the page %q pass", text, page)
				}
			}

			for _, key := range m.counters {
				if counter.CheckKey(key) != nil {
					t.Fatalf("%q let the counter %q pass", text, key)
				}
			}

			return
		}

		// Whatever the client has sent, it gets a readable error frame.
		var f *fault
		if !errors.As(err, &f) {
			t.Fatalf("%q: %v is no fault", text, err)
		}

		out := f.appendJSON(nil) // longer than the message, since a "<" becomes \u003c
		if !json.Valid(out) || !utf8.Valid(out) || len(out) > 4096+6*len(text) {
			t.Fatalf("%q: the error frame is %q, want valid JSON of bounded length", text, out)
		}
	})
}
