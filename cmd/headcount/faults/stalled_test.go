package faults

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// behindLink starts two processes with all roles. All TCP traffic to the second one goes through the proxy.
func behindLink(t *testing.T) (first, second *member, link *proxy) {
	t.Helper()
	redis := redistest.Start(t).URL()
	link = newProxy(t, 0)
	first = newMember("first", allRoles, redis, nil)
	second = newMember("second", allRoles, redis, link)
	startAll(t, first, second)
	awaitReady(t, first, second)

	return first, second, link
}

// holdCalls returns how many calls about holds of other processes the member has answered or refused.
func holdCalls(t *testing.T, m *member) (sum int) {
	t.Helper()
	resp, err := web.Get("http://" + m.admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}

	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}

	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "headcount_cluster_requests_total") || !strings.Contains(line, `path="/hold"`) {
			continue
		}

		fields := strings.Fields(line)
		n, err := strconv.Atoi(fields[len(fields)-1])
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		sum += n
	}

	return sum
}

// TestClockAStalledLinkUndoesNothing: the link to the owner stalls, a call about a hold gets 503, the opposite call
// gets 200 at the owner, and then the link delivers the old call. The 200 stands.
func TestClockAStalledLinkUndoesNothing(t *testing.T) {
	t.Parallel()
	const users = 40
	first, second, link := behindLink(t)

	ids := make([]string, users)
	for i := range ids {
		_, id, err := second.api("").Hold(t.Context(), "kept")
		if err != nil {
			t.Fatal(err)
		}
		ids[i] = id
	}

	do := func(m *member, id, page string, on bool) error {
		if on {
			_, _, err := m.api(id).Hold(t.Context(), page)
			return err
		}

		_, err := m.api(id).Release(t.Context(), page)

		return err
	}

	for page, on := range map[string]bool{"taken": true, "kept": false} {
		before := holdCalls(t, second)
		link.link.shut()

		var all sync.WaitGroup
		late := make([]bool, users) // users whose call at the first process failed, because the second is their owner
		for i, id := range ids {
			all.Go(func() { late[i] = do(first, id, page, on) != nil })
		}
		all.Wait()

		stalled := 0
		for i, id := range ids {
			if late[i] {
				stalled++
			}
			if err := do(second, id, page, !on); err != nil {
				t.Errorf("the opposite at the second process: %v", err)
			}
		}

		if stalled == 0 {
			t.Fatal("no call was stalled: this proves nothing")
		}

		// The stalled calls arrive, though their callers have given up long ago.
		link.link.open()
		testkit.Eventually(t, "the old calls arrive", func() bool { return holdCalls(t, second)-before >= stalled })

		want := int64(0)
		if !on {
			want = users
		}

		for _, m := range []*member{first, second} {
			testkit.Within(t, exactWithin, fmt.Sprintf("%s counts %d on %s", m.name, want, page), func() bool {
				count, err := m.api("").Count(t.Context(), page)
				return err == nil && count.Count == want && !count.Stale
			})
		}
	}
}

// TestClockADispatcherThatReachesNoGateway: the link to a gateway stalls. Its counts of the pages that come over that
// link are stale within presence-timeout, and exact again when the link is back.
func TestClockADispatcherThatReachesNoGateway(t *testing.T) {
	t.Parallel()
	const pages = 20
	first, second, link := behindLink(t)
	var names []string
	for i := range pages {
		names = append(names, fmt.Sprint("p", i))
	}

	conn := mustDial(t, second)
	if err := conn.Subscribe(names...); err != nil {
		t.Fatal(err)
	}

	shown := watch(conn)
	fresh := func(n int64) (sum int) {
		for _, page := range names {
			if shown.is(page, n) {
				sum++
			}
		}
		return sum
	}
	testkit.Eventually(t, "all counts are shown", func() bool { return fresh(0) == pages })

	// New counts cannot reach the second gateway.
	link.link.shut()
	visitor := mustDial(t, first) // the first dispatcher has some of the pages
	go drain(visitor)             // ends with the connection
	for _, page := range names {
		if err := visitor.Join(page); err != nil {
			t.Fatal(err)
		}
	}

	const presenceTimeout = 7 * time.Second
	testkit.Within(t, presenceTimeout, "no old count is shown as new", func() bool { return fresh(0) == 0 })

	link.link.open()
	testkit.Within(t, exactWithin, "all counts are exact", func() bool { return fresh(1) == pages })
}
