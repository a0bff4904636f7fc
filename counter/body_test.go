package counter

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"headcount/presence"
)

var testRules = func() *Rules {
	r, err := ParseRules([]byte(`{"rules":[{"match":"views:*","kind":"sum","dimensions":["country","os"]},` +
		`{"match":"u:*","kind":"unique"},{"match":"s:*","kind":"sum"},{"match":"e:*","kind":"exact"}]}`))
	if err != nil {
		panic(err)
	}
	return r
}()

// The body of an increment has a whole number from 1 to MaxDelta, or none, which is 1.
func TestParseStep(t *testing.T) {
	rule := testRules.Find("views:1")
	for body, want := range map[string]int64{
		"": 1, " \n": 1, "{}": 1, `{"delta":5}`: 5, ` { "delta" : 1000000000000 } `: 1e12, `{"dimensions":{}}`: 1,
		`{"dimensions":{"country":"de","os":"\u00fc \\ \""},"delta":2}`: 2,
		// refused bodies
		`{"delta":0}`: 0, `{"delta":-1}`: 0, `{"delta":1000000000001}`: 0, `{"delta":1.5}`: 0, `{"delta":1e3}`: 0,
		`{"delta":"5"}`: 0, `{"delta":null}`: 0,
		`{"delta":true}`: 0, `{"delta":01}`: 0, `{"delta":+1}`: 0, `{"delta":-}`: 0, `{"delta":0x1}`: 0,
		`{"delta":99999999999999999999}`: 0, `{"delta":[1]}`: 0, `{"delta":1.0}`: 0,
		`{"delat":5}`: 0, `{"delta":5,}`: 0, `{"delta":5}x`: 0, `{"delta":5}{}`: 0, `{"delta":5,"delta":5}`: 0, `[]`: 0,
		`5`: 0, `null`: 0, `{`: 0, `{"delta"`: 0, `{"delta":`: 0, `{"delta":5`: 0, "{\"delta\":5}\x00": 0,
		`{"dimensions":{"planet":"x"}}`: 0, `{"dimensions":{"country":""}}`: 0, `{"dimensions":{"country":5}}`: 0,
		`{"dimensions":[]}`: 0, `{"dimensions":{"country":"a","country":"b"}}`: 0,
		`{"dimensions":{"country":"` + strings.Repeat("x", 129) + `"}}`: 0,
		"{\"dimensions\":{\"country\":\"\xff\"}}":                       0,
		"{\"dimensions\":{\"country\":\"a\nb\"}}":                       0, `{"dimensions":{"country":"\x"}}`: 0,
		`{"Delta":5}`: 0,
	} {
		// A decrement has the same body, and changes by the negative number.
		for _, down := range []bool{false, true} {
			sign := int64(1)
			if down {
				sign = -1
			}

			c, err := ParseStep([]byte(body), "views:1", rule, down)

			if want == 0 { // refused, with an error of one line
				if !errors.Is(err, ErrBody) || strings.Contains(err.Error(), "\n") || !utf8.ValidString(err.Error()) {
					t.Errorf("%s: %+v, %v; want it refused in one line", body, c, err)
				}

				continue
			}
			if err != nil || c.Delta != sign*want || c.Verb != Add || c.Key != "views:1" || c.Rule != rule {
				t.Errorf("%s: %+v, %v, want %d", body, c, err, sign*want)
			}
		}
	}

	c, err := ParseStep([]byte(`{"dimensions":{"country":"de","os":"\u00fc \\ \""}}`), "views:1", rule, false)
	if want := []Dimension{{"country", "de"}, {"os", `ü \ "`}}; err != nil || !reflect.DeepEqual(c.Dimensions, want) {
		t.Errorf("the dimensions are %+v, %v; want %+v", c.Dimensions, err, want)
	}
}

// A batch has changes of counters with rules. A malformed batch is refused as a whole.
func TestParseBatch(t *testing.T) {
	many := func(n int) string {
		return `{"changes":[` + strings.TrimSuffix(strings.Repeat(`{"key":"s:1"},`, n), ",") + `]}`
	}

	for body, n := range map[string]int{
		`{"changes":[{"key":"s:1"}]}`: 1, `{"changes":[{"delta":-5,"key":"s:1"},{"key":"s:1","delta":1}]}`: 2,
		many(1000): 1000,
		`{"changes":[{"dimensions":{"os":"x"},"key":"views:1"}]}`: 1,
		many(1001): 0, many(0): 0, `{}`: 0, ``: 0, `{"changes":{}}`: 0, `{"changes":[{}]}`: 0,
		`{"changes":[{"key":"x:1"}]}`: 0, `{"changes":[{"key":"s:*"}]}`: 0, `{"changes":[{"key":"."}]}`: 0,
		`{"changes":[{"key":"s:1","delta":0}]}`: 0, `{"changes":[{"key":"s:1","delta":-1000000000001}]}`: 0,
		`{"changes":[{"key":"s:1","by":1}]}`: 0, `{"changes":[{"key":"s:1"}],"x":1}`: 0, `{"changes":[{"key":5}]}`: 0,
		`{"changes":[{"dimensions":{"os":"x"},"key":"s:1"}]}`: 0, `{"changes":[{"key":"s:1"},]}`: 0,
		`{"changes":[null]}`:                        0,
		`{"changes":[{"key":"e:1"},{"key":"e:2"}]}`: 2, `{"changes":[{"key":"s:1"},{"key":"e:1"}]}`: 0,
	} {
		changes, err := ParseBatch([]byte(body), testRules)
		if len(changes) != n || (err == nil) != (n > 0) || err != nil && !errors.Is(err, ErrBody) {
			t.Errorf("%.80s: %d changes, %v; want %d, or ErrBody for 0", body, len(changes), err, n)
		}

		for _, c := range changes {
			if c.Rule == nil || c.Verb != Add || c.Delta == 0 {
				t.Errorf("%.80s: the change is %+v, want a rule and a delta", body, c)
			}
		}
	}
}

func TestParseMembers(t *testing.T) {
	names := func(n int) string {
		var s []string
		for i := range n {
			s = append(s, fmt.Sprintf(`"%d"`, i))
		}

		return strings.Join(s, ",")
	}

	for body, want := range map[string][2]int{
		`{"add":["a"]}`: {1, 0}, `{"remove":["a"],"add":["b","b"]}`: {1, 1}, `{"add":[` + names(1000) + `]}`: {1000, 0},
		`{"add":[],"remove":["a"]}`: {0, 1},
		`{}`:                        {}, `{"add":[]}`: {}, `{"add":["a"],"remove":["a"]}`: {},
		`{"add":[` + names(1001) + `]}`: {}, `{"add":[` + names(999) + `],"remove":["a","b"]}`: {},
		`{"add":[1]}`: {}, `{"add":"a"}`: {}, `{"add":[""]}`: {}, `{"add":["*"]}`: {}, `{"ad":["a"]}`: {},
		`{"add":["\u0000"]}`: {}, `{"add":["` + strings.Repeat("x", 129) + `"]}`: {}, ``: {},
	} {
		c, err := ParseMembers([]byte(body), "m:1", &Rule{Kind: Members})
		if len(c.Join) != want[0] || len(c.Leave) != want[1] || (err == nil) != (want != [2]int{}) || err != nil &&
			!errors.Is(err, ErrBody) {
			t.Errorf("%.80s: %d join, %d leave, %v", body, len(c.Join), len(c.Leave), err)
		}
	}

	if _, err := ParseMembers([]byte(`{"remove":["a"]}`), "u:1", testRules.Find("u:1")); !errors.Is(err, ErrBody) {
		t.Errorf("a removal from a unique counter: %v, want ErrBody", err)
	}
}

func TestParseCorrections(t *testing.T) {
	for body, ok := range map[string]bool{
		`{"delta":-9223372036854775808,"reason":"r","by":"b"}`:                               true,
		`{"by":"b","reason":"` + strings.Repeat("ü", 200) + `","delta":9223372036854775807}`: true,
		`{"delta":0,"reason":"r","by":"b"}`:                                                  false,
		`{"reason":"r","by":"b"}`:                                                            false,
		`{"delta":1,"reason":"r"}`:                                                           false,
		`{"delta":1,"by":"b"}`:                                                               false,
		`{"delta":1,"reason":"","by":"b"}`:                                                   false,
		`{"delta":1,"reason":"` + strings.Repeat("ü", 201) + `","by":"b"}`:                   false,
		`{"delta":9223372036854775808,"reason":"r","by":"b"}`:                                false,
		`{"delta":1,"reason":5,"by":"b"}`:                                                    false,
		`{"delta":1,"reason":"r","by":"b","x":1}`:                                            false,
		`{"delta":1,"reason":"\u0000","by":"b"}`:                                             false, ``: false,
	} {
		c, err := ParseAdjust([]byte(body), "s:1", testRules.Find("s:1"))
		if (err == nil) != ok || err != nil && !errors.Is(err, ErrBody) || ok &&
			(c.Delta == 0 || c.Reason == "" || c.By != "b" || c.Verb != Adjust) {
			t.Errorf("adjust %.80s: %+v, %v; want it accepted: %t", body, c, err, ok)
		}
	}

	for body, ok := range map[string]bool{
		`{"reason":"r","by":"b"}`: true, `{"reason":"r"}`: false, `{"by":"b"}`: false, `{}`: false, ``: false,
		`{"delta":1,"reason":"r","by":"b"}`: false,
	} {
		c, err := ParseReset([]byte(body), "s:1", testRules.Find("s:1"))
		if (err == nil) != ok || ok && (c.Verb != Reset || c.Reason != "r" || c.By != "b") {
			t.Errorf("reset %s: %+v, %v; want it accepted: %t", body, c, err, ok)
		}
	}
}

// FuzzBodies: encoding/json accepts every body that the parsers accept, and reads the same values.
func FuzzBodies(f *testing.F) {
	for _, s := range []string{
		`{"delta":5,"dimensions":{"country":"de"}}`, `{"changes":[{"key":"s:1","delta":-1}]}`,
		`{"add":["a","\ud83d\ude00"],"remove":["b"]}`, `{"delta":1,"reason":"\n","by":"x"}`, `{"rules":[]}`,
		`{"delta":1.5}`,
	} {
		f.Add([]byte(s))
	}

	f.Fuzz(func(t *testing.T, body []byte) {
		b := fuzzed{t, body}
		b.step()
		b.batch()
		b.members()
		b.corrections()

		// Rules are read when the program starts, and its log has one line for each fault.
		if _, err := ParseRules(body); err != nil && strings.Contains(err.Error(), "\n") {
			t.Fatalf("%q: the error has more than one line: %q", body, err)
		}
	})
}

// fuzzed is a body that each parser is given, whatever it is.
type fuzzed struct {
	*testing.T
	body []byte
}

// object is what encoding/json reads.
type object struct {
	Delta      *int64
	Dimensions map[string]string
	Changes    []struct {
		Key   string
		Delta *int64
	}
	Add, Remove []string
	Reason, By  string
}

// read reads an accepted body with encoding/json. The parsers are our own, so that they refuse what encoding/json lets
// pass: names that are unknown or come twice, for instance. They must never accept more than it does.
func (b fuzzed) read() (is object) {
	b.Helper()
	if !json.Valid(b.body) {
		b.Fatalf("accepted %q, which is not JSON", b.body)
	}
	if err := json.Unmarshal(b.body, &is); err != nil {
		b.Fatalf("accepted %q, and encoding/json does not: %v", b.body, err)
	}

	return is
}

// deltaOr1 returns a delta, which is 1 if a body has none.
func deltaOr1(p *int64) int64 {
	if p == nil {
		return 1
	}
	return *p
}

func (b fuzzed) step() {
	b.Helper()
	c, err := ParseStep(b.body, "views:1", testRules.Find("views:1"), false)
	isEmpty := len(strings.TrimSpace(string(b.body))) == 0 // which is accepted, and no JSON
	if err != nil || isEmpty {
		return
	}

	is := b.read()
	if c.Delta != deltaOr1(is.Delta) || len(c.Dimensions) != len(is.Dimensions) || c.Delta < 1 || c.Delta > MaxDelta {
		b.Fatalf("%q is parsed as %+v, unlike by encoding/json", b.body, c)
	}

	for _, d := range c.Dimensions {
		if is.Dimensions[d.Name] != d.Value {
			b.Fatalf("%q is parsed as %+v, with other dimensions than by encoding/json", b.body, c)
		}
	}
}

func (b fuzzed) batch() {
	b.Helper()
	changes, err := ParseBatch(b.body, testRules)
	if err != nil {
		return
	}

	is := b.read()
	if len(changes) != len(is.Changes) {
		b.Fatalf("%q is parsed as %+v, with another number of changes than by encoding/json", b.body, changes)
	}

	for i, c := range changes {
		if c.Key != is.Changes[i].Key || c.Delta != deltaOr1(is.Changes[i].Delta) || CheckKey(c.Key) != nil {
			b.Fatalf("%q is parsed as %+v, unlike by encoding/json", b.body, changes)
		}
	}
}

func (b fuzzed) members() {
	b.Helper()
	c, err := ParseMembers(b.body, "m:1", testRules.Find("views:1"))
	if err != nil {
		return
	}

	b.read()
	for _, m := range append(c.Join, c.Leave...) {
		if CheckMember(m) != nil {
			b.Fatalf("%q is parsed as %+v, with an invalid member", b.body, c)
		}
	}
}

func (b fuzzed) corrections() {
	b.Helper()
	rule := testRules.Find("views:1")
	if c, err := ParseAdjust(b.body, "s:1", rule); err == nil {
		is := b.read()
		if c.Reason != is.Reason || c.By != is.By || c.Delta != *is.Delta {
			b.Fatalf("%q is parsed as %+v, unlike by encoding/json", b.body, c)
		}
	}

	if _, err := ParseReset(b.body, "s:1", rule); err == nil {
		b.read()
	}
}

// The first rule whose match fits a key applies, and what a rule leaves out has its default.
func TestRules(t *testing.T) {
	r := BuiltinRules()
	for key, want := range map[string]string{
		"views:1": "views:*", "views:": "views:*", "views": "*", "likes:x": "likes:*", "stock:1": "stock:*",
		"Views:1": "*", "visitors:a": "visitors:*", "votes:a": "votes:*",
	} {
		if got := r.Find(key); got == nil || got.Match != want {
			t.Errorf("%q: %+v, want %s", key, got, want)
		}
	}

	views, stock := r.Of("views:*"), r.Of("stock:*")
	if !reflect.DeepEqual(views.Resolutions, []Resolution{
		{time.Minute, 24 * time.Hour}, {time.Hour, 90 * 24 * time.Hour},
	}) || !views.Top || !views.Allows(PublicRead) || views.Allows(PublicIncrement) || views.MaxAge != 5*time.Second {
		t.Errorf("the rule of views is %+v", views)
	}

	if *stock.Floor != 0 || stock.Ceiling != nil || stock.Ledger != 2160*time.Hour || r.Of("nothing") != nil {
		t.Errorf("the rule of stock is %+v", stock)
	}

	if len(r.All()) != 6 || !r.Of("votes:*").Allows(PublicRead|PublicIncrement) || r.Of("votes:*").Max != DefaultMax ||
		r.Of("views:*").Max != 0 || r.Of("*").Public != 0 || !r.Of("likes:*").Allows(PublicMember) {
		t.Errorf("the rules are %+v", r.All())
	}

	// The first rule that fits applies, and without rules no counter exists.
	first, err := ParseRules([]byte(`{"rules":[{"match":"a*","kind":"sum"},{"match":"ab","kind":"exact"}]}`))
	if err != nil || first.Find("ab").Kind != Sum {
		t.Errorf("the rules are %+v, %v; want the first that fits, a sum", first, err)
	}

	if none, err := ParseRules([]byte(`{"rules":[]}`)); err != nil || none.Find("a") != nil {
		t.Errorf("without rules: %+v, %v; want that no key has one", none, err)
	}

	some, err := ParseRules([]byte(`{"rules":[{"match":"a","kind":"exact","floor":-5,"ceiling":9,"ledger":0,` +
		`"stale":"0s"},{"match":"b*","kind":"exact","ledger":"1d12h"}]}`))
	if err != nil || some.Find("ab") != nil || some.Find("a").Ledger != 0 || some.Find("a").MaxAge != 0 ||
		*some.Find("a").Ceiling != 9 || some.Find("bb").Ledger != 36*time.Hour {
		t.Errorf("the rules are %+v, %v", some, err)
	}
}

// TestInvalidRules: rules that cannot work are refused in one line, which says what to write.
func TestInvalidRules(t *testing.T) {
	one := func(rule string) string { return `{"rules":[{"match":"ok","kind":"sum"},{` + rule + `}]}` }
	for text, wants := range map[string][]string{
		``:                                {"object"},
		`{}`:                              {"rules"},
		`{"rule":[]}`:                     {`"rule"`, "unknown"},
		`{"rules":[{}]}x`:                 {"rule 1"},
		one(`"kind":"sum"`):               {"rule 2", "match", "missing"},
		one(`"match":"a"`):                {"rule 2", `"a"`, "kind", "missing"},
		one(`"match":"a*b","kind":"sum"`): {"rule 2", "match", "end"},
		one(`"match":"","kind":"sum"`):    {"rule 2", "match", "empty"},
		one(`"match":"a","kind":"summ"`):  {"rule 2", "kind", "exact"},
		one(`"match":"a","kind":"sum","floor":0`): {"rule 2", "floor",
			"exact"},
		one(`"match":"a","kind":"exact","floor":1`): {"rule 2", "floor",
			"0 or less"},
		one(`"match":"a","kind":"exact","ceiling":-1`): {"rule 2", "ceiling",
			"0 or more"},
		one(`"match":"a","kind":"exact","floor":1.5`): {"rule 2", "floor",
			"whole"},
		one(`"match":"a","kind":"exact","floor":"0"`): {"rule 2", "floor",
			"whole"},
		one(`"match":"a","kind":"sum","color":1`): {"rule 2", "color",
			"unknown"},
		one(`"match":"a","kind":"sum","public":["write"]`): {"rule 2", "public",
			"read"},
		one(`"match":"a","kind":"sum","public":["member"]`): {"rule 2", "public",
			"member"},
		one(`"match":"a","kind":"members","public":["increment"]`): {"rule 2", "public",
			"increment"},
		one(`"match":"a","kind":"sum","public":"read"`): {"rule 2", "public",
			"list"},
		one(`"match":"a","kind":"exact","buckets":["1m:1h"]`): {"rule 2", "buckets",
			"sum or unique"},
		one(`"match":"a","kind":"sum","buckets":["2m:1h"]`): {"rule 2", "buckets",
			"1m"},
		one(`"match":"a","kind":"sum","buckets":["1h:1m"]`): {"rule 2", "buckets",
			"duration"},
		one(`"match":"a","kind":"sum","buckets":["1m"]`): {"rule 2", "buckets",
			"step:kept"},
		one(`"match":"a","kind":"sum","buckets":["1m:1h","1m:2h"]`): {"rule 2", "buckets",
			"twice"},
		one(`"match":"a","kind":"sum","buckets":["1s:1h","10s:1h","1m:1h","5m:1h","1h:1h"]`): {"rule 2", "buckets",
			"4"},
		one(`"match":"a","kind":"sum","dimensions":["Country"]`): {"rule 2", "dimensions",
			"a-z"},
		one(`"match":"a","kind":"sum","dimensions":["a","b","c","d","e","f","g","h","i"]`): {"rule 2", "dimensions",
			"8"},
		one(`"match":"a","kind":"exact","dimensions":["a"]`):           {"rule 2", "dimensions", "sum"},
		one(`"match":"a","kind":"sum","top":true`):                     {"rule 2", "top", "buckets"},
		one(`"match":"a","kind":"sum","top":1`):                        {"rule 2", "top", "true"},
		one(`"match":"a","kind":"sum","ledger":"1h"`):                  {"rule 2", "ledger", "exact"},
		one(`"match":"a","kind":"exact","ledger":"1 year"`):            {"rule 2", "ledger", "90d"},
		one(`"match":"a","kind":"exact","ledger":"-1h"`):               {"rule 2", "ledger"},
		one(`"match":"a","kind":"exact","ledger":"500us"`):             {"rule 2", "ledger", "from 1ms"},
		one(`"match":"a","kind":"sum","stale":5`):                      {"rule 2", "stale", "quotes"},
		one(`"match":"a","kind":"sum","max":5`):                        {"rule 2", "max", "the public"},
		one(`"match":"a","kind":"sum","public":["increment"],"max":0`): {"rule 2", "max", "1 or more"},
		one(`"match":"a","match":"b","kind":"sum"`):                    {"rule 2", "twice"},
	} {
		_, err := ParseRules([]byte(text))
		if !errors.Is(err, ErrRule) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want ErrRule in one line", text, err)
			continue
		}

		for _, want := range wants {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", text, err, want)
			}
		}
	}
}

func TestParseDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"5s": 5 * time.Second, "90d": 90 * 24 * time.Hour, "1d12h": 36 * time.Hour, "0s": 0, "0": 0,
		"2160h": 2160 * time.Hour, "0d": 0,
	} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("%q is %s, %v; want %s", text, got, err, want)
		}
	}

	for _, text := range []string{
		"", "d", "5", "-5s", "1d-1h", "1.5d", "99999999d", "1dd", "1d 1h", "+1d", "9999999h99999999999h",
	} {
		if got, err := ParseDuration(text); err == nil {
			t.Errorf("%q is parsed as %s, want an error", text, got)
		}
	}
}

func TestKeysAndMatches(t *testing.T) {
	for key, ok := range map[string]bool{
		"a": true, "likes:42": true, "a b": true, "": false, "*": false, "a*": false, "-": false, ".": false,
		"..": false, "a\n": false, strings.Repeat("ü", 128): true, strings.Repeat("ü", 129): false, "\xff": false,
	} {
		if err := CheckKey(key); (err == nil) != ok || err != nil && !errors.Is(err, ErrKey) {
			t.Errorf("the key %q: %v; want it accepted: %t", key, err, ok)
		}
	}

	for match, ok := range map[string]bool{
		"*": true, "a*": true, "a": true, "-*": true, "-": false, "": false, "**": false, "a*b": false, "\n*": false,
		strings.Repeat("x", 127) + "*": true, strings.Repeat("x", 128) + "*": false,
	} {
		if err := CheckMatch(match); (err == nil) != ok || err != nil && !errors.Is(err, ErrMatch) {
			t.Errorf("the match %q: %v; want it accepted: %t", match, err, ok)
		}
	}
}

func TestAnyRuleOfAPrefix(t *testing.T) {
	rules, err := ParseRules([]byte(`{"rules":[{"match":"a:*","kind":"sum"},{"match":"a:b:*","kind":"exact"},` +
		`{"match":"c:d","kind":"exact"},{"match":"c*","kind":"sum"},{"match":"d*","kind":"exact"}]}`))
	if err != nil {
		t.Fatal(err)
	}

	shop, err := presence.ParseSite("shop")
	if err != nil {
		t.Fatal(err)
	}

	rules = rules.For([]presence.Site{shop})

	// A prefix counts as exact if a counter below it may be exact.
	for prefix, want := range map[string]bool{
		"": true, "a:": false, "a:b:": false, "c": true, "c:d": true, "c:d:": false, "c:e": false, "d": true,
		"d1": true, "e": false,
	} {
		for _, site := range []presence.Site{presence.DefaultSite, shop} {
			if got := rules.AnyExact(site.Qualify(prefix)); got != want {
				t.Errorf("AnyExact(%q) of site %q is %v, want %v", prefix, site, got, want)
			}
		}
	}
}

// TestOutsideForm pins the JSON of counters and ledgers.
func TestOutsideForm(t *testing.T) {
	at := time.Date(2030, 10, 10, 12, 11, 42, 5e8, time.UTC)
	for _, tc := range []struct {
		c    Counter
		want string
	}{
		{
			Counter{
				Key: "likes:42", Kind: Members, Value: 12, Updated: at,
				Version: presence.Version{Incarnation: 1700000000000, Sequence: 42},
			}, `{"key":"likes:42","kind":"members","value":12,"updated_at":"2030-10-10T12:11:42Z",` +
				`"version":"1700000000000-42","exact":true}`,
		},
		{
			Counter{Key: `a"\`, Kind: Sum},
			`{"key":"a\"\\","kind":"sum","value":0,"updated_at":null,"version":"0-0","exact":true}`,
		},
		{
			Counter{Key: "v", Kind: Unique, Value: 9007199254740993}, `{"key":"v","kind":"unique",` +
				`"value":9007199254740993,"updated_at":null,"version":"0-0","exact":false,"error":0.0081}`,
		},
		{
			Counter{
				Key: "v", Kind: Exact, Value: -1, Approx: true, Stale: true,
			}, `{"key":"v","kind":"exact","value":-1,"updated_at":null,"version":"0-0","exact":false,"stale":true}`,
		},
	} {
		if got := string(tc.c.AppendJSON(nil)); got != tc.want || !json.Valid([]byte(got)) {
			t.Errorf("got  %s\nwant %s", got, tc.want)
		}
	}

	// The reasons in a ledger may contain any characters.
	l := Ledger{
		Entries: []Entry{
			{
				Seq: 7, At: at, Op: LedgerIncrement, Delta: 1, Before: 1, After: 2,
			}, {
				Seq: 8, At: at, Op: LedgerAdjust, Delta: -500, Before: 1000, After: 500, Reason: "b\"o\nts<", By: "ops",
			},
		}, More: true,
	}

	want := `{"entries":[{"seq":7,"at":"2030-10-10T12:11:42Z","op":"increment","delta":1,"before":1,"after":2},` +
		`{"seq":8,"at":"2030-10-10T12:11:42Z","op":"adjust","delta":-500,"before":1000,"after":500,` +
		`"reason":"b\"o\nts\u003c","by":"ops"}],"next":8}`
	for want, l := range map[string]Ledger{strings.ReplaceAll(want, "\n", `\n`): l, `{"entries":[]}`: {}} {
		if got, err := json.Marshal(l); err != nil || string(got) != want {
			t.Errorf("got  %s, %v\nwant %s", got, err, want)
		}
	}
}
