package presence_test

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"headcount/presence"
)

func TestNames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		site := presence.SiteOf(rapid.StringMatching(`[a-z0-9-]{0,32}`).Draw(t, "site"))
		key := rapid.StringN(1, 128, 512).
			Filter(func(s string) bool { return presence.CheckPage(s) == nil }).Draw(t, "key")

		name := site.Qualify(key)

		if got, k := presence.SplitName(name); got != site || k != key || presence.KeyOf(name) != key {
			t.Fatalf("%q of %q is named %q, which is %q of %q", key, site, name, k, got)
		}

		if len(name) > presence.MaxName {
			t.Fatalf("the name has %d bytes, which is too long", len(name))
		}
		if err := presence.CheckName(name); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		if presence.TotalOf(name) != site.Qualify("*") {
			t.Fatalf("the total for %q is %q, want that of its site", name, presence.TotalOf(name))
		}

		// The text of a topic is parsed to the same topic, which is in the bucket of its name.
		topic := presence.CountTopic(name)
		read, err := presence.ParseTopic(topic.String())
		sameBucket := topic.Bucket(64) == presence.Bucket(name, 64)
		if err != nil || read != topic || topic.Name() != name || !sameBucket {
			t.Fatalf("%q is the topic %+v, read as %+v, %v", name, topic, read, err)
		}

		// A prefix matches names of one site only.
		prefix := key[:rapid.IntRange(0, len(key)).Draw(t, "prefix")]
		if !presence.HasPrefix(name, site.Qualify(prefix)) || name < presence.FirstWith(site.Qualify(prefix)) {
			t.Fatalf("%q does not begin with %q", name, site.Qualify(prefix))
		}
		other := presence.SiteOf("x" + site.String()[:min(31, len(site.String()))])
		ofOther := presence.HasPrefix(name, other.Qualify(""))
		ofThis := presence.HasPrefix(other.Qualify(key), site.Qualify(prefix))
		if ofOther || ofThis {
			t.Fatalf("%q begins with a prefix of another site's %q", name, other.Qualify(key))
		}
	})
}

// No key that a client may send is the name of a page of another site.
func TestNoKeyIsAName(t *testing.T) {
	name := presence.SiteOf("shop").Qualify("p")
	if presence.CheckPage(name) == nil || presence.CheckReadable(name) == nil {
		t.Errorf("CheckPage accepts %q", name)
	}

	for _, name := range []string{
		"", "*", "\x1f", "\x1fshop", "\x1fshop\x1f", "\x1fshop\x1f*", "\x1fSHOP\x1fp",
		"\x1f" + strings.Repeat("s", 33) + "\x1fp", "\x1fa\x1fb\x1fp",
	} {
		if presence.CheckName(name) == nil {
			t.Errorf("%q is accepted as the name of a page", name)
		}
	}
}

func TestParseSite(t *testing.T) {
	for _, name := range []string{"a", "0", "-", "shop-1", strings.Repeat("a", 32)} {
		if site, err := presence.ParseSite(name); err != nil || site.Name() != name {
			t.Errorf("%q: %q, %v", name, site.Name(), err)
		}
	}

	site, err := presence.ParseSite("default")
	if err != nil || site != presence.DefaultSite || site.Name() != "default" || site.Qualify("p") != "p" {
		t.Errorf("default: %q, %v", site, err)
	}

	for _, name := range []string{"", "A", "a.b", "a b", "é", "*", strings.Repeat("a", 33), "\x1f"} {
		if _, err := presence.ParseSite(name); err == nil {
			t.Errorf("the site %q is accepted, want an error", name)
		}
	}
}
