package presenceredis_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// TestServerARedisThatRefusesIsAway: a server that answers and does not carry out
// writes is away until it does, whatever its reason, though reads still work.
// (Invariants 1 and 6: nothing is shown as right that cannot be kept right.)
func TestServerARedisThatRefusesIsAway(t *testing.T) {
	t.Parallel()
	type command []any
	for name, tc := range map[string]struct{ refuse, serve []command }{
		"OOM": {[]command{{"CONFIG", "SET", "maxmemory", "1"}}, []command{{"CONFIG", "SET", "maxmemory", "0"}}},
		"NOREPLICAS": {
			[]command{{"CONFIG", "SET", "min-replicas-to-write", "1"}},
			[]command{{"CONFIG", "SET", "min-replicas-to-write", "0"}},
		},
		"READONLY": {
			[]command{{"CONFIG", "SET", "replica-serve-stale-data", "yes"}, {"REPLICAOF", "127.0.0.1", "1"}},
			[]command{{"REPLICAOF", "NO", "ONE"}},
		},
		"MISCONF": {
			[]command{
				{"CONFIG", "SET", "stop-writes-on-bgsave-error", "yes"}, {"CONFIG", "SET", "save", "3600 1"},
				{"SET", "x", "y"}, {"BGSAVE"},
			},
			[]command{{"CONFIG", "SET", "save", ""}, {"CONFIG", "SET", "stop-writes-on-bgsave-error", "no"}},
		},
		"WRONGPASS": {
			[]command{{"ACL", "SETUSER", "headcount", "resetpass", ">other"}, {"CLIENT", "KILL", "USER", "headcount"}},
			[]command{{"ACL", "SETUSER", "headcount", "resetpass", ">secret"}},
		},
		"NOPERM": {
			[]command{{"ACL", "SETUSER", "headcount", "-@write"}},
			[]command{{"ACL", "SETUSER", "headcount", "+@all"}},
		},
		"NOPERM of scripts": {
			[]command{{"ACL", "SETUSER", "headcount", "-evalsha"}},
			[]command{{"ACL", "SETUSER", "headcount", "+@all"}},
		},
		"maxclients": {
			[]command{{"CONFIG", "SET", "maxclients", "1"}, {"CLIENT", "KILL", "USER", "headcount"}},
			[]command{{"CONFIG", "SET", "maxclients", "1000"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			admin := server.Client().Conn() // one connection, which stays when no other is let in
			defer admin.Close()
			do := func(cmd ...any) {
				t.Helper()
				if err := admin.Do(t.Context(), cmd...).Err(); err != nil {
					t.Fatalf("%v: %v", cmd, err)
				}
			}
			do("ACL", "SETUSER", "headcount", "on", ">secret", "~*", "&*", "+@all")
			states := make(states, 64)
			s := open(t, "redis://headcount:secret@"+server.Addr+"/0",
				func(c *presenceredis.Config) { c.OnState = states })
			want := func(up bool) {
				t.Helper()
				for deadline := time.After(testkit.Timeout); ; {
					select {
					case got := <-states:
						if got == up {
							return
						}
					case <-deadline:
						t.Fatalf("not told up=%t", up)
					}
				}
			}
			c := start(t, s)
			c.set(1, "p", 2)
			want(true)
			if name == "MISCONF" { // there is no place to save to
				dir, err := admin.ConfigGet(t.Context(), "dir").Result()
				if err != nil {
					t.Fatal(err)
				}
				if err := os.RemoveAll(dir["dir"]); err != nil {
					t.Fatal(err)
				}
			}
			for _, cmd := range tc.refuse {
				do(cmd...)
			}
			testkit.Eventually(t, "writes to be refused", func() bool { // as leases are renewed all the time
				return errors.Is(c.try(1, "p", 3).Err, presence.ErrUnavailable) && len(states) > 0
			})
			want(false)
			time.Sleep(2 * time.Second) // it stays away even when nobody calls
			select {
			case up := <-states:
				t.Fatalf("told up=%t while it refuses", up)
			default:
			}
			for _, cmd := range tc.serve {
				do(cmd...)
			}
			want(true)
			testkit.Eventually(t, "a write to be carried out", func() bool {
				err := c.try(1, "p", 3).Err
				if errors.Is(err, presence.ErrLost) { // a replica that became a master again
					return c.tryClaim(true) == nil
				}
				return err == nil
			})
		})
	}
}
