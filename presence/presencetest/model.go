package presencetest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/internal/testkit"
	"headcount/presence"
)

// owner is a partition, with the data that its owners have written.
type owner struct {
	*writer
	past    []presence.Claim  // of former owners
	sent    []presence.Change // under the current claim, in this history
	run     int               // number of the history that its members belong to
	members map[place]presence.Member
}

// place is a user on a page.
type place struct {
	user presence.User
	page string
}

// history is one random history, with the expected state.
type history struct {
	*rapid.T
	s       presence.Store
	owners  []*owner // by partition
	run     int
	pages   []string
	users   map[string]map[int]int64 // by page and partition
	seen    map[string]presence.Count
	joined  map[string]bool // the pages that ever had users
	changed map[string]bool // the pages of the last step
	began   time.Time       // when the last step began
}

// model compares random histories of the store with maps. Owners write counts and members, of one partition or of many
// at once, replace each other, and repeat their writes. Former owners go on writing. After each step each count must be
// the sum over its partitions, and a count that has changed must have a newer version. At the end a watcher must have
// received every count once, and the owners must find their members.
func model(t *testing.T, s Store) {
	e := listen(t, s, allBuckets())
	var owners []*owner
	// The owners go on from history to history, so each history needs pages of its own.
	for _, c := range claimAll(t, s, false) {
		owners = append(owners, &owner{writer: &writer{t: t, s: s, claim: c}})
	}

	// The store must compare pages byte by byte, including their ends.
	names := []string{"é", "e\u0301", "E", "e", "{e}", "a:b", "a|b", "日本", "*x", "q|:{}\"", "\U0001F600"}

	run := 0
	rapid.Check(testkit.ForRapid(t), func(rt *rapid.T) {
		run++
		h := &history{
			T: rt, s: s, owners: owners, run: run, users: map[string]map[int]int64{}, seen: map[string]presence.Count{},
			joined: map[string]bool{},
		}

		for _, name := range rapid.Permutation(names).Draw(rt, "pages")[:3] {
			h.pages = append(h.pages, fmt.Sprint(name, run, name))
		}
		h.pages = append(h.pages, presence.SiteOf("shop").Qualify(h.pages[0]))
		h.check()

		// Few partitions take most steps, so that they often change the same pages.
		few := rapid.SliceOfN(rapid.IntRange(0, len(owners)-1), 1, 3).Draw(rt, "partitions")
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			h.step(few)
			h.check()
		}

		for _, p := range few {
			h.load(p)
		}

		e.until(t, "the last counts", func() bool {
			for page, c := range h.seen {
				if c.Version != (presence.Version{}) && e.counts[page] != c {
					return false
				}
			}

			return true
		})

		// Both reads return what the watcher has received.
		attached, err1 := s.Attach(t.Context(), "g", topics(h.pages...))
		updates, err2 := s.Updates(t.Context(), topics(h.pages...))
		if err1 != nil || err2 != nil || len(attached) != len(h.pages) || !slices.Equal(attached, updates) {
			rt.Fatalf("Attach = %+v, %v, and Updates = %+v, %v", attached, err1, updates, err2)
		}

		e.mu.Lock()
		defer e.mu.Unlock()

		// The watcher has received each version once, in order.
		for i, page := range h.pages {
			if c, ok := presence.CountOf(updates[i]); !ok || c != h.seen[page] || updates[i].Check() != nil {
				rt.Fatalf("Updates = %+v, want %+v", updates[i], h.seen[page])
			}

			received := e.received[presence.CountTopic(page)]
			for i := 1; i < len(received); i++ {
				if received[i].Version.Compare(received[i-1].Version) <= 0 {
					rt.Fatalf("received %+v after %+v", received[i], received[i-1])
				}
			}
		}
	})
}

func (h *history) step(few []int) {
	p := rapid.SampledFrom(few).Draw(h.T, "partition")
	o := h.owners[p]
	h.changed = map[string]bool{}
	h.began = time.Now()

	steps := []string{"write", "write", "write", "many", "many", "repeat", "claim", "load"}
	switch rapid.SampledFrom(steps).Draw(h.T, "step") {
	case "write":
		c := h.change(p, 4)
		out := h.write(c)[0]

		for i, got := range out.Counts {
			want, stored := c.Counts[i], count(h, h.s, got.Page)
			if got.Page != want.Page || got.Users != h.total(got.Page) || got != stored {
				h.Fatalf("after %+v: the answer is %+v, the store has %+v", want, got, stored)
			}
		}
	case "many":
		most := rapid.SampledFrom([]int{1, 6, 120, len(h.owners)}).Draw(h.T, "most")
		size := rapid.SampledFrom([]int64{0, 3, 1 << 9, 1 << 17, 1 << 31}).Draw(h.T, "size")

		var changes []presence.Change
		partitions := rapid.SliceOfN(rapid.IntRange(0, len(h.owners)-1), 1, most) // one may come twice
		for _, p := range partitions.Draw(h.T, "partitions") {
			changes = append(changes, h.change(p, size))
		}

		if len(o.past) > 0 { // a former owner writes at the same time
			late := presence.Change{
				Claim: rapid.SampledFrom(o.past).Draw(h.T, "former"), Sequence: 1 << 40,
				Members: []presence.MemberChange{{Member: presence.Member{User: 1, Page: h.pages[0]}}},
				Counts:  []presence.PageUsers{{Page: h.pages[0], Users: 9}, {Page: "never written", Users: 9}},
			}
			changes = slices.Insert(changes, rapid.IntRange(0, len(changes)).Draw(h.T, "place"), late)
		}

		h.write(changes...)
	case "repeat": // the last write, or an earlier one
		if o.run == h.run && len(o.sent) > 0 {
			again := rapid.SampledFrom(o.sent).Draw(h.T, "again")
			h.write(again)
			for _, c := range again.Counts {
				if got := count(h, h.s, c.Page); got != h.seen[c.Page] {
					h.Fatalf("%+v became %+v by a repetition", h.seen[c.Page], got)
				}
			}
		}
	case "claim":
		next := claim(h, h.s, p)
		if next.claim.Epoch <= o.claim.Epoch {
			h.Fatalf("claim %+v after %+v", next.claim, o.claim)
		}

		// From here on the former owner is refused everything.
		if _, err := h.s.Load(h.Context(), []presence.Claim{o.claim}); !errors.Is(err, presence.ErrFenced) {
			h.Fatalf("a former owner's load: %v", err)
		}

		o.past = append(o.past, o.claim)
		o.sent = nil
		o.claim = next.claim
		o.seq = 0
	case "load":
		h.load(p)
	}
}

// change draws a change of the partition, and applies it to the expected state.
func (h *history) change(p int, size int64) presence.Change {
	o := h.owners[p]
	first := o.run != h.run // the first change removes the members of an earlier history
	if first {
		o.run = h.run
		o.sent = nil
		o.members = map[place]presence.Member{}
	}

	c := o.writer.change(nil)
	c.Reset = first || rapid.IntRange(0, 7).Draw(h.T, "reset") == 0
	if c.Reset {
		clear(o.members)
	}

	named := map[place]bool{}
	for range rapid.IntRange(0, 3).Draw(h.T, "members") {
		user := rapid.SampledFrom([]presence.User{0, 1, 2, 1<<64 - 1}).Draw(h.T, "user")
		at := place{user, rapid.SampledFrom(h.pages).Draw(h.T, "page")}
		// A node's change names each member only once.
		if named[at] {
			continue
		}
		named[at] = true

		m := presence.MemberChange{
			Member: presence.Member{User: at.user, Page: at.page}, Gone: rapid.Bool().Draw(h.T, "gone"),
		}

		delete(o.members, at)
		if !m.Gone {
			if rapid.Bool().Draw(h.T, "held") {
				m.Hold = time.Now().Add(time.Duration(rapid.IntRange(1, 9).Draw(h.T, "hours")) * time.Hour)
				m.Alone = rapid.Bool().Draw(h.T, "alone")
			}
			o.members[at] = m.Member
		}

		c.Members = append(c.Members, m)
	}

	for _, page := range h.pages[:rapid.IntRange(1, len(h.pages)).Draw(h.T, "counted")] {
		n := rapid.Int64Range(0, size).Draw(h.T, "users")
		if h.users[page] == nil {
			h.users[page] = map[int]int64{}
		}

		// The store need not publish a count that stays the same.
		h.changed[page] = h.changed[page] || h.users[page][p] != n
		h.joined[page] = h.joined[page] || n > 0
		h.users[page][p] = n
		c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: n})
	}

	o.sent = append(o.sent, c)
	return c
}

func (h *history) write(changes ...presence.Change) []presence.Outcome {
	out := h.s.Write(h.Context(), changes)
	for i, o := range out {
		c := changes[i]
		fenced := errors.Is(o.Err, presence.ErrFenced)
		former := c.Claim != h.owners[c.Partition].claim
		bad := !former && (o.Err != nil || len(o.Counts) != len(c.Counts))
		if fenced != former || bad {
			h.Fatalf("Write(%+v) = %+v", changes[i], o)
		}
	}

	return out
}

func (h *history) total(page string) (sum int64) {
	for _, n := range h.users[page] {
		sum += n
	}
	return sum
}

// check checks the counts of all pages, and of a page that nobody has written.
func (h *history) check() {
	pages := append([]string{"never written"}, h.pages...)
	counts, err := h.s.Counts(h.Context(), pages)
	if err != nil || len(counts) != len(pages) {
		h.Fatalf("Counts = %+v, %v", counts, err)
	}

	for i, page := range pages {
		old, got := h.seen[page], counts[i]
		if got.Page != page || got.Users != h.total(page) || !h.joined[page] && got != (presence.Count{Page: page}) {
			h.Fatalf("%+v, want %d of %v on %q", got, h.total(page), h.users[page], page)
		}

		// The store keeps the time of a change in whole seconds, and its clock may differ a little.
		at := got.Updated
		outside := at.Before(h.began.Add(-time.Second)) || at.After(time.Now().Add(time.Second))
		if got.Newer(old) && (outside || at != at.Truncate(time.Second).UTC()) {
			h.Fatalf("%+v was changed after %s", got, h.began)
		}

		// A count changes only when a partition's part of it has changed.
		asBefore := h.changed[page] || old.Page == "" || got == old
		if old.Newer(got) || got.Users != old.Users && !got.Newer(old) || !asBefore {
			h.Fatalf("%+v became %+v", old, got)
		}

		h.seen[page] = got
	}
}

// load checks the members of a partition that was written in this history.
func (h *history) load(p int) {
	o := h.owners[p]
	if o.run != h.run {
		return
	}
	got, snap := map[place]presence.Member{}, load(h, h.s, o.claim)
	for _, m := range snap.Members {
		got[place{m.User, m.Page}] = m
	}

	// The store may compute the end by another clock: see holds.
	same := func(a, b presence.Member) bool {
		return a.Alone == b.Alone && a.Hold.IsZero() == b.Hold.IsZero() && a.Hold.Sub(b.Hold).Abs() < time.Hour/2
	}

	if !maps.EqualFunc(got, o.members, same) || len(snap.Members) != len(got) {
		h.Fatalf("partition %d: Load = %+v, want %v", p, snap.Members, o.members)
	}
}
