package transfer

import (
	"strings"
	"testing"

	"headcount/presence/presenceredis"
)

// TestRedisIsRefused: an import or export refuses a Redis whose present use does not permit it, and says why.
func TestRedisIsRefused(t *testing.T) {
	const (
		exports = false
		imports = true
	)
	alone := Place{Redis: "r"}
	behind := Place{Redis: "r", Postgres: "p"}
	region := Place{Redis: "r", Postgres: "p", Regions: true}
	used := func(counters, postgres string, running ...string) presenceredis.Use {
		return presenceredis.Use{IsUsed: true, Counters: counters, Postgres: postgres, Running: running}
	}
	for name, tc := range map[string]struct {
		place   Place
		use     presenceredis.Use
		imports bool
		want    string // a part of the error; empty: no error
	}{
		"nobody has used it":          {alone, presenceredis.Use{}, imports, ""},
		"an import into the same":     {behind, used("3", "behind 2"), imports, ""},
		"an export while servers run": {behind, used("3", "behind 2", "a"), exports, ""},
		"an import while servers run": {
			alone, used("3", "none", "a", "b"), imports, "in use by other processes (a, b)",
		},
		"they run without PostgreSQL":    {behind, used("3", "none", "a"), imports, "processes without --postgres use"},
		"PostgreSQL is added":            {behind, used("3", "none"), imports, ""},
		"PostgreSQL is left out":         {alone, used("3", "behind 2"), exports, "give its --postgres, too"},
		"that of all regions, too":       {alone, used("3", "beside"), imports, "give its --postgres, too"},
		"a region":                       {region, used("3", "beside"), imports, ""},
		"a region as none":               {behind, used("3", "beside"), exports, "give --regions"},
		"none as a region":               {region, used("3", "behind 2"), exports, "give --regions"},
		"a region had no PostgreSQL":     {region, used("3", "none"), imports, "give --regions"},
		"an earlier release, exported":   {alone, used("2", "none"), exports, `their format is "2"`},
		"an earlier release stays":       {alone, used("2", "none"), imports, ""},
		"the first releases stay":        {alone, used("", "none"), imports, ""},
		"the first releases, exported":   {alone, used("", "none"), exports, `their format is ""`},
		"an earlier release was behind":  {behind, used("2", "behind"), imports, ""},
		"a later release":                {alone, used("4", "none"), imports, `their format is "4"`},
		"a release that has other words": {alone, used("4b", "none"), imports, `their format is "4b"`},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.place.refuses(&tc.use, tc.imports)
			if tc.want == "" && err != nil {
				t.Errorf("it is refused, want no error: %v", err)
			}
			if tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("the error is %v, want one with %q", err, tc.want)
			}
		})
	}
}
