package countertest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"headcount/counter"
	"headcount/internal/testkit"
)

// keeping returns a change of a counter's reservation.
func keeping(verb counter.Verb, rule *counter.Rule, key, id string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: verb, Hold: &counter.Hold{ID: id}}
}

func reserving(rule *counter.Rule, key, id string, amount int64, d time.Duration) counter.Change {
	c := keeping(counter.Reserve, rule, key, id)
	c.Delta = amount
	c.Hold.For = d
	c.Reason = "order " + id

	return c
}

// ExpireDue expires the reservations that are due, as a gateway does four times a second.
func ExpireDue(t testing.TB, s counter.Store) []counter.Result {
	t.Helper()
	due, err := s.Due(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	var ops []counter.Op
	for i := range due {
		ops = append(ops, due[i].Expiring(Rules))
	}
	if len(ops) == 0 {
		return nil
	}

	return s.Apply(t.Context(), ops)
}

// reservations tests every change of a reservation, with its answers and bounds.
func reservations(t *testing.T, i Instance) {
	s := i.Store
	const key = "k:r"
	one(t, s, add(stock, key, 5))
	refused(t, s, counter.ErrBound, key, 5, reserving(stock, key, "a", 6, time.Hour))

	did := func(c counter.Change, replay bool, value, reserved int64, status counter.Status) counter.Reservation {
		t.Helper()
		r := do(t, s, op(c))[0]
		is := r.Err == nil && r.Replay == replay && r.Reservation != nil && r.Reservation.ID == c.Hold.ID &&
			r.Reservation.Status == status && r.Counters[0].Value == value && r.Counters[0].Reserved == reserved
		if !is {
			t.Fatalf("%+v: %+v of %+v", c, r, r.Reservation)
		}
		if is := read(t, s, key); is.Value != value || is.Reserved != reserved || is.Version != r.Counters[0].Version {
			t.Fatalf("after %+v it is %+v", c, is)
		}
		return *r.Reservation
	}
	took := did(reserving(stock, key, "a", 2, time.Hour), false, 3, 2, counter.Open)
	// A repetition does not extend it.
	if again := did(reserving(stock, key, "a", 2, time.Minute), true, 3, 2, counter.Open); again != took {
		t.Errorf("the reservation was %+v, and is %+v after a repetition", took, again)
	}
	refused(t, s, counter.ErrReservation, key, 3, reserving(stock, key, "a", 1, time.Hour))
	did(reserving(stock, key, "b", 3, time.Hour), false, 0, 5, counter.Open)
	refused(t, s, counter.ErrBound, key, 0, reserving(stock, key, "c", 1, time.Hour))

	did(keeping(counter.Commit, stock, key, "a"), false, 0, 3, counter.Committed)
	did(keeping(counter.Commit, stock, key, "a"), true, 0, 3, counter.Committed)
	refused(t, s, counter.ErrReservation, key, 0, keeping(counter.Cancel, stock, key, "a"))
	// A late repetition must not take the amount again.
	refused(t, s, counter.ErrReservation, key, 0, reserving(stock, key, "a", 2, time.Hour))
	did(keeping(counter.Cancel, stock, key, "b"), false, 3, 0, counter.Cancelled)
	did(keeping(counter.Cancel, stock, key, "b"), true, 3, 0, counter.Cancelled)
	refused(t, s, counter.ErrReservation, key, 3, keeping(counter.Commit, stock, key, "b"))
	refused(t, s, counter.ErrNoReservation, key, 3, keeping(counter.Commit, stock, key, "c"))
	did(reserving(stock, key, "b", 1, time.Hour), false, 2, 1, counter.Open) // a cancelled one can be made again

	// An increase must leave room below the ceiling for what may come back.
	refused(t, s, counter.ErrBound, key, 2, add(stock, key, 98))
	one(t, s, add(stock, key, 97))
	refused(t, s, counter.ErrBound, key, 99, counter.Change{
		Key: key, Rule: stock, Verb: counter.Set, Delta: 100, Reason: "r", By: "b",
	})
	did(keeping(counter.Cancel, stock, key, "b"), false, 100, 0, counter.Cancelled)

	var ops []string
	for _, e := range chained(t, s, key) {
		ops = append(ops, fmt.Sprint(e.Op, " ", e.Delta, " ", e.Reason))
	}
	want := []string{
		"increment 5 ", "reserve -2 order a", "reserve -3 order b", "commit 0 ", "cancel 3 ", "reserve -1 order b",
		"increment 97 ", "cancel 1 ",
	}
	if !slices.Equal(ops, want) {
		t.Errorf("the ledger has %q", ops)
	}

	for _, of := range []*counter.Rule{sum, members} {
		refused(t, s, counter.ErrKind, of.Match[:2]+"r", 0, reserving(of, of.Match[:2]+"r", "a", 1, time.Hour))
	}

	// A counter that is created again has no reservations.
	did(reserving(stock, key, "b", 1, time.Hour), false, 99, 1, counter.Open)
	one(t, s, drop(stock, key))
	one(t, s, add(stock, key, 7))
	refused(t, s, counter.ErrNoReservation, key, 7, keeping(counter.Commit, stock, key, "b"))
	did(reserving(stock, key, "b", 1, time.Hour), false, 6, 1, counter.Open)
}

// manyReservations tests the bound of open reservations, and their list in pages.
func manyReservations(t *testing.T, i Instance) {
	const key = "e:r"
	name := func(n int) string { return fmt.Sprintf("cart %05d", n) }
	for n := 0; n < counter.MaxOpen; {
		var ops []counter.Op
		for range 500 {
			ops = append(ops, op(reserving(exact, key, name(n), 2, time.Hour)))
			n++
		}
		do(t, i.Store, ops...)
	}
	refused(t, i.Store, counter.ErrReservation, key, -2*counter.MaxOpen, reserving(exact, key, "x", 1, time.Hour))
	// A reservation that has ended makes room for another one.
	one(t, i.Store, keeping(counter.Commit, exact, key, name(2)))
	one(t, i.Store, reserving(exact, key, "x", 1, time.Hour))

	after, n := "", 0
	for more := true; more; {
		page, err := i.Store.Reservations(t.Context(), key, after, counter.MaxReservations)
		if err != nil || len(page.Open) == 0 {
			t.Fatalf("%d after %q, %v", len(page.Open), after, err)
		}
		for _, r := range page.Open {
			if r.ID <= after || r.ID == name(2) || r.Status != counter.Open {
				t.Fatalf("%+v after %q", r, after)
			}
			after = r.ID
			n++
		}
		more = page.More
	}
	if n != counter.MaxOpen || after != "x" {
		t.Errorf("%d are listed, and the last one is %q", n, after)
	}
}

// expiring tests that the amounts of reservations come back by themselves, but not too early.
func expiring(t *testing.T, i Instance) {
	s := i.Store
	const key = "k:x"
	one(t, s, add(stock, key, 10))
	began := time.Now()
	one(t, s, reserving(stock, key, "short", 3, counter.MinFor))
	one(t, s, reserving(stock, key, "paid", 2, counter.MinFor))
	one(t, s, reserving(stock, key, "long", 1, time.Hour))
	one(t, s, keeping(counter.Commit, stock, key, "paid"))
	// On a slow machine the time may be over by now.
	if r := ExpireDue(t, s); time.Since(began) < counter.MinFor && len(r) > 0 {
		t.Fatalf("due after %s: %+v", time.Since(began), r)
	}

	// An expiry that comes too early changes nothing: only the owner's clock counts.
	early := keeping(counter.Expire, stock, key, "long")
	if r := do(t, s, op(early))[0]; r.Err != nil || !r.Replay {
		t.Errorf("too early: %+v", r)
	}

	testkit.Eventually(t, "one reservation expires", func() bool {
		ExpireDue(t, s)
		return read(t, s, key).Value == 7
	})
	if d := time.Since(began); d < counter.MinFor {
		t.Errorf("it expired after %s", d)
	}
	if c := read(t, s, key); c.Reserved != 1 {
		t.Errorf("%+v", c)
	}
	refused(t, s, counter.ErrReservation, key, 7, keeping(counter.Commit, stock, key, "short"))
	if r := do(t, s, op(keeping(counter.Cancel, stock, key, "short")))[0]; r.Err != nil || !r.Replay {
		t.Errorf("a cancel of what has come back: %+v", r)
	}
	if n := len(chained(t, s, key)); n != 6 {
		t.Errorf("%d entries", n)
	}
	if due, err := s.Due(t.Context()); err != nil || len(due) > 0 {
		t.Errorf("still due: %+v, %v", due, err)
	}
}

// Holdings compares a random history of reservations with the truth: at every moment free + reserved + committed is
// what was added.
type Holdings struct {
	Store counter.Store
	Rand  *rand.Rand
	Space string                   // suffix of the keys
	Pause func(time.Duration)      // lets time pass; nil: no time passes
	Crash func() counter.Store     // returns the store with another owner, or after a restart; nil: neither happens
	truth map[string]*holdingTruth // by key
}

// holdingTruth is the truth about one counter.
type holdingTruth struct {
	put  int64                          // the sum of all additions
	paid int64                          // committed
	is   map[string]counter.Reservation // by ID
}

// reserved returns the sum of the open reservations.
func (h *holdingTruth) reserved() (sum int64) {
	for _, r := range h.is {
		if r.Status == counter.Open {
			sum += r.Amount
		}
	}

	return sum
}

func (h *holdingTruth) free() int64 { return h.put - h.paid - h.reserved() }

// Run makes the steps of the history.
func (h *Holdings) Run(t testing.TB, steps int) {
	h.truth = map[string]*holdingTruth{}
	for _, name := range []string{"k:a", "k:b", "k:c"} {
		h.truth[name+h.Space] = &holdingTruth{is: map[string]counter.Reservation{}}
	}

	for range steps {
		n := h.Rand.IntN(20)
		pauses := n >= 14 && n < 17 && h.Pause != nil
		crashes := n == 17 && h.Crash != nil
		switch {
		case n < 14:
			h.step(t)
		case pauses:
			h.Pause(time.Duration(h.Rand.Int64N(int64(4 * time.Second))))
			h.expire(t)
		case crashes:
			h.Store = h.Crash()
		case n == 18:
			key := h.key()
			one(t, h.Store, drop(stock, key))
			h.truth[key] = &holdingTruth{is: map[string]counter.Reservation{}}
		}
		h.check(t)
	}
	for key := range h.truth {
		chained(t, h.Store, key)
	}
}

func (h *Holdings) key() string {
	keys := slices.Sorted(maps.Keys(h.truth))

	return keys[h.Rand.IntN(len(keys))]
}

// step makes one change, and compares its result.
func (h *Holdings) step(t testing.TB) {
	key := h.key()
	is := h.truth[key]
	id := fmt.Sprint("cart ", h.Rand.IntN(6))
	amount := 1 + h.Rand.Int64N(9)
	life := []time.Duration{time.Second, 3 * time.Second, time.Hour}[h.Rand.IntN(3)]
	// Without pauses nothing may expire, because truth has no clock then.
	if h.Pause == nil {
		life = time.Hour
	}

	c := []counter.Change{
		add(stock, key, 3*amount), add(stock, key, -amount), reserving(stock, key, id, amount, life),
		reserving(stock, key, id, amount, life), keeping(counter.Commit, stock, key, id),
		keeping(counter.Cancel, stock, key, id),
	}[h.Rand.IntN(6)]
	before := time.Now() // the store reads its clock during the call
	r := do(t, h.Store, op(c))[0]
	changed, want := is.make(c)
	fault := !errors.Is(r.Err, want) || want == nil && r.Err != nil
	if fault || r.Err == nil && r.Replay == changed {
		t.Fatalf("%+v %+v: %+v, want %v, changed %v", c, c.Hold, r, want, changed)
	}
	isNew := c.Verb == counter.Reserve && changed
	if !isNew {
		return
	}

	until := time.UnixMilli(r.Reservation.Until)
	if until.Before(before.Add(life)) && h.Pause != nil {
		t.Fatalf("reserved at %s for %s, until %s", before, life, until)
	}
	is.is[id] = *r.Reservation
}

// make makes a change in truth. It returns whether the change changed anything, or why it must be refused.
func (h *holdingTruth) make(c counter.Change) (changed bool, why error) {
	if c.Verb == counter.Add {
		tooLow := c.Delta < 0 && h.free()+c.Delta < 0
		tooHigh := c.Delta > 0 && h.free()+h.reserved()+c.Delta > 100
		if tooLow || tooHigh {
			return false, counter.ErrBound
		}
		h.put += c.Delta
		return true, nil
	}

	r := h.is[c.Hold.ID]
	to := counter.Committed
	if c.Verb == counter.Cancel {
		to = counter.Cancelled
	}
	isOver := to == counter.Cancelled && r.Status == counter.Expired // and needs no cancel
	switch {
	case c.Verb == counter.Reserve:
		return h.reserve(c, r)
	case r.Status == 0:
		return false, counter.ErrNoReservation
	case r.Status == to, isOver:
		return false, nil
	case r.Status != counter.Open:
		return false, counter.ErrReservation
	}

	if to == counter.Committed {
		h.paid += r.Amount
	}
	r.Status = to
	h.is[r.ID] = r

	return true, nil
}

func (h *holdingTruth) reserve(c counter.Change, r counter.Reservation) (changed bool, why error) {
	isOpen := r.Status == counter.Open
	isRepeated := isOpen && r.Amount == c.Delta
	switch {
	case isRepeated:
		return false, nil
	case isOpen, r.Status == counter.Committed:
		return false, counter.ErrReservation
	case h.free() < c.Delta:
		return false, counter.ErrBound
	}

	return true, nil
}

// expire expires the reservations that are due, in the store and in truth.
func (h *Holdings) expire(t testing.TB) {
	now := time.Now().UnixMilli()
	ExpireDue(t, h.Store)
	for _, of := range h.truth {
		for id, r := range of.is {
			if r.Status == counter.Open && r.Until <= now {
				r.Status = counter.Expired
				of.is[id] = r
			}
		}
	}
}

// check compares the store with truth.
func (h *Holdings) check(t testing.TB) {
	t.Helper()
	for key, is := range h.truth {
		c := read(t, h.Store, key)
		if c.Value != is.free() || c.Reserved != is.reserved() {
			t.Fatalf("%+v, want %d and %d reserved", c, is.free(), is.reserved())
		}

		page, err := h.Store.Reservations(t.Context(), key, "", counter.MaxReservations)
		if err != nil {
			t.Fatal(err)
		}
		var sum int64
		for _, r := range page.Open {
			if want := is.is[r.ID]; r != want {
				t.Fatalf("%q has %+v, want %+v", key, r, want)
			}
			sum += r.Amount
		}
		if sum != is.reserved() {
			t.Fatalf("%q has %+v open, want %d", key, page.Open, is.reserved())
		}
	}
}

// holdings tests random histories of reservations in which no time passes.
func holdings(t *testing.T, i Instance) {
	crash := func() counter.Store { return i.Crash(t) }
	if i.Crash == nil {
		crash = nil
	}

	h := &Holdings{Store: i.Store, Crash: crash}
	for n := range 10 {
		h.Rand = rand.New(rand.NewPCG(uint64(n), 1))
		h.Space = fmt.Sprint(" of ", n)
		h.Run(t, 40)
	}
}
