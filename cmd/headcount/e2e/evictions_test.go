package e2e

import (
	"strings"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// When its memory is full, Redis drops keys if its policy permits that. The log says so once when it can happen, and
// names the cause when it did happen, instead of lost writes.
func TestServerOverARedisThatDropsKeys(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, "--maxmemory", "1gb", "--maxmemory-policy", "volatile-ttl")
	s := start(t, overRedis(redis.URL(), "--api-key="+apiKey)...)
	lines := func(text string) int { return strings.Count(s.log.String(), text) }
	const warns = `"Redis drops keys when its memory is full`
	const evicted = `"Redis has evicted keys because its memory is full`

	// The log warns while the policy permits drops, each time anew.
	testkit.Eventually(t, "a warning at the start", func() bool { return lines(warns) == 1 })
	redis.Do(t, "CONFIG", "SET", "maxmemory-policy", "noeviction")
	testkit.Eventually(t, "a line that it is over", func() bool { return lines(`"Redis drops no keys any more`) == 1 })

	redis.Do(t, "CONFIG", "SET", "maxmemory-policy", "volatile-lru")
	testkit.Eventually(t, "a warning when it changes", func() bool { return lines(warns) == 2 })

	for range 3 { // Redis drops every key with an expiry, also those written meanwhile
		s.add(t, "views:1")
		redis.Do(t, "CONFIG", "SET", "maxmemory", "1")
		redis.Do(t, "PING")
		redis.Do(t, "CONFIG", "SET", "maxmemory", "1gb")
		testkit.Eventually(t, "the server accepts changes again", func() bool {
			return s.call(t, "POST", "views:1/increment", "").status == 200
		})
	}

	testkit.Eventually(t, "a line with the cause", func() bool { return lines(evicted) >= 1 })
	testkit.Eventually(t, "two checks for losses", func() bool {
		return s.metric(t, `headcount_store_losses_total{lost="keys"}`) > 0 && s.ready()
	})

	// Dropped keys are no lost writes of a restart: nothing may hint at those.
	if n := lines("has lost the writes"); n > 0 || lines(warns) != 2 {
		t.Errorf("%d lines about lost writes, want none; %d warnings, want 2", n, lines(warns))
	}
}
