package faults

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

const allRoles = "gateway,presence,dispatcher"

// endpoints returns the number of endpoints in a Redis, by the process that they name.
func endpoints(t *testing.T, redis *redistest.Server) map[string]int {
	t.Helper()
	all := map[string]int{}
	for _, key := range redis.Do(t, "KEYS", "hc:{b*}:e").([]any) {
		members, ok := redis.Do(t, "SMEMBERS", key).([]any)
		if !ok {
			t.Fatalf("endpoints in %v", key)
		}

		for _, m := range members {
			life, _, _ := strings.Cut(m.(string), "\x00")
			all[life]++
		}
	}

	return all
}

// crowdAt connects a client that watches 100 pages to the gateway.
func crowdAt(t *testing.T, m *member) {
	t.Helper()
	conn := mustDial(t, m)
	for i := range 100 {
		if err := conn.Subscribe(fmt.Sprint("watched ", i)); err != nil {
			t.Fatal(err)
		}
	}

	shown := watch(conn)
	testkit.Eventually(t, "the counts of 100 pages", func() bool {
		shown.mu.Lock()
		defer shown.mu.Unlock()
		return len(shown.counts) == 100
	})
}

// TestClockEndpointsEndWithTheirGateway: endpoints end however the process with the gateway ends, whether or not it
// also had the dispatcher, and even when all processes ended.
func TestClockEndpointsEndWithTheirGateway(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	var all []*member
	for i := range 3 {
		all = append(all, newMember(fmt.Sprint("process ", i), allRoles, redis.URL(), nil))
	}
	startAll(t, all...)
	awaitReady(t, all...)

	only := func(what string, with ...*member) {
		t.Helper()
		testkit.Within(t, 15*time.Second, "only the living have endpoints, after "+what, func() bool {
			ends := endpoints(t, redis)
			for life := range ends {
				held := false
				for _, m := range with {
					held = held || strings.HasPrefix(life, m.self+"/")
				}
				if !held {
					return false
				}
			}
			return len(ends) == len(with)
		})
	}

	for _, m := range all {
		crowdAt(t, m)
	}
	only("the start", all...)

	if err := all[0].leave(); err != nil {
		t.Fatal(err)
	}
	only("SIGTERM", all[1:]...)
	all[1].kill()
	only("SIGKILL", all[2])

	for _, m := range all[:2] { // they restart under the same names
		again(t, m)
		crowdAt(t, m)
	}

	// When all are dead, nobody can remove endpoints. The next start does.
	for _, m := range all {
		m.kill()
	}
	if n := len(endpoints(t, redis)); n != 3 {
		t.Fatalf("endpoints of %d gateways, want 3", n)
	}

	for _, m := range all {
		again(t, m)
	}
	only("the end of all")
}
