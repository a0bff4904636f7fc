package countertest

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"headcount/counter"
	"headcount/internal/testkit"
)

// Ear collects what a watch tells.
type Ear struct {
	mu    sync.Mutex
	heard []counter.Update
	block chan struct{} // when not nil, told waits for it
}

// Listen follows keys until the test ends.
func Listen(t testing.TB, s counter.Feed, keys ...string) (*Ear, counter.Watch) {
	t.Helper()
	e := &Ear{}
	w := s.Watch(e.told, func() {})
	t.Cleanup(w.Close)
	if err := w.Follow(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}

	return e, w
}

func (e *Ear) told(updates []counter.Update) {
	e.mu.Lock()
	block := e.block
	e.heard = append(e.heard, updates...)
	e.mu.Unlock()

	// Not under mu, which others need meanwhile.
	if block != nil {
		<-block
	}
}

// Until waits for ok, which is called with what was heard until now.
func (e *Ear) Until(t testing.TB, what string, ok func([]counter.Update) bool) (heard []counter.Update) {
	t.Helper()
	testkit.Eventually(t, what, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()

		heard = slices.Clone(e.heard)
		return ok(heard)
	})

	return heard
}

// UntilCounter waits until c is heard.
func (e *Ear) UntilCounter(t testing.TB, c counter.Counter) []counter.Update {
	t.Helper()
	return e.Until(t, fmt.Sprintf("%+v is heard", c), func(heard []counter.Update) bool {
		return slices.ContainsFunc(heard, func(u counter.Update) bool { return same(u.Counter.Or(c.Kind), c) })
	})
}

func watch(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(sum, "s:1", 1))
	// To follow a key twice is to follow it once.
	e, w := Listen(t, s, "s:1", "s:1", "e:1")
	e2, _ := Listen(t, s, "s:1")

	writer := i.peer()
	e.UntilCounter(t, one(t, writer, add(sum, "s:1", 1)))
	one(t, s, add(sum, "s:2", 1))
	e.UntilCounter(t, apply(t, writer, add(exact, "e:3", 1), add(exact, "e:1", 4))[1])
	heard := e.UntilCounter(t, one(t, s, add(sum, "s:1", 1)))
	for n, u := range heard {
		if u.Counter.Key == "s:2" {
			t.Errorf("heard of a key that is not followed: %+v", u)
		}
		for _, later := range heard[n+1:] {
			isOlder := later.Counter.Version.Compare(u.Counter.Version) < 0
			if later.Counter.Key == u.Counter.Key && isOlder {
				t.Errorf("heard %+v after %+v", later, u)
			}
		}
	}
	e2.UntilCounter(t, read(t, s, "s:1"))

	// A change that changed nothing is not told, nor one that was refused, nor one of a
	// key that is followed no more.
	w.Unfollow("s:1", "s:9")
	e.mu.Lock()
	before := len(e.heard)
	e.mu.Unlock()
	one(t, s, add(sum, "s:1", 1))
	o := with("w", op(add(exact, "e:2", 1)))
	do(t, s, o, o)
	one(t, s, reset(members, "m:1"))
	if err := w.Follow(t.Context(), "e:2", "m:1", "k:1"); err != nil {
		t.Fatal(err)
	}
	do(t, s, o)
	one(t, s, edit("m:1", nil, []string{"a"}))
	refused(t, s, counter.ErrBound, "k:1", 0, add(stock, "k:1", -1))
	heard = e.UntilCounter(t, one(t, s, add(exact, "e:1", 1)))

	// A feed that looks from time to time may tell once what a counter was when it was followed.
	was := map[string]counter.Counter{}
	for _, key := range []string{"e:2", "k:1"} {
		was[key] = read(t, s, key)
	}
	for _, u := range heard[before:] {
		c, old := was[u.Counter.Key]
		delete(was, u.Counter.Key)

		if u.Counter.Key != "e:1" && (!old || !same(u.Counter.Or(c.Kind), c)) {
			t.Errorf("%+v", u)
		}
	}

	// Of a unique the number is told, and nobody's name.
	if err := w.Follow(t.Context(), "u:1"); err != nil {
		t.Fatal(err)
	}
	one(t, s, see("u:1", "a"))
	heard = e.UntilCounter(t, one(t, writer, see("u:1", "a", "b")))
	if u := heard[len(heard)-1]; len(u.Joined) > 0 {
		t.Errorf("%+v", u)
	}
	w.Close()
	one(t, s, add(exact, "e:1", 1))
}

// told makes a change and waits until watchers hear of it. So none that begins now does, also over a feed that is slow.
func told(t testing.TB, s counter.Store, c counter.Change) {
	t.Helper()
	e, w := Listen(t, s, c.Key)
	defer w.Close()

	e.UntilCounter(t, one(t, s, c))
}

func watchMembers(t *testing.T, i Instance) {
	s := i.Store
	told(t, s, edit("m:1", []string{"before"}, nil))
	e, _ := Listen(t, s, "m:1")

	// until waits until what was heard has c, and says where members are as want does, or that they have to be read. A
	// move may be told with another update of the same version than c.
	until := func(what string, c counter.Counter, want map[string]bool) {
		e.Until(t, what, func(heard []counter.Update) bool {
			in := map[string]bool{}
			known := false
			reread := false
			for _, u := range heard {
				for _, m := range u.Joined {
					in[m] = true
				}
				for _, m := range u.Left {
					in[m] = false
				}
				known = known || same(u.Counter.Or(c.Kind), c)
				reread = reread || u.Reread
			}

			return known && (reread || maps.Equal(in, want))
		})
	}

	one(t, s, edit("m:1", []string{"a", "before"}, nil))
	one(t, s, edit("m:1", []string{"b", "c"}, []string{"a", "x"}))
	is := one(t, s, edit("m:1", []string{"a"}, []string{"c"}))
	until("a, b and c are told", is, map[string]bool{"a": true, "b": true, "c": false})
	is = one(t, s, reset(members, "m:1"))
	until("a reset is told", is, map[string]bool{"a": false, "b": false, "c": false, "before": false})
}

func watchDelete(t *testing.T, i Instance) {
	s := i.Store
	told(t, s, add(exact, "e:1", 3))
	e, _ := Listen(t, s, "e:1", "e:2")

	one(t, s, drop(exact, "e:1"))
	e.UntilCounter(t, counter.Counter{Key: "e:1", Kind: counter.Exact})
	one(t, s, drop(exact, "e:1")) // nothing to tell
	heard := e.UntilCounter(t, one(t, s, add(exact, "e:2", 1)))

	n := 0
	for _, u := range heard {
		if u.Counter.Key == "e:1" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("heard of it %d times: %+v", n, heard)
	}
	e.UntilCounter(t, one(t, s, add(exact, "e:1", 1)))
}

func watchSlow(t *testing.T, i Instance) {
	s := i.Store
	e, _ := Listen(t, s, "e:0", "e:1", "e:2")
	block := make(chan struct{})
	e.mu.Lock()
	e.block = block
	e.mu.Unlock()

	one(t, s, add(exact, "e:0", 1))
	e.Until(t, "the first", func(heard []counter.Update) bool { return len(heard) > 0 })
	// By now the watcher hangs in its callback.
	var last [2]counter.Counter
	for n := range 400 {
		last[n%2] = one(t, s, add(exact, []string{"e:1", "e:2"}[n%2], 1))
	}

	e.mu.Lock()
	e.block = nil
	e.mu.Unlock()
	close(block)

	for _, c := range last {
		e.UntilCounter(t, c)
	}
}
