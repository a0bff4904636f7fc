package presenceredis_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
)

// failover writes counts, makes a master fail, and then does what nodes do when they see another generation or ErrLost:
// it writes everything again.
func failover(t *testing.T, url string, kill func()) {
	c := start(t, open(t, url))

	var mu sync.Mutex
	newest := map[string]presence.Count{}
	take := func(n presence.Count) {
		mu.Lock()
		defer mu.Unlock()
		if n.Newer(newest[n.Page]) && !n.Stale {
			newest[n.Page] = n
		}
	}
	var pages []string
	for i := range 100 {
		pages = append(pages, fmt.Sprint("page ", i))
	}

	watchAll(t, c.s, func(ctx context.Context, p presence.Publication) {
		for _, u := range p.Updates {
			n, _ := presence.CountOf(u)
			take(n)
		}
		if !p.Lost {
			return
		}

		// What was published while there was no subscription is lost, so the bucket's counts are read.
		var mine []string
		for _, page := range pages {
			if presence.Bucket(page, presence.DefaultBuckets) == p.Bucket {
				mine = append(mine, page)
			}
		}

		got, err := c.s.Counts(ctx, mine)
		for ; err != nil && ctx.Err() == nil; got, err = c.s.Counts(ctx, mine) {
			time.Sleep(20 * time.Millisecond)
		}
		for _, n := range got {
			take(n)
		}
	})

	for i := range 400 {
		c.set(i%presence.DefaultPartitions, pages[i%100], int64(i%7+1))
	}
	before := c.versions()
	gen := c.claims[0].Generation

	kill()
	testkit.Eventually(t, "another generation", func() bool {
		g, err := c.s.Generation(t.Context())
		if err != nil && !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("Generation: %v", err)
		}

		return err == nil && g != gen
	})

	testkit.Eventually(t, "everything to be written again", func() bool { return c.tryClaim(true) == nil })
	// No version from before the failover is assigned again.
	c.right(before)
	// The watcher's subscription has moved to the new master: it receives a later change.
	c.users[pages[5]][3] = 40
	testkit.Eventually(t, "a write", func() bool { return c.try(3, pages[5], 40).Err == nil })

	testkit.Eventually(t, "the watcher to know all counts", func() bool {
		mu.Lock()
		defer mu.Unlock()
		for page, users := range c.users {
			want := int64(0)
			for _, n := range users {
				want += n
			}
			if newest[page].Users != want {
				return false
			}
		}

		return true
	})
}

func TestClockClusterFailover(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 3)
	failover(t, c.URL(), c.Masters[1].Kill)
}
