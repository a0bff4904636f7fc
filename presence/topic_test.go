package presence_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

func TestTopicsAsText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		topic := presence.Topic{
			Site: presence.SiteOf(rapid.StringMatching(`[a-z0-9-]{0,8}`).Draw(t, "site")),
			Kind: presence.KindOf(rapid.StringMatching(`[a-z]{1,8}`).Draw(t, "kind")),
			Key:  rapid.StringMatching(`[/ a-zäö"\\*]{1,20}`).Draw(t, "key"),
		}

		got, err := presence.ParseTopic(topic.String())
		if err != nil || got != topic {
			t.Fatalf("%+v is %q, which is read as %+v, %v", topic, topic, got, err)
		}
	})

	for _, s := range []string{
		"", "count", "count/p", "count//", "/site/p", "Count//p",
		"count/A b/p", "count//a\nb", "count//a\xff", "count//" + strings.Repeat("k", 513),
	} {
		if topic, err := presence.ParseTopic(s); err == nil {
			t.Errorf("%q is accepted as %+v", s, topic)
		}
	}
}

func TestInvalidUpdates(t *testing.T) {
	u := presence.Count{Page: "p", Users: 1}.Update()
	if err := u.Check(); err != nil {
		t.Errorf("%+v: %v", u, err)
	}

	for _, value := range []string{"a\nb", "\xff", strings.Repeat("v", 1025)} {
		u.Value = value
		if u.Check() == nil {
			t.Errorf("the value %q is accepted", value)
		}
	}
}

func TestBucketsOfTopics(t *testing.T) {
	at := func(site, kind, key string) int {
		return presence.Topic{Site: presence.SiteOf(site), Kind: presence.KindOf(kind), Key: key}.Bucket(1 << 30)
	}

	for _, key := range []string{"p", "another page", "ページ"} {
		// Within a site, all kinds of a key share a bucket.
		if at("", "a", key) != at("", "b", key) || at("s", "a", key) != at("s", "b", key) {
			t.Errorf("the topics of %q on one site are in different buckets", key)
		}

		if at("", "a", key) != presence.Bucket(key, 1<<30) {
			t.Errorf("%q is not in the bucket of the page", key)
		}
		if at("", "a", key) == at("s", "a", key) {
			t.Errorf("%q has the same bucket on two sites", key)
		}
	}
}

func TestCountsAsUpdates(t *testing.T) {
	for _, c := range []presence.Count{
		{Page: "p"},
		{
			Page: "a/b", Users: 12, Updated: time.Unix(1700000000, 0).UTC(),
			Version: presence.Version{Incarnation: 3, Sequence: 4},
		},
		{Page: presence.AllPages, Users: 1, Updated: time.Unix(1, 0).UTC(), Stale: true, Without: "ap,us"},
	} {
		if got, ok := presence.CountOf(c.Update()); !ok || got != c {
			t.Errorf("%+v is read as %+v, %v", c, got, ok)
		}
	}

	topic := presence.CountTopic("p")
	if c, ok := presence.CountOf(presence.Update{Topic: topic}); !ok || c != (presence.Count{Page: "p"}) {
		t.Errorf("an update without a value is read as %+v, %v", c, ok)
	}

	for _, value := range []string{"x", "1", "-1 0", "1 x", "1 -1", " "} {
		if c, ok := presence.CountOf(presence.Update{Topic: topic, Value: value}); ok {
			t.Errorf("%q is read as %+v", value, c)
		}
	}

	topic.Kind = presence.KindOf("level")
	if c, ok := presence.CountOf(presence.Update{Topic: topic, Value: "1 0"}); ok {
		t.Errorf("an update of another kind is read as %+v", c)
	}
}
