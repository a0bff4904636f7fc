package presence

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestVersionsAreOrderedByIncarnationFirst(t *testing.T) {
	v := rapid.Custom(func(t *rapid.T) Version {
		return Version{rapid.Uint64Range(0, 3).Draw(t, "incarnation"), rapid.Uint64Range(0, 3).Draw(t, "sequence")}
	})

	rapid.Check(t, func(t *rapid.T) {
		a, b := v.Draw(t, "a"), v.Draw(t, "b")
		if a.Compare(b) != -b.Compare(a) || (a.Compare(b) == 0) != (a == b) {
			t.Fatalf("Compare(%s, %s) = %d, the other way round %d", a, b, a.Compare(b), b.Compare(a))
		}

		if a.Incarnation > b.Incarnation && a.Compare(b) != 1 {
			t.Fatalf("%s is not newer than %s", a, b)
		}

		if back, err := ParseVersion(a.String()); err != nil || back != a {
			t.Fatalf("ParseVersion(%q) = %s, %v", a, back, err)
		}
	})

	for _, s := range []string{"", "1", "-", "1-", "-1", "1-2-3", "x-1", "1-x", "99999999999999999999-1", " 1-1"} {
		if v, err := ParseVersion(s); err == nil {
			t.Errorf("ParseVersion(%q) = %s", s, v)
		}
	}
}

func TestCountJSON(t *testing.T) {
	at := time.Date(2030, 10, 10, 14, 11, 42, 5e8, time.FixedZone("", 2*60*60))
	for want, c := range map[string]Count{
		`{"page":"p","count":0,"updated_at":null,"version":"0-0"}`: {Page: "p"},
		`{"page":"a\"b\\c<é","count":715,"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-42"}`: {
			Page: `a"b\c<é`, Users: 715, Updated: at, Version: Version{1700000000000, 42}},
		`{"page":"*","count":1,"updated_at":"2030-10-10T12:11:42Z","version":"1-1","stale":true}`: {
			Page: AllPages, Users: 1, Updated: at, Version: Version{1, 1}, Stale: true},
		`{"page":"p","count":1,"updated_at":null,"version":"1-1","stale":true,"stale_regions":["eu","us-2"]}`: {
			Page: "p", Users: 1, Version: Version{1, 1}, Without: "eu,us-2"},
	} {
		if got := string(c.AppendJSON(nil)); got != want {
			t.Errorf("AppendJSON = %s\nwant %s", got, want)
		}

		// The hand-written text is valid JSON.
		var members map[string]any
		if err := json.Unmarshal([]byte(want), &members); err != nil || members["page"] != c.Page {
			t.Errorf("%s reads as %v, %v", want, members, err)
		}
	}
}
