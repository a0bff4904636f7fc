package presencetest

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"headcount/internal/testkit"
	"headcount/presence"
)

var processes = map[string]func(*testing.T, Store){
	"all see who has a lease":              leases,
	"a lease runs out":                     leaseRunsOut,
	"a name and its lease are of one life": leave,
	"a renewal shows the store's time":     storeTime,
}

// renew renews a lease. It repeats the call until the store has the facts of the cluster.
func renew(t *testing.T, s Store, p presence.Process, ttl time.Duration) ([]presence.Process, error) {
	t.Helper()
	for {
		all, _, err := s.Renew(t.Context(), p, ttl)
		if !errors.Is(err, presence.ErrNoFacts) {
			return all, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// sees renews p's lease and checks which processes have leases.
func sees(t *testing.T, s Store, p presence.Process, want ...presence.Process) {
	t.Helper()
	if got, err := renew(t, s, p, time.Minute); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("Renew = %+v, %v; want %+v", got, err, want)
	}
}

var (
	aProcess = presence.Process{
		Name: "a:1", Roles: []string{presence.RoleGateway, presence.RolePresence}, Incarnation: 1 << 60,
	}
	bProcess = presence.Process{Name: "b:1", Incarnation: 2}
)

func leases(t *testing.T, s Store) {
	sees(t, s, bProcess, bProcess)
	sees(t, s, aProcess, aProcess, bProcess)

	// A process that is leaving has no roles, but still has its lease.
	leaving := aProcess
	leaving.Roles = nil
	sees(t, s, leaving, leaving, bProcess)
	sees(t, s, bProcess, leaving, bProcess)
}

// storeTime tests that a renewal returns the time. The store runs on this machine, whose clock it has.
func storeTime(t *testing.T, s Store) {
	sees(t, s, aProcess, aProcess)
	for _, ttl := range []time.Duration{time.Minute, time.Second} {
		before := time.Now().Truncate(time.Millisecond)
		_, now, err := s.Renew(t.Context(), aProcess, ttl)
		if err != nil || now.Before(before) || now.After(time.Now()) {
			t.Errorf("a renewal for %s after %s shows %s, %v", ttl, before, now, err)
		}
	}
}

func leaseRunsOut(t *testing.T, s Store) {
	sees(t, s, aProcess, aProcess)
	if _, err := renew(t, s, bProcess, time.Millisecond); err != nil {
		t.Fatal(err)
	}

	testkit.Eventually(t, "b's lease runs out", func() bool {
		all, err := renew(t, s, aProcess, time.Minute)
		return err == nil && len(all) == 1
	})

	sees(t, s, aProcess, aProcess)

	// The name is free for the next incarnation of that process.
	next := bProcess
	next.Incarnation++
	sees(t, s, next, aProcess, next)
}

func leave(t *testing.T, s Store) {
	sees(t, s, aProcess, aProcess)
	twin := aProcess
	twin.Incarnation++
	if _, err := renew(t, s, twin, time.Minute); !errors.Is(err, presence.ErrNameTaken) {
		t.Fatalf("another incarnation under a's name: %v, want ErrNameTaken", err)
	}
	sees(t, s, aProcess, aProcess)

	// Neither another incarnation nor another process ends the lease.
	for _, other := range []presence.Process{twin, bProcess} {
		if err := s.Leave(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		sees(t, s, aProcess, aProcess)
	}

	// Leave may be repeated.
	for range 2 {
		if err := s.Leave(t.Context(), aProcess); err != nil {
			t.Fatal(err)
		}
	}

	sees(t, s, twin, twin)
}

func parts(t *testing.T, s Store) {
	c, of, err := s.Parts(t.Context(), "p")
	want := []presence.Part{{Region: "local"}}
	if err != nil || c.Users != 0 || c.Version != (presence.Version{}) || !reflect.DeepEqual(of, want) {
		t.Fatalf("Parts of a page without a past = %+v, %+v, %v; want %+v", c, of, err, want)
	}

	claim(t, s, 1).set("p", 1)
	claim(t, s, 2).set("p", 2)
	c, of, err = s.Parts(t.Context(), "p")

	want = []presence.Part{{Region: "local", Users: 3}}
	if err != nil || c.Page != "p" || c.Users != 3 || !reflect.DeepEqual(of, want) {
		t.Fatalf("Parts = %+v, %+v, %v; want %+v", c, of, err, want)
	}
}
