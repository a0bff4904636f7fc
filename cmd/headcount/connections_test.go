package main

import "testing"

// TestConnectionsFitTheFiles: the bounds of connections, together, never exceed the files that the process may open.
func TestConnectionsFitTheFiles(t *testing.T) {
	for name, tc := range map[string]struct {
		files   uint64
		cluster bool
		peers   int
		want    int
	}{
		"ulimit -n 100":        {100, false, 0, 30},
		"fewer than reserved":  {20, false, 0, 1},
		"one process":          {1024, false, 0, 822},
		"over Redis":           {1024, true, 0, 822},
		"over Redis, 5 peers":  {1024, true, 5, 674},
		"a tenth stays free":   {1_000_000, true, 2, 818_180},
		"no limit to speak of": {1 << 63, false, 0, 1 << 30},
	} {
		got := connectionsByFiles(tc.files, tc.cluster, tc.peers)
		if got != tc.want {
			t.Errorf("%s: %d connections, want %d", name, got, tc.want)
		}

		reserved := filesOfProcess
		if tc.cluster {
			reserved += filesOfCluster + tc.peers*filesOfPeer
		}
		if short := max(got/10, min(got, 100)); got > 1 && uint64(got+short+reserved) > tc.files {
			t.Errorf("%s: %d long, %d short and %d reserved do not fit into %d", name, got, short, reserved, tc.files)
		}
	}
}
