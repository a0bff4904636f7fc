package presenceredis_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/node"
)

// A node runs on a Redis that is emptied and restarted. Within ten seconds all counts are right again. The users have
// holds, which last longer than the test takes even on a busy machine.
func TestClockANodeHealsRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := open(t, server.URL())
	n, err := node.New(s, node.Config{
		Name: "node", PresenceTimeout: time.Minute, Reply: replies(func(string, *heartbeat.Reply) {}),
		Log: zerolog.Nop(),
	})

	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = n.Run(ctx)
	}()

	defer func() {
		stop()
		<-done
	}()

	n.Gateways(nil)
	n.Own(upTo(presence.DefaultPartitions))

	const users, pages = 200, 7
	for i := range users {
		testkit.Eventually(t, "a hold", func() bool {
			return n.Hold(ctx, asked(presence.User(i)*0x9E3779B97F4A7C15, fmt.Sprint("p", i%pages), true)) == nil
		})
	}

	// Each user is on one page, so the pages add up to the site.
	right := func() bool {
		sum := int64(0)
		for i := range pages {
			got, err := s.Counts(ctx, []string{fmt.Sprint("p", i)})
			if err != nil || got[0].Stale {
				return false
			}

			sum += got[0].Users
		}

		site, err := s.Counts(ctx, []string{presence.AllPages})
		return err == nil && sum == users && site[0].Users == users
	}

	testkit.Eventually(t, "right counts", right)
	for name, fault := range map[string]func(){
		"emptied": func() { server.Flush(t) },
		"restarted": func() {
			server.Kill()
			testkit.Eventually(t, "the store misses Redis", func() bool {
				_, err := s.Generation(ctx)
				return err != nil
			})

			server.Restart(t)
		},
	} {
		fault()
		testkit.Within(t, 10*time.Second, "right counts after Redis was "+name, right)
	}
}

// replies is a function that implements node.Replies.
type replies func(gateway string, r *heartbeat.Reply)

func (f replies) SendReply(gateway string, r *heartbeat.Reply) { f(gateway, r) }

// asked returns the change of a hold by a call that is made now.
func asked(u presence.User, page string, on bool) presence.HoldChange {
	return presence.HoldChange{User: u, Page: page, On: on, Asked: time.Now()}
}
