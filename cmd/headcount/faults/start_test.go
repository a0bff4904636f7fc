package faults

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// trio starts one process of each role.
func trio(t *testing.T, redis string, flags ...string) (gateway *member, all []*member) {
	for _, role := range []string{"presence", "dispatcher", "gateway"} {
		all = append(all, newMember(role, role, redis, nil, flags...))
	}

	startAll(t, all...)
	return all[2], all
}

// counts joins a page through the gateway and waits for the count to come back over UDP, a node, Redis and a
// dispatcher.
func counts(t *testing.T, gateway *member) {
	t.Helper()
	watcher := mustDial(t, gateway)
	if err := watcher.Subscribe("p"); err != nil {
		t.Fatal(err)
	}

	shown := watch(watcher)
	await := func(n int64) {
		t.Helper()
		testkit.Within(t, exactWithin, fmt.Sprint("count ", n), func() bool { return shown.is("p", n) })
	}

	await(0)
	joiner := mustDial(t, gateway)
	defer joiner.Abort()
	if err := joiner.Join("p"); err != nil {
		t.Fatal(err)
	}
	await(1)

	// A hold takes the same way.
	id := put(t, gateway, "", "increment", 2)
	await(2)

	put(t, gateway, id, "decrement", 1)
	await(1)
}

// put takes or releases a hold and returns the id of its user.
func put(t *testing.T, gateway *member, id, action string, want int64) string {
	t.Helper()
	api := gateway.api(id)
	var got client.Count
	var err error
	if action == "decrement" {
		got, err = api.Release(t.Context(), "p")
	} else {
		got, id, err = api.Hold(t.Context(), "p")
		if id == "" {
			t.Error("a new user has no id")
		}
	}

	if err != nil || got.Count != want {
		t.Fatalf("%s: %+v, %v; want count %d", action, got, err, want)
	}

	return id
}

// refusal starts a process that must end by itself with status 1 and one line that contains words.
func refusal(t *testing.T, m *member, words ...string) {
	t.Helper()
	if err := m.start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(m.process.Kill)
	if status := m.process.Wait(testkit.Timeout); status != 1 {
		t.Fatalf("status %d, want 1:\n%s", status, m.log.String())
	}

	// The last line names the cause, for a person at a terminal.
	lines := strings.Split(strings.TrimSpace(m.log.String()), "\n")
	last := lines[len(lines)-1]
	if !strings.Contains(last, `"level":"error"`) {
		t.Errorf("the last line is no error: %s", last)
	}

	for _, w := range words {
		if !strings.Contains(last, w) {
			t.Errorf("%q is not in the last line: %s", w, last)
		}
	}

	t.Log(last)
	if text := m.log.String(); strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic") {
		t.Error(text)
	}
}

// TestClockAnotherFormatIsRefused: a process that finds data of another format ends at once, and changes nothing.
func TestClockAnotherFormatIsRefused(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	m := newMember("process", allRoles, redis.URL(), nil)
	startAll(t, m)
	awaitReady(t, m)
	counts(t, m)

	if err := m.leave(); err != nil {
		t.Fatal(err)
	}

	kept := func() map[string]any { // without keys that expire
		all := map[string]any{}
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			if redis.Do(t, "TTL", key).(int64) < 0 {
				all[key.(string)] = redis.Do(t, "DUMP", key)
			}
		}

		facts := redis.Do(t, "HGETALL", "hc:{c}:facts").([]any) // in any order
		all["hc:{c}:facts"] = len(facts)
		for i := 0; i < len(facts); i += 2 {
			all[fmt.Sprint("the fact ", facts[i])] = facts[i+1]
		}

		return all
	}

	for _, is := range []string{"7", ""} { // "": from before formats had numbers
		if is != "" {
			redis.Do(t, "HSET", "hc:{c}:facts", "format", is)
		} else {
			redis.Do(t, "HDEL", "hc:{c}:facts", "format")
		}

		before := kept()
		refusal(t, newMember("another", allRoles, redis.URL(), nil), "format")
		after := kept()
		for key := range after {
			if before[key] != after[key] {
				t.Errorf("format %q: %s was changed", is, key)
			}
		}

		if len(before) < 2 || len(before) != len(after) {
			t.Errorf("format %q: %d keys before, %d after", is, len(before), len(after))
		}
	}
}

// TestClockWhoMayJoin: a process with another secret, without it or with a taken name ends at once with a sentence,
// even when Redis has lost the facts, which the running processes write again. Counts go on. A process that fits is
// visible with its roles, from when it takes part until it has left. No line of the logs names a member twice.
func TestClockWhoMayJoin(t *testing.T) {
	t.Parallel()
	const secret = "--cluster-secret=right one"
	redis := redistest.Start(t)
	var all []*member
	t.Cleanup(func() { // after the end of all
		for _, m := range all {
			if what := m.log.Repeated(); what != "" {
				t.Errorf("%s repeats itself in the log: %s", m.name, what)
			}
		}
	})

	gateway, all := trio(t, redis.URL(), secret, "--log-level=debug")
	awaitReady(t, all...)
	counts(t, gateway)

	refusal(t, newMember("stranger", "presence", redis.URL(), nil, "--cluster-secret=wrong one"),
		"--cluster-secret differs", "settings differ")
	refusal(t, newMember("innocent", "gateway", redis.URL(), nil), "--cluster-secret differs", "settings differ")
	refusal(t, newMember("twin", "presence", redis.URL(), nil, secret, "--advertise="+all[0].self), "name is taken",
		"--advertise", all[0].self)

	redis.Do(t, "DEL", "hc:{c}:facts")
	refusal(t, newMember("late stranger", allRoles, redis.URL(), nil, "--cluster-secret=wrong one", "--region=other"),
		"settings differ")

	counts(t, gateway)
	awaitReady(t, all...)

	joiner := newMember("joiner", "presence", redis.URL(), nil, secret)
	startAll(t, joiner)
	awaitLog := func(want string) {
		t.Helper()
		testkit.Eventually(t, "in the gateway's log "+want,
			func() bool { return strings.Contains(gateway.log.String(), want) })
	}
	awaitEvent := func(want string) {
		t.Helper()
		testkit.Eventually(t, "the dashboard has "+want, func() bool {
			_, _, body, err := get("http://" + gateway.addr + "/-/dashboard/data")
			var board struct {
				Processes []struct {
					Name  string
					Roles []string
				}
				Events []struct{ Text string }
			}

			if err != nil || json.Unmarshal([]byte(body), &board) != nil {
				return false
			}

			for _, p := range board.Processes {
				if p.Name == joiner.self && p.Roles == nil && joiner.up() {
					t.Fatalf("a process that joins has no roles: %s", body)
				}
			}

			for _, e := range board.Events {
				if strings.HasPrefix(e.Text, want+": "+joiner.self) {
					if e.Text != want+": "+joiner.self+" (presence)." {
						t.Fatal(e.Text)
					}
					return true
				}
			}
			return false
		})
	}

	awaitEvent("A process joined")
	awaitLog(fmt.Sprintf(`"member":%q,"roles":["presence"]`, joiner.self))
	joiner.still.Store(true) // from now on it may have no roles
	if err := joiner.leave(); err != nil {
		t.Error(err)
	}
	awaitEvent("A process left")
	awaitLog("a process has left")

	// A crash is logged as such, also when Redis restarts before the process does.
	all[0].kill()
	awaitLog("a process is gone")

	redis.Restart(t)
	if err := all[0].start(); err != nil {
		t.Fatal(err)
	}
	awaitReady(t, all...)
}

// TestClockAClusterStartsFromNothing: a cluster is ready 3 s after its last process began, and without complaints,
// since there is nobody to wait for. Only the program's own time counts: not how long a slow machine takes to start
// processes, nor how long they wait for a core.
func TestClockAClusterStartsFromNothing(t *testing.T) {
	redis := redistest.Start(t)
	watch := testkit.NewStopwatch(t)
	gateway, all := trio(t, redis.URL())
	awaitReady(t, all...)
	ready := time.Now()

	// The clock runs from the first line of the last process to start.
	var begun time.Time
	slack := watch.Lost()
	for _, m := range all {
		var first struct{ Time time.Time }
		line, _, _ := strings.Cut(m.log.String(), "\n")
		if err := json.Unmarshal([]byte(line), &first); err != nil {
			t.Fatalf("%s begins its log with %q: %v", m.name, line, err)
		}

		if first.Time.After(begun) {
			begun = first.Time
		}
		slack += servertest.Waited(m.process.PID())
	}

	took := ready.Sub(begun)
	t.Logf("ready after %s; this machine stood still, and processes waited for a core, for %s", took, slack)
	if took > 3*time.Second+slack {
		t.Errorf("ready after %s, want 3s (and %s for the machine)", took, slack)
		for _, m := range all {
			t.Logf("%s:\n%s", m.name, m.log.String())
		}
	}

	for _, m := range all {
		if text := m.log.String(); strings.Contains(text, "facts") ||
			strings.Contains(text, "waiting for the cluster") {
			t.Errorf("%s complains:\n%s", m.name, text)
		}
	}

	counts(t, gateway)
}

func TestClockRedisThatDoesNotAnswerAtStart(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	redis.Kill()
	gateway, all := trio(t, redis.URL())

	for _, m := range all {
		testkit.Eventually(t, m.name+" says that it is not ready", func() bool {
			status, _, _, err := get("http://" + m.admin + "/readyz")
			return err == nil && status == 503
		})
	}

	status, header, _, err := get("http://" + gateway.addr + "/p/counter")
	if err != nil || status != 503 || header.Get("Retry-After") == "" {
		t.Errorf("GET of a counter: status %d, %v, %v", status, header, err)
	}

	for _, m := range all {
		if _, _, body, err := get("http://" + m.admin + "/readyz"); err != nil ||
			!strings.Contains(body, "connection refused") {
			t.Errorf("/readyz of %s does not say why: %s, %v", m.name, body, err)
		}
	}

	redis.Restart(t)
	awaitReady(t, all...)
	counts(t, gateway)
	for _, m := range all {
		testkit.Eventually(t, m.name+" logs the end of each outage", func() bool {
			log := m.log.String()
			return strings.Count(log, "redis works again") == strings.Count(log, "redis cannot be used")
		})

		text := m.log.String()
		if n := strings.Count(text, "redis cannot be used"); n != 1 || !strings.Contains(text, "connection refused") {
			t.Errorf("%s logs the outage %d times, want once with its cause:\n%s", m.name, n, text)
		}
	}
}
