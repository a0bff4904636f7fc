package presenceredis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/unread"
)

// The link to Redis stalls while a process saves a follow, and its caller gives up. Another process then makes the
// opposite change and answers. When the link finally delivers the save, the answered change stands.
func TestServerAStalledLinkUndoesNoFollow(t *testing.T) {
	server := redistest.Start(t)
	url, link := server.Stall(t)
	far, near := unread.NewFollowService(open(t, url)), unread.NewFollowService(open(t, server.URL()))

	const page = "p"
	follow := func(ctx context.Context, s *unread.FollowService, u unread.User) error { return s.Follow(ctx, u, page) }
	unfollow := func(ctx context.Context, s *unread.FollowService, u unread.User) error {
		return s.Unfollow(ctx, u, page)
	}
	forget := func(ctx context.Context, s *unread.FollowService, u unread.User) error { return s.Forget(ctx, u) }

	// This loads the script, so that the late call need not do it.
	if err := follow(t.Context(), near, unread.User{255}); err != nil {
		t.Fatal(err)
	}

	for i, tc := range []struct {
		name        string
		follows     bool // before and after
		late, after func(context.Context, *unread.FollowService, unread.User) error
	}{
		{"follow, unfollow", false, follow, unfollow},
		{"unfollow, follow", true, unfollow, follow},
		{"follow, erasure", false, follow, forget},
		{"erasure, follow", true, forget, follow},
	} {
		u := unread.User{byte(i), 1}
		if tc.follows {
			if err := follow(t.Context(), near, u); err != nil {
				t.Fatal(err)
			}
		}

		testkit.Eventually(t, "the far process reaches Redis", func() bool {
			_, err := far.Read(t.Context(), u)
			return err == nil
		})

		// When the caller gives up, the call is on its way.
		link.StallAtScript()
		ctx, giveUp := context.WithTimeout(t.Context(), time.Second)
		if err := tc.late(ctx, far, u); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("%s: the call over the stalled link returns %v, want ErrUnavailable", tc.name, err)
		}

		giveUp()
		if err := tc.after(t.Context(), near, u); err != nil {
			t.Fatalf("%s: the call of the other process fails: %v", tc.name, err)
		}

		runs := scriptRuns(t, server)
		link.Flow()
		testkit.Eventually(t, "the late call arrives", func() bool { return scriptRuns(t, server) > runs })

		is, err := near.Read(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		if follows := len(is[0].Follows) > 0; follows != tc.follows {
			t.Errorf("%s: follows %t, want %t", tc.name, follows, tc.follows)
		}
	}
}

// scriptRuns returns how many scripts the server has run.
func scriptRuns(t *testing.T, server *redistest.Server) (runs int) {
	t.Helper()
	for line := range strings.Lines(server.Do(t, "INFO", "commandstats").(string)) {
		if _, err := fmt.Sscanf(line, "cmdstat_evalsha:calls=%d,", &runs); err == nil {
			return runs
		}
	}

	return 0
}
