package memstore_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/memstore"
	"headcount/presence/storetest"
)

func TestProcessesContract(t *testing.T) {
	storetest.RunProcesses(t, func(testing.TB) storetest.ProcessStore { return memstore.New(memstore.Config{Region: "local"}) })
}

func TestContract(t *testing.T) {
	storetest.Run(t, func(testing.TB) presence.Store { return memstore.New(memstore.Config{}) })
}

func write(t *testing.T, s *memstore.Store, c presence.Claim, seq uint64, page string, users int64) presence.Count {
	t.Helper()
	o := s.Write(t.Context(), []presence.Change{{
		Claim: c, Sequence: seq, Counts: []presence.PageUsers{{Page: page, Users: users}},
	}})
	if o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	return o[0].Counts[0]
}

func claim(t *testing.T, s *memstore.Store) presence.Claim {
	t.Helper()
	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}
	return claims[0]
}

func known(t *testing.T, s *memstore.Store, page string) bool {
	t.Helper()
	counts, err := s.Counts(t.Context(), []string{page})
	if err != nil {
		t.Fatal(err)
	}
	return counts[0].Version != presence.Version{}
}

func TestEmptyPagesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Config{RememberFor: time.Hour, Remember: 3})
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
			t.Fatal("old was forgotten before its hour was over")
		}
		time.Sleep(2 * time.Minute)
		set("busy", 2)
		if known(t, s, "old") || !known(t, s, "young") || !known(t, s, "busy") {
			t.Fatal("want old forgotten after an hour, the others not")
		}
		for i := range 3 {
			set(fmt.Sprint("more", i), 1)
			set(fmt.Sprint("more", i), 0)
		}
		if known(t, s, "young") || !known(t, s, "more0") || !known(t, s, "busy") {
			t.Fatal("want only the page left longest ago forgotten at the bound")
		}
		if back := set("old", 1); !back.Newer(first) {
			t.Fatalf("old came back as %s after %s", back.Version, first.Version)
		}
	})
}

func TestUnreadContract(t *testing.T) {
	storetest.RunUnread(t, func(testing.TB) storetest.UnreadStore { return memstore.New(memstore.Config{}) })
}

func TestUnreadContractOnDisk(t *testing.T) {
	storetest.RunUnread(t, func(t testing.TB) storetest.UnreadStore { return openDir(t, t.TempDir()) })
}

func openDir(t testing.TB, dir string) *memstore.Store {
	t.Helper()
	s, err := memstore.Open(dir, memstore.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestMinutesContract(t *testing.T) {
	storetest.RunMinutes(t, func(testing.TB) storetest.MinuteStore { return memstore.New(memstore.Config{PageStats: time.Hour}) })
}
