package pusher

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

// TestRecordedRequestsAreSigned has requests of pusher 5.3.4 for Node, and the example in Pusher's documentation.
func TestRecordedRequestsAreSigned(t *testing.T) {
	node := App{Key: "app-key", Secrets: []string{"the next secret", "app-secret"}}
	docs := App{Key: "278d425bdf160c739803", Secrets: []string{"7ad3773142a6692b25b8"}}
	for _, r := range []struct {
		app                   App
		at                    int64
		method, request, body string
		want                  Params // some of them
	}{
		{node, 1790000000, "GET",
			"/apps/1/channels?auth_key=app-key&auth_timestamp=1790000000&auth_version=1.0" +
				"&filter_by_prefix=news-&info=subscription_count,user_count" +
				"&auth_signature=1c9f171e253ce9aec5e7f970c0d1bcb2a55fa09de69b5ed9d67402573464afd8",
			"", Params{"filter_by_prefix": "news-", "info": "subscription_count,user_count"}},
		{node, 1790000000, "GET",
			"/apps/1/channels/news?auth_key=app-key&auth_timestamp=1790000000&auth_version=1.0" +
				"&auth_signature=ea54c0871c71195f5c0864d8d27e211271d0f5b13ee0bdda2a8cda6342440db9",
			"", nil},
		{node, 1790000000, "GET",
			"/apps/1/channels?auth_key=app-key&auth_timestamp=1790000000&auth_version=1.0" +
				"&filter_by_prefix=a%20b;%C3%A9" +
				"&auth_signature=cc477bdc532672bc768bb1f981ccefe230ce5c4819b5df711cd0c81dfd36215a",
			"", Params{"filter_by_prefix": "a b;é"}},
		{node, 1790000000, "GET",
			"/apps/1/channels/a%2Fb%20%C3%A9?auth_key=app-key&auth_timestamp=1790000000&auth_version=1.0" +
				"&auth_signature=1203892db72ed5ac000f7d10495c5beca4f4f943f84edd12e71ceb4f6ff13984",
			"", nil},
		{node, 1790000000, "POST",
			"/apps/1/events?auth_key=app-key&auth_timestamp=1790000000&auth_version=1.0" +
				"&body_md5=0d10dc9279c7aa5805fb509c863a2e92" +
				"&auth_signature=01b7ab159245adf918b9510859bf51844863881b5a253d92c4f09fe54d97cdac",
			`{"name":"headcount:changed","data":"{\"title\":\"Größe\"}","channels":["news","sport"],"socket_id":"1.2"}`,
			nil},
		{docs, 1353088179, "POST",
			"/apps/3/events?auth_key=278d425bdf160c739803&auth_timestamp=1353088179&auth_version=1.0" +
				"&body_md5=ec365a775a4cd0599faeb73354201b6f" +
				"&auth_signature=da454824c97ba181a32ccc17a72625ba02771f50b50e1e7430e47a1f3f457e6c",
			`{"name":"foo","channels":["project-3"],"data":"{\"some\":\"data\"}"}`, nil},
	} {
		// The path was signed as it was sent, with its escapes.
		path, query, _ := strings.Cut(r.request, "?")
		got, err := r.app.Open(r.method, path, query, time.Unix(r.at, 0))
		if err != nil {
			t.Errorf("%s: %v", r.request, err)
			continue
		}

		for name, value := range r.want {
			if got[name] != value {
				t.Errorf("%s: %s is %q, want %q", r.request, name, got[name], value)
			}
		}

		if r.body == "" {
			continue
		}

		if err := got.CheckBody([]byte(r.body)); err != nil {
			t.Error(err)
		}
		if err := got.CheckBody([]byte(r.body + " ")); !errors.Is(err, ErrSignature) {
			t.Errorf("with another body: %v, want ErrSignature", err)
		}
	}
}

// sign returns the query of a signed request.
func (a App) sign(method, path string, params map[string]string) string {
	var plain, escaped []string
	for _, name := range slices.Sorted(maps.Keys(params)) {
		plain = append(plain, name+"="+params[name])
		escaped = append(escaped, url.QueryEscape(name)+"="+url.QueryEscape(params[name]))
	}

	mac := hmac.New(sha256.New, []byte(a.Secrets[0]))
	mac.Write([]byte(method + "\n" + path + "\n" + strings.Join(plain, "&")))

	return strings.Join(escaped, "&") + "&auth_signature=" + hex.EncodeToString(mac.Sum(nil))
}

// Signed requests are accepted within ten minutes, and no others are.
func TestOnlyWhatWasSignedIsAccepted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		app := App{Key: "key", Secrets: []string{rapid.StringN(1, 40, -1).Draw(t, "secret")}}
		now := time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "now"), 0)
		age := rapid.Int64Range(-700, 700).Draw(t, "age")
		params := rapid.MapOfN(rapid.StringMatching(`[a-z_]{1,8}`), rapid.String(), 0, 4).Draw(t, "params")
		params["auth_key"] = app.Key
		params["auth_timestamp"] = fmt.Sprint(now.Unix() - age)

		path := "/apps/1/" + rapid.StringMatching(`[a-z]{0,5}(%2F)?`).Draw(t, "path")
		query := app.sign("GET", path, params)

		got, err := app.Open("GET", path, query, now)
		timely := max(age, -age) <= 600
		if timely != (err == nil) || timely && !maps.Equal(got, params) {
			t.Fatalf("a request that is %d s old: %v, %v", age, got, err)
		}

		// Any change of a signed part needs a new signature.
		name := rapid.SampledFrom(slices.Sorted(maps.Keys(params))).Draw(t, "name")
		other := maps.Clone(params)
		other[name] += "1"
		_, signature, _ := strings.Cut(query, "&auth_signature=")
		changed, _, _ := strings.Cut(app.sign("GET", path, other), "&auth_signature=")

		for what, open := range map[string]func() (Params, error){
			"method": func() (Params, error) { return app.Open("POST", path, query, now) },
			"path":   func() (Params, error) { return app.Open("GET", path+"x", query, now) },
			"secret": func() (Params, error) {
				return App{app.Key, []string{app.Secrets[0] + "x"}}.Open("GET", path, query, now)
			},
			"key":  func() (Params, error) { return App{"x", app.Secrets}.Open("GET", path, query, now) },
			"none": func() (Params, error) { return App{app.Key, nil}.Open("GET", path, query, now) },
			"value": func() (Params, error) {
				return app.Open("GET", path, changed+"&auth_signature="+signature, now)
			},
			"further": func() (Params, error) { return app.Open("GET", path, query+"&more=1", now) },
			"cut":     func() (Params, error) { return app.Open("GET", path, query[:len(query)-1], now) },
			"unsigned": func() (Params, error) {
				return app.Open("GET", path, strings.TrimSuffix(query, "&auth_signature="+signature), now)
			},
		} {
			if got, err := open(); !errors.Is(err, ErrSignature) {
				t.Fatalf("with another %s: %v, %v; want ErrSignature", what, got, err)
			}
		}
	})
}

func TestTriggers(t *testing.T) {
	event := func(rest string) string { return `{"name":"headcount:changed",` + rest + `}` }
	for _, tc := range []struct {
		parse func([]byte) ([]string, error)
		body  string
		want  []string // nil: an error with says
		says  string
	}{
		{ParseTrigger, event(`"channels":["b","a","b"],"data":"{}","socket_id":"1.2"`), []string{"a", "b"}, ""},
		{ParseTrigger, event(`"channel":"a/b é"`), []string{"a/b é"}, ""},
		{
			ParseBatch, `{"batch":[` + event(`"channel":"b"`) + `,` + event(`"channel":"a"`) + `,` +
				event(`"channel":"b"`) + `]}`, []string{"b", "a", "b"}, "",
		},

		{ParseTrigger, `{"name":"order.shipped","channels":["a"]}`, nil, "carries no messages"},
		{ParseTrigger, `{"channels":["a"]}`, nil, "carries no messages"},
		{
			ParseBatch, `{"batch":[` + event(`"channel":"b"`) + `,{"name":"x","channel":"a"}]}`, nil,
			"carries no messages",
		},
		{ParseTrigger, event(`"channels":[]`), nil, "1 to 100 channels"},
		{ParseTrigger, event(`"channels":["` + strings.Repeat(`x","`, 100) + `y"]`), nil, "1 to 100 channels"},
		{ParseTrigger, event(`"channels":["a","*"]`), nil, `"*" is no page`},
		{ParseTrigger, event(`"channels":["\ud800"]`), nil, "surrogate"},
		{ParseTrigger, event(`"channels":["a"],"info":"user_count"`), nil, "without info"},
		{ParseTrigger, event(`"channels":"a"`), nil, "JSON object such as"},
		{ParseTrigger, ``, nil, "JSON object such as"},
		{ParseTrigger, `null`, nil, "carries no messages"},
		{ParseBatch, `{"batch":[]}`, nil, "1 to 10 events"},
		{
			ParseBatch, `{"batch":[` + strings.Repeat(event(`"channel":"b"`)+",", 10) + event(`"channel":"b"`) + `]}`,
			nil, "1 to 10 events",
		},
		{ParseBatch, event(`"channel":"b"`), nil, "1 to 10 events"},
	} {
		got, err := tc.parse([]byte(tc.body))
		refused := err != nil && strings.Contains(err.Error(), tc.says)
		if tc.want == nil && !refused || !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, %v; want %q, %s", tc.body, got, err, tc.want, tc.says)
		}
	}
}

func TestInfo(t *testing.T) {
	channels := []presence.PageUsers{{Page: `a "b"`, Users: 2}, {Page: "c", Users: 1}}
	for list, want := range map[string][2]string{
		"": {`{"channels":{"a \"b\"":{},"c":{}}}`, `{"occupied":true}`},
		"user_count": {`{"channels":{"a \"b\"":{"user_count":2},"c":{"user_count":1}}}`,
			`{"occupied":true,"user_count":3}`},
		"user_count,subscription_count": {
			`{"channels":{"a \"b\"":{"subscription_count":2,"user_count":2},"c":{"subscription_count":1,` +
				`"user_count":1}}}`,
			`{"occupied":true,"subscription_count":3,"user_count":3}`},
	} {
		info, err := ParseInfo(list)
		if err != nil {
			t.Fatal(err)
		}

		if got := string(info.AppendChannels(nil, channels, false)); got != want[0] {
			t.Errorf("channels with the info %q: %s, want %s", list, got, want[0])
		}

		if got := string(info.AppendChannel(nil, 3, false)); got != want[1] {
			t.Errorf("a channel with the info %q: %s, want %s", list, got, want[1])
		}
	}

	if _, err := ParseInfo("user_count,cache"); err == nil || !strings.Contains(err.Error(), `"cache"`) {
		t.Errorf("an unknown attribute: %v, want it named", err)
	}

	stale := Info{}.AppendChannel(Info{}.AppendChannels(nil, nil, true), 0, true)
	if got := string(stale); got != `{"channels":{},"stale":true}{"occupied":false,"stale":true}` {
		t.Errorf("stale answers are %s", stale)
	}
}
