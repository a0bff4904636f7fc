package presencemem_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/presence/presencetest"
)

var forContract = presencemem.Config{Region: "local", PageStats: time.Hour, PageDays: 10, LastSeen: time.Hour}

func TestContract(t *testing.T) {
	presencetest.RunInBubble(t, func(testing.TB) presencetest.Store { return presencemem.New(forContract) })
}

func TestContractOnDisk(t *testing.T) {
	presencetest.RunInBubble(t, func(t testing.TB) presencetest.Store {
		s, err := presencemem.Open(t.TempDir(), forContract)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		return s
	})
}

func TestASlowWatcherIsToldToReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		presencetest.SlowWatcher(t, presencemem.New(presencemem.Config{Backlog: 50}))
	})
}

func write(t *testing.T, s *presencemem.Store, c presence.Claim, seq uint64, page string, users int64) presence.Count {
	t.Helper()
	o := s.Write(t.Context(), []presence.Change{{
		Claim: c, Sequence: seq, Counts: []presence.PageUsers{{Page: page, Users: users}},
	}})
	if o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	return o[0].Counts[0]
}

func claim(t *testing.T, s *presencemem.Store) presence.Claim {
	t.Helper()
	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}
	return claims[0]
}

func known(t *testing.T, s *presencemem.Store, page string) bool {
	t.Helper()
	counts, err := s.Counts(t.Context(), []string{page})
	if err != nil {
		t.Fatal(err)
	}
	return counts[0].Version != presence.Version{}
}

func TestEmptyPagesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := presencemem.New(presencemem.Config{RememberFor: time.Hour, Remember: 3})
		c := claim(t, s)
		seq := uint64(0)

		set := func(page string, users int64) presence.Count {
			seq++
			return write(t, s, c, seq, page, users)
		}

		first := set("old", 1)
		set("old", 0)
		set("busy", 1)

		time.Sleep(59 * time.Minute)
		set("young", 1)
		set("young", 0)

		if !known(t, s, "old") {
			t.Fatal("the page old was forgotten within an hour")
		}

		time.Sleep(2 * time.Minute)
		set("busy", 2)
		if known(t, s, "old") || !known(t, s, "young") || !known(t, s, "busy") {
			t.Fatal("want old forgotten after an hour, the others not")
		}

		// At the bound of three pages, the one that was left longest ago is forgotten early.
		for i := range 3 {
			set(fmt.Sprint("more", i), 1)
			set(fmt.Sprint("more", i), 0)
		}

		if known(t, s, "young") || !known(t, s, "more0") || !known(t, s, "busy") {
			t.Fatal("want only the page left longest ago forgotten at the bound")
		}

		if back := set("old", 1); !back.Newer(first) {
			t.Fatalf("the page old came back with version %s, want one newer than %s", back.Version, first.Version)
		}
	})
}
