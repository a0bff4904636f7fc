package presenceredis_test

import (
	"errors"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// TestServerARedisThatRefusesIsAway: a server that refuses writes counts as away until it accepts them again, even if
// reads work. (Invariants 1 and 6: no count is shown as right that cannot be kept right.) Either a refused call shows
// that the whole server refuses, or the probe has to find that out. Package redisconn tests which errors of Redis
// belong to which kind.
func TestServerARedisThatRefusesIsAway(t *testing.T) {
	t.Parallel()
	type command []any
	for name, tc := range map[string]struct{ refuse, serve []command }{
		"OOM": {[]command{{"CONFIG", "SET", "maxmemory", "1"}}, []command{{"CONFIG", "SET", "maxmemory", "0"}}},
		"NOPERM of scripts": {
			[]command{{"ACL", "SETUSER", "headcount", "-evalsha"}},
			[]command{{"ACL", "SETUSER", "headcount", "+@all"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			server := redistest.Start(t)
			admin := server.Client().Conn() // stays open while the server accepts no other connections
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
				// Reports may repeat, so only the wanted one ends the wait.
				for deadline := time.After(testkit.Timeout); ; {
					select {
					case got := <-states:
						if got == up {
							return
						}
					case <-deadline:
						t.Fatalf("up=%t was not reported in time", up)
					}
				}
			}

			c := start(t, s)
			c.set(1, "p", 2)
			want(true)

			for _, cmd := range tc.refuse {
				do(cmd...)
			}

			testkit.Eventually(t, "writes to be refused", func() bool { // repeated, as a process renews its lease
				return errors.Is(c.try(1, "p", 3).Err, presence.ErrUnavailable) && len(states) > 0
			})
			want(false)

			time.Sleep(2 * time.Second) // the server stays away even without calls
			select {
			case up := <-states:
				t.Fatalf("up=%t was reported while the server refuses writes", up)
			default:
			}

			for _, cmd := range tc.serve {
				do(cmd...)
			}
			want(true)
			testkit.Eventually(t, "a write to be carried out", func() bool {
				err := c.try(1, "p", 3).Err

				return err == nil
			})
		})
	}
}
