package config

import (
	"slices"
	"strings"
	"testing"
)

// A key of a site that was renamed or taken away is one for all sites, which nobody meant.
func TestWarnsOfKeysOfNoSite(t *testing.T) {
	const key = "0123456789abcdef"
	for name, tc := range map[string]struct {
		key   string
		sites []string
		want  bool
	}{
		"a site that is there":    {"shop:" + key, []string{"shop=https://shop.example.com"}, false},
		"a site that was renamed": {"shop:" + key, []string{"store=https://shop.example.com"}, true},
		"a key for all sites":     {key, []string{"shop=https://shop.example.com"}, false},
		"no sites at all":         {"shop:" + key, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := Server{Sites: tc.sites, APIKeys: []string{tc.key}}
			if err := c.checkSites(); err != nil {
				t.Fatal(err)
			}

			warned := slices.ContainsFunc(c.Warnings(), func(s string) bool { return strings.Contains(s, "no --site") })
			if warned != tc.want {
				t.Errorf("a warning: %t, want %t", warned, tc.want)
			}
		})
	}
}
