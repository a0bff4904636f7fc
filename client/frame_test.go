package client

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseFrame(t *testing.T) {
	at := time.Date(2030, 10, 10, 12, 11, 42, 0, time.UTC)
	yes := true
	for msg, want := range map[string]Frame{
		`{"type":"count","page":"p","count":12,"updated_at":"2030-10-10T12:11:42Z","version":"7-8"}`: {
			Type: "count", Count: Count{Page: "p", Count: 12, UpdatedAt: at, Version: Version{7, 8}},
		},
		`{"type":"count","page":"*","count":-1,"updated_at":null,"version":"0-0","stale":true}`: {
			Type: "count", Count: Count{Page: "*", Count: -1, Stale: true},
		},
		`{ "type" : "count", "page": "\u00e9\"", "count": 100, "new": [1, {}], "version": "1-1"}`: {
			Type: "count", Count: Count{Page: `é"`, Count: 100, Version: Version{1, 1}},
		},
		`{"type":"count","page":"p","count":1,"version":"1-1","stale":true,"stale_regions":["eu"]}`: {
			Type: "count", Count: Count{
				Page: "p", Count: 1, Version: Version{1, 1}, Stale: true, StaleRegions: []string{"eu"},
			},
		},
		`{"type":"counter","key":"likes:1","kind":"members","value":9007199254740993,"updated_at":null,` +
			`"version":"1-2","exact":true,"mine":true,"member":true}`: {
			Type: "counter", Counter: Counter{
				Key: "likes:1", Kind: "members", Value: 1<<53 + 1, Version: Version{1, 2}, Exact: true, Mine: true,
				Member: &yes,
			}},
		`{"type":"unread","count":3}`: {Type: "unread", Unread: 3},
		`{"type":"welcome","user":"u","id":"u.s","heartbeat_ms":15000}`: {
			Type: "welcome", User: "u", ID: "u.s", Heartbeat: 15 * time.Second,
		},
		`{"type":"reconnect","after_ms":12}`: {Type: "reconnect",
			After: 12 * time.Millisecond},
		`{"type":"error","code":"bad_page","message":"over 128","page":"é"}`: {
			Type: "error", Code: "bad_page", Message: "over 128", Page: "é",
		},
		`{"type":"error","code":"forbidden","message":"not open","counter":"n","new":1.5}`: {
			Type: "error", Code: "forbidden", Message: "not open", Key: "n",
		},
		`{"type":"heartbeat"}`: {Type: "heartbeat"},
	} {
		var got Frame
		if err := ParseFrame([]byte(msg), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("ParseFrame(%s) = %+v, %v", msg, got, err)
		}
	}

	for _, bad := range []string{
		"", "{}", "[]", "null", `{"type":1}`, `{"type":"count","page":"p","count":"1","version":"1-1"}`,
		`{"type":"count","page":"p","count":1e2,"version":"1-1"}`,
		`{"type":"count","page":"p","count":1,"version":"1-1"} x`,
		`{"type":"count","page":"p","count":1,"version":"1-1",}`, `{"type":"count","page":"p","count":1}`,
		`{"type":"count","page":"p","version":"1-1"}`, `{"type":"count","count":1,"version":"1-1"}`,
		`{"type":"count","page":"p","count":1,"version":"1"}`,
		`{"type":"counter","key":"k","version":"1-1"}`, `{"type":"counter","key":"k","value":1.5,"version":"1-1"}`,
		`{"type":"welcome"}`, `{"type":"unread"}`,
	} {
		var got Frame
		if err := ParseFrame([]byte(bad), &got); !errors.Is(err, ErrFrame) {
			t.Errorf("ParseFrame(%s) = %+v, %v", bad, got, err)
		}
	}
}

// The fast parser agrees with the slow one about every frame that it accepts.
func FuzzParseFrame(f *testing.F) {
	f.Add([]byte(`{"type":"count","page":"p","count":12,"updated_at":null,"version":"7-8","stale":false}`))
	f.Add([]byte(`{"type":"count","page":"p","count":12,"updated_at":"2030-10-10T12:11:42Z","version":"7-8"}`))
	f.Add([]byte(`{"type":"count","page":"p","count":-0,"count":007,"version":"1-1"}`))
	f.Add([]byte(`{"type":"count","page":"\u0041","count":1,"version":"1-1"}`))

	f.Fuzz(func(t *testing.T, msg []byte) {
		var short, long Frame
		if !scanFrame(msg, &short) {
			return
		}

		if err := decodeFrame(msg, &long); err != nil || !reflect.DeepEqual(short, long) {
			t.Fatalf("%q: short %+v, long %+v, %v", msg, short, long, err)
		}
	})
}

func TestVersionsAreOrdered(t *testing.T) {
	parse := func(s string) Version {
		v, err := ParseVersion(s)
		if err != nil || v.String() != s {
			t.Fatalf("ParseVersion(%q) = %s, %v", s, v, err)
		}

		return v
	}

	// The parts of a version are compared as numbers, not as text.
	ordered := []string{"0-0", "0-9", "0-10", "1-0", "1700000000000-1", "1700000000001-0"}
	for i := range ordered {
		for j := range ordered {
			if got := parse(ordered[i]).Before(parse(ordered[j])); got != (i < j) {
				t.Errorf("%s before %s = %v", ordered[i], ordered[j], got)
			}
		}
	}

	for _, bad := range []string{"", "-", "1", "1-", "-1", "1-2-3", "a-1", "99999999999999999999-1"} {
		if v, err := ParseVersion(bad); err == nil {
			t.Errorf("ParseVersion(%q) = %v", bad, v)
		}
	}
}

func TestTopicFramesStaySmallAndLoseNothing(t *testing.T) {
	var pages, got []string
	for i := range 100 {
		pages = append(pages, strings.Repeat("é", 128-i))
	}

	// The server accepts frames of at most 4 KiB.
	for _, msg := range topicFrames("subscribe", "pages", pages) {
		if len(msg) > 4096 {
			t.Errorf("a frame of %d bytes", len(msg))
		}

		var m struct {
			Type  string
			Pages []string
		}
		if err := json.Unmarshal(msg, &m); err != nil || m.Type != "subscribe" {
			t.Fatalf("%s: %v", msg, err)
		}
		got = append(got, m.Pages...)
	}

	if !slices.Equal(got, pages) || topicFrames("subscribe", "pages", nil) != nil {
		t.Errorf("%d of %d pages", len(got), len(pages))
	}
}
