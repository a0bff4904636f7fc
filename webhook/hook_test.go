package webhook

import (
	"slices"
	"strings"
	"testing"

	"headcount/presence"
)

var shop = presence.SiteOf("shop")

func TestParse(t *testing.T) {
	sites := []presence.Site{presence.DefaultSite, shop}
	for text, names := range map[string]struct{ matched, not []string }{
		"page:news/*=http://r.test/x": {
			[]string{"news/1", shop.Qualify("news/1"), "news/"}, []string{"new", "*", shop.Qualify("*")},
		},
		"page:*=https://r.test/?a=b>100":      {[]string{"news/1", "p"}, []string{"*"}},
		"page:p=https://r.test":               {[]string{"p"}, []string{"p2", "*"}},
		"page@shop:p*>100=https://r.test":     {[]string{shop.Qualify("p2")}, []string{"p2"}},
		"page@default:p*>peak=https://r.test": {[]string{"p2"}, []string{shop.Qualify("p2")}},
		"page:a=b>=http://r.test":             {[]string{"a=b>"}, []string{"a=b"}},
		"site=https://r.test":                 {[]string{"*", shop.Qualify("*")}, []string{"p"}},
		"site@shop>1000=https://r.test":       {[]string{shop.Qualify("*")}, []string{"*"}},
		"counter:likes:*>1000=https://r.test": {[]string{"likes:1"}, []string{"views:1", "*"}},
		"count:blog/*@5s=https://r.test":      {[]string{"blog/1", shop.Qualify("blog/1")}, []string{"blog", "*"}},
		"count@shop:*@1h=https://r.test":      {[]string{shop.Qualify("p")}, []string{"p", shop.Qualify("*")}},
		"count:a@2s@1s=https://r.test":        {[]string{"a@2s"}, []string{"a"}},
		"user:alice=https://r.test":           {[]string{"alice", shop.Qualify("alice")}, []string{"bob"}},
		"user@shop:*=https://r.test":          {[]string{shop.Qualify("alice")}, []string{"alice"}},
	} {
		hooks, err := Parse([]string{text}, sites)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}

		for _, name := range slices.Concat(names.matched, names.not) {
			if is := hooks[0].matches(name); is != slices.Contains(names.matched, name) {
				t.Errorf("%q matches %q: %t", text, name, is)
			}
		}
	}

	for text, want := range map[string]string{
		"":                                    "no http or https URL",
		"page:p":                              "no http or https URL",
		"page:p=ftp://r.test":                 "no http or https URL",
		"page:p=http:///path":                 "is no http or https URL",
		"p=http://r.test":                     `"p" is not a valid condition`,
		"page=http://r.test":                  `"page" is not a valid condition`,
		"site:p=http://r.test":                `"site:p" is not a valid condition`,
		"page:a*b=http://r.test":              "a * stands only at the end",
		"page:=http://r.test":                 "page:",
		"page@none:p=http://r.test":           `no site "none"`,
		"page:p>0=http://r.test":              "whole number from 1",
		"page:p>99999999999999999999=http://": "is no http or https URL",
		"page:p>99999999999999999999=http://r.test/": "whole number from 1",
		"counter:c=http://r.test":                    "has no threshold",
		"counter:c>peak=http://r.test":               "has no threshold",
		"count:p=http://r.test":                      "has no time between",
		"count@5s=http://r.test":                     `no site "5s"`,
		"count:p@soon=http://r.test":                 `"soon" is no time from 1s to 24h`,
		"count:p@500ms=http://r.test":                "1s to 24h",
		"count:p@25h=http://r.test":                  "1s to 24h",
		"count:@5s=http://r.test":                    "it is empty",
		"count:p>100@5s>2=http://r.test":             "has a threshold, which every count passes",
		"user=http://r.test":                         `"user" is not a valid condition`,
		"user:u>1=http://r.test":                     "which a user cannot have",
		"user:u>peak=http://r.test":                  "which a user cannot have",
	} {
		if _, err := Parse([]string{text}, sites); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}

	one := "page:p=http://r.test"
	if _, err := Parse([]string{one, one}, sites); err == nil || !strings.Contains(err.Error(), "is a duplicate") {
		t.Errorf("the same hook twice gives %v", err)
	}
	if _, err := Parse(make([]string, MaxHooks+1), sites); err == nil ||
		!strings.Contains(err.Error(), "more than 32") {
		t.Errorf("too many hooks give %v", err)
	}
}

// TestSign uses the example of Standard Webhooks.
func TestSign(t *testing.T) {
	key, err := ParseSecret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	if err != nil {
		t.Fatal(err)
	}

	const want = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
	if got := Sign([][]byte{key}, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
		[]byte(`{"test": 2432232314}`)); got != want {
		t.Errorf("the signature is %s, want %s", got, want)
	}
	if got := Sign([][]byte{key, key}, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
		[]byte(`{"test": 2432232314}`)); got != want+" "+want {
		t.Errorf("with two keys the signature is %s, want both", got)
	}

	for _, bad := range []string{
		"", "secret", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
		"whsec_" + strings.Repeat("A", 88),
	} {
		if _, err := ParseSecret(bad); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("the secret %q gives %v, want an error in one line", bad, err)
		}
	}
}
