package node

import (
	"testing"

	"headcount/presence/heartbeat"
)

// Of each datagram a stream says whether its operations are applied, outdated, or lack what came before.
func TestVerdicts(t *testing.T) {
	in := func(stream, applied uint64) source { return source{stream: stream, applied: applied} }
	lost := source{stream: 2, applied: 5, mustReset: true}

	for name, tc := range map[string]struct {
		src           source
		stream, first uint64
		want          verdict
	}{
		"the first stream":                    {source{}, 7, 1, begins},
		"a newer stream":                      {in(2, 5), 3, 1, begins},
		"a newer stream without its first op": {in(2, 5), 3, 2, headless},
		"an older stream":                     {in(2, 5), 1, 1, outdated},
		"the next op":                         {in(2, 5), 2, 6, continues},
		"a repetition":                        {in(2, 5), 2, 1, continues},
		"a missing op":                        {in(2, 5), 2, 7, gapped},
		"after users were removed":            {lost, 2, 6, headless},
		"late, and after users were removed":  {lost, 1, 6, outdated},
		"anew, after users were removed":      {lost, 3, 1, begins},
	} {
		got := tc.src.judge(&heartbeat.Beat{Stream: tc.stream, First: tc.first})
		if got != tc.want {
			t.Errorf("%s: verdict %d, want %d", name, got, tc.want)
		}
	}
}
