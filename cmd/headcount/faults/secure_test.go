package faults

import (
	"strings"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// The Redis servers of these regions are set up as careful operators do it. They have the user of deploy/redis.acl, two
// speak only TLS, and the third one is behind Sentinel. All regions show one total, even after one Redis came back
// empty and, in another region, a replica took over.
func TestClockRegionsOverTLSAndSentinel(t *testing.T) {
	t.Parallel()
	a, b := redistest.StartSecure(t), redistest.StartSecure(t)
	s := redistest.StartSentinelWithUser(t)
	urls := map[string]string{"us": a.URL(), "eu": b.URL(), "ap": s.URL()}

	w := &world{}
	var all []*member
	for _, name := range []string{"us", "eu", "ap"} {
		flags := []string{"--region=" + name, "--api-key=" + counterKey}
		for other, url := range urls {
			if other != name {
				flags = append(flags, "--peer="+other+"="+url)
			}
		}
		m := newMember(name, "gateway,presence,dispatcher", urls[name], nil, flags...)
		w.regions = append(w.regions, &dataCentre{name: name, members: []*member{m}})
		all = append(all, m)
	}

	startAll(t, all...)
	awaitReady(t, all...)
	for i, r := range w.regions {
		r.watch(t)
		w.join(t, r, i+1)
	}
	w.converge(t, exactWithin)

	permitted := func(servers ...*redistest.Server) { // also called before a restart, which forgets the denials
		t.Helper()
		for _, r := range servers {
			for _, denied := range r.Denied(t) {
				t.Errorf("deploy/redis.acl does not permit: %s", denied)
			}
		}
	}
	permitted(a, b, s.Master)

	// Two regions lose their Redis in different ways.
	b.Kill()
	w.join(t, w.regions[0], 1)
	b.Restart(t)
	s.Master.Kill()

	replica := s.Replica.Client()
	defer replica.Close()
	testkit.Within(t, exactWithin, "the replica takes over", func() bool {
		role, err := replica.Do(t.Context(), "ROLE").Slice() // an error while Sentinel disconnects its clients
		return err == nil && role[0] == "master"
	})

	for _, r := range w.regions {
		w.join(t, r, 1)
	}
	w.converge(t, exactWithin)
	permitted(a, b, s.Replica)

	for _, m := range all {
		if strings.Contains(m.log.String(), "change-me") {
			t.Errorf("%s logs the password of its Redis", m.name)
		}
	}
}
