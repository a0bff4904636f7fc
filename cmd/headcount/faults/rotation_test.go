package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// person is one visitor with a connection to each of several gateways, who reconnects whenever one ends, with the
// newest id, and who follows a page.
type person struct {
	page string

	mu     sync.Mutex
	id     string
	shown  map[*member]int64 // by gateway: the last count of the page, 0 without a connection
	most   int64             // the highest count that was ever shown
	denied string            // an id that a gateway replaced by another user's
}

// be keeps the person at one gateway, until ctx ends.
func (p *person) be(ctx context.Context, at *member) {
	for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		p.mu.Lock()
		id := p.id
		p.mu.Unlock()
		p.connect(ctx, at, id)
	}
}

func (p *person) connect(ctx context.Context, at *member, id string) {
	conn, err := dial(at, id)
	if err != nil {
		return
	}

	defer context.AfterFunc(ctx, conn.Abort)()
	defer conn.Abort()

	p.mu.Lock()
	if id != "" && name(conn.ID) != name(id) {
		p.denied = id
	}
	p.id = conn.ID
	p.mu.Unlock()

	// A reconnect frame ends the visit like a lost connection.
	err = conn.Join(p.page)
	for f := (client.Frame{}); err == nil && f.Type != "reconnect"; err = conn.Receive(&f) {
		if f.Type == "count" && f.Count.Page == p.page {
			p.mu.Lock()
			p.shown[at] = f.Count.Count
			p.most = max(p.most, f.Count.Count)
			p.mu.Unlock()
		}
	}

	p.mu.Lock()
	p.shown[at] = 0
	p.mu.Unlock()
}

// name returns the part of a signed id that names the user.
func name(id string) string {
	name, _, _ := strings.Cut(id, ".")
	return name
}

// once reports whether every gateway shows the person, as one user.
func (p *person) once(at ...*member) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !slices.ContainsFunc(at, func(m *member) bool { return p.shown[m] != 1 })
}

// ask makes a call as the person. The answer is read into out unless that is nil.
func (p *person) ask(t *testing.T, at *member, method, path string, out any) {
	t.Helper()
	p.mu.Lock()
	id := p.id
	p.mu.Unlock()

	if _, err := at.api(id).Do(t.Context(), method, path, nil, out); err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
}

// TestClockSecretsRotateOverARunningCluster changes the cluster secret as documented, one process at a time: the new
// secret is added, put in front, and the old one removed. A person who is at all gateways all the time counts once all
// the time, and keeps the follow. A process with other secrets is refused at every step.
func TestClockSecretsRotateOverARunningCluster(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	var all []*member
	for i := range 2 {
		all = append(all, newMember(fmt.Sprint("process ", i), allRoles, redis.URL(), nil, "--cluster-secret=old"))
	}
	startAll(t, all...)
	awaitReady(t, all...)

	ctx, cancel := context.WithCancel(t.Context())
	var connections sync.WaitGroup
	defer connections.Wait()
	defer cancel()
	p := &person{page: "p", id: put(t, all[0], "", "increment", 1), shown: map[*member]int64{}}
	for _, m := range all {
		connections.Go(func() { p.be(ctx, m) })
	}
	testkit.Within(t, exactWithin, "the person is at both gateways", func() bool { return p.once(all...) })
	p.ask(t, all[0], http.MethodPut, "/-/me/follows/followed", nil)

	// Each step restarts every process, so that all mixtures of old and new secrets occur.
	for _, step := range [][]string{{"old", "new"}, {"new", "old"}, {"new"}} {
		for _, m := range all {
			if err := m.leave(); err != nil {
				t.Fatal(err)
			}

			m.flags = slices.DeleteFunc(m.flags,
				func(f string) bool { return strings.HasPrefix(f, "--cluster-secret=") })
			for _, secret := range step {
				m.flags = append(m.flags, "--cluster-secret="+secret)
			}

			if err := m.start(); err != nil {
				t.Fatal(err)
			}
			awaitReady(t, all...)
			testkit.Within(t, exactWithin, "the person is at both gateways", func() bool { return p.once(all...) })

			for _, at := range all {
				var got json.RawMessage
				p.ask(t, at, http.MethodGet, "/-/me/follows", &got)
				if !strings.Contains(string(got), `"followed"`) {
					t.Errorf("%q, %s restarted: %s says %s", step, m.name, at.name, got)
				}
			}
		}

		refusal(t, newMember("a cluster secret nobody has", allRoles, redis.URL(), nil, "--cluster-secret=stranger"),
			"settings differ")

		flags := []string{"--id-secret=stranger"}
		for _, secret := range step {
			flags = append(flags, "--cluster-secret="+secret)
		}
		refusal(t, newMember("an id secret nobody has", allRoles, redis.URL(), nil, flags...), "id-secret")
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most != 1 || p.denied != "" {
		t.Errorf("one person counted as %d; the id %.8s… became another user", p.most, p.denied)
	}
}
