package faults

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"headcount/presence/redistest"
	"headcount/servertest"
)

// trio is one process of each role.
func trio(t *testing.T, redis string, flags ...string) (gateway *member, all []*member) {
	for _, role := range []string{"presence", "dispatcher", "gateway"} {
		all = append(all, newMember(role, role, redis, nil, flags...))
	}
	startAll(t, all...)
	return all[2], all
}

// counts joins a page through the gateway and waits for the count to come back:
// over UDP, a node, Redis and a dispatcher.
func counts(t *testing.T, gateway *member) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	watcher, err := dial(ctx, gateway, "", []string{`{"type":"subscribe","pages":["p"]}`})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.CloseNow()
	await := func(n int64) {
		t.Helper()
		for {
			f, err := read(ctx, watcher)
			if err != nil {
				t.Fatalf("waiting for count %d: %v", n, err)
			}
			if f.Type == "count" && f.Count == n && !f.Stale {
				return
			}
		}
	}
	await(0)
	joiner, err := dial(ctx, gateway, "", []string{join("p")})
	if err != nil {
		t.Fatal(err)
	}
	defer joiner.CloseNow()
	await(1)
	id := put(t, gateway, "", "increment", 2)
	await(2)
	put(t, gateway, id, "decrement", 1)
	await(1)
}

// put takes or ends a hold and returns the id of its user.
func put(t *testing.T, gateway *member, id, action string, want int64) string {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, "http://"+gateway.addr+"/p/counter", strings.NewReader(`{"action":"`+action+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	if id != "" {
		req.Header.Set("Headcount-Id", id)
	}
	resp, err := web.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got counter
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil || resp.StatusCode != http.StatusOK || got.Count != want {
		t.Fatalf("%s: %s, %+v, %v; want count %d", action, resp.Status, got, err, want)
	}
	for _, c := range resp.Cookies() {
		if c.Name == "headcount_id" {
			id = c.Value
		}
	}
	return id
}

// refusal starts a process that must end by itself with status 1 and one line
// that says why, and returns the log.
func refusal(t *testing.T, m *member, within time.Duration, words ...string) {
	t.Helper()
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.process.Kill)
	if status := m.process.Wait(within); status != 1 {
		t.Fatalf("status %d after %s, want 1:\n%s", status, within, m.log.String())
	}
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

func TestClusterSecret(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	gateway, all := trio(t, redis.URL(), "--cluster-secret=right one")
	awaitReady(t, readyWithin, all...)
	counts(t, gateway)
	refusal(t, newMember("stranger", "presence", redis.URL(), nil, "--cluster-secret=wrong one"), 10*time.Second, "secret", "settings differ")
	refusal(t, newMember("innocent", "gateway", redis.URL(), nil), 10*time.Second, "secret", "settings differ")
	counts(t, gateway)
}

// TestAClusterStartsFromNothing: it is ready 3 s after the last process has begun, and
// without complaints, since there is nobody that it would have to wait for. What counts is the
// program's own time: not how long a busy machine takes to start processes, nor how long they
// wait for a core.
func TestAClusterStartsFromNothing(t *testing.T) {
	redis := redistest.Start(t)
	late := watchStalls()
	defer late.stop()
	gateway, all := trio(t, redis.URL())
	awaitReady(t, readyWithin, all...)
	ready := time.Now()
	var begun time.Time
	slack := late.total()
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
		if text := m.log.String(); strings.Contains(text, "facts") || strings.Contains(text, "waiting for the cluster") {
			t.Errorf("%s complains:\n%s", m.name, text)
		}
	}
	counts(t, gateway)
}

// TestFactsAreKept: only the facts are lost. The running processes write them again, and
// a process with another secret and region never becomes ready.
func TestFactsAreKept(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	gateway, all := trio(t, redis.URL(), "--cluster-secret=right one")
	awaitReady(t, readyWithin, all...)
	redis.Do(t, "DEL", "hc:{c}:facts")
	refusal(t, newMember("stranger", allRoles, redis.URL(), nil, "--cluster-secret=wrong one", "--region=other"), 10*time.Second, "settings differ")
	counts(t, gateway)
}

func TestNameTwice(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	gateway, all := trio(t, redis.URL())
	awaitReady(t, readyWithin, all...)
	refusal(t, newMember("twin", "presence", redis.URL(), nil, "--advertise="+all[0].self), 15*time.Second, "name is taken", "--advertise", all[0].self)
	counts(t, gateway)
	awaitReady(t, time.Second, all...)
}

func TestRedisThatDoesNotAnswerAtStart(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	redis.Kill()
	gateway, all := trio(t, redis.URL())
	for _, m := range all {
		eventually(t, readyWithin, m.name+" says that it is not ready", func() bool {
			status, _, _, err := get("http://" + m.admin + "/readyz")
			return err == nil && status == 503
		})
	}
	status, header, _, err := get("http://" + gateway.addr + "/p/counter")
	if err != nil || status != 503 || header.Get("Retry-After") == "" {
		t.Errorf("GET of a counter: status %d, %v, %v", status, header, err)
	}
	redis.Restart(t)
	awaitReady(t, readyWithin, all...)
	counts(t, gateway)
}
