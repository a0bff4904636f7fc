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

// Listener collects the updates of a watch.
type Listener struct {
	mu       sync.Mutex
	received []counter.Update
	block    chan struct{} // unless nil, receive waits for it
}

// Listen follows keys until the test ends.
func Listen(t testing.TB, s counter.Feed, keys ...string) (*Listener, counter.Watch) {
	t.Helper()
	e := &Listener{}
	w := s.Watch(e.receive, func() {})
	t.Cleanup(w.Close)
	if err := w.Follow(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}

	return e, w
}

func (e *Listener) receive(updates []counter.Update) {
	e.mu.Lock()
	block := e.block
	e.received = append(e.received, updates...)
	e.mu.Unlock()

	// Without mu, which others need meanwhile.
	if block != nil {
		<-block
	}
}

// Until waits until ok returns true for the updates so far, and returns them.
func (e *Listener) Until(t testing.TB, what string, ok func([]counter.Update) bool) (received []counter.Update) {
	t.Helper()
	testkit.Eventually(t, what, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()

		received = slices.Clone(e.received)
		return ok(received)
	})

	return received
}

// UntilCounter waits until c is received.
func (e *Listener) UntilCounter(t testing.TB, c counter.Counter) []counter.Update {
	t.Helper()
	return e.Until(t, fmt.Sprintf("%+v is received", c), func(received []counter.Update) bool {
		return slices.ContainsFunc(received, func(u counter.Update) bool { return same(u.Counter.Or(c.Kind), c) })
	})
}

func watch(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(sum, "s:1", 1))
	// Following a key twice is the same as following it once.
	e, w := Listen(t, s, "s:1", "s:1", "e:1")
	e2, _ := Listen(t, s, "s:1")

	writer := i.peer()
	e.UntilCounter(t, one(t, writer, add(sum, "s:1", 1)))
	one(t, s, add(sum, "s:2", 1))
	e.UntilCounter(t, apply(t, writer, add(exact, "e:3", 1), add(exact, "e:1", 4))[1])
	received := e.UntilCounter(t, one(t, s, add(sum, "s:1", 1)))
	for n, u := range received {
		if u.Counter.Key == "s:2" {
			t.Errorf("received %+v of a key that is not followed", u)
		}
		for _, later := range received[n+1:] {
			isOlder := later.Counter.Version.Compare(u.Counter.Version) < 0
			if later.Counter.Key == u.Counter.Key && isOlder {
				t.Errorf("received %+v after %+v", later, u)
			}
		}
	}
	e2.UntilCounter(t, read(t, s, "s:1"))

	// There is no update of a change that changed nothing, of a refused one, or of a key that is no longer followed.
	w.Unfollow("s:1", "s:9")
	e.mu.Lock()
	before := len(e.received)
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
	received = e.UntilCounter(t, one(t, s, add(exact, "e:1", 1)))

	// A feed that polls may publish once what a counter was when it was followed.
	was := map[string]counter.Counter{}
	for _, key := range []string{"e:2", "k:1"} {
		was[key] = read(t, s, key)
	}
	for _, u := range received[before:] {
		c, old := was[u.Counter.Key]
		delete(was, u.Counter.Key)

		if u.Counter.Key != "e:1" && (!old || !same(u.Counter.Or(c.Kind), c)) {
			t.Errorf("%+v", u)
		}
	}

	// An update of a unique has the number, but no names of members.
	if err := w.Follow(t.Context(), "u:1"); err != nil {
		t.Fatal(err)
	}
	one(t, s, see("u:1", "a"))
	received = e.UntilCounter(t, one(t, writer, see("u:1", "a", "b")))
	if u := received[len(received)-1]; len(u.Joined) > 0 {
		t.Errorf("%+v", u)
	}
	w.Close()
	one(t, s, add(exact, "e:1", 1))
}

// published makes a change and waits until a watcher has received it. So a watch that begins later does not receive it,
// even over a slow feed.
func published(t testing.TB, s counter.Store, c counter.Change) {
	t.Helper()
	e, w := Listen(t, s, c.Key)
	defer w.Close()

	e.UntilCounter(t, one(t, s, c))
}

func watchMembers(t *testing.T, i Instance) {
	s := i.Store
	published(t, s, edit("m:1", []string{"before"}, nil))
	e, _ := Listen(t, s, "m:1")

	// until waits until the updates have c, and either the moves of members that want has or the demand to read them
	// again. A move may be in another update of the same version than c.
	until := func(what string, c counter.Counter, want map[string]bool) {
		e.Until(t, what, func(received []counter.Update) bool {
			in := map[string]bool{}
			known := false
			reread := false
			for _, u := range received {
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
	until("the moves of a, b and c", is, map[string]bool{"a": true, "b": true, "c": false})
	is = one(t, s, reset(members, "m:1"))
	until("the reset", is, map[string]bool{"a": false, "b": false, "c": false, "before": false})
}

func watchDelete(t *testing.T, i Instance) {
	s := i.Store
	published(t, s, add(exact, "e:1", 3))
	e, _ := Listen(t, s, "e:1", "e:2")

	one(t, s, drop(exact, "e:1"))
	e.UntilCounter(t, counter.Counter{Key: "e:1", Kind: counter.Exact})
	one(t, s, drop(exact, "e:1")) // changes nothing, so there is no update
	received := e.UntilCounter(t, one(t, s, add(exact, "e:2", 1)))

	n := 0
	for _, u := range received {
		if u.Counter.Key == "e:1" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("received %d updates of it: %+v", n, received)
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
	e.Until(t, "the first", func(received []counter.Update) bool { return len(received) > 0 })
	// The watcher's callback blocks by now.
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
