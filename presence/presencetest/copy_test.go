package presencetest

import (
	"testing"

	"pgregory.net/rapid"

	"headcount/presence/pncounter"
)

func pair(t *rapid.T, name string) pncounter.Pair {
	return pncounter.Pair{
		Incarnation: rapid.Uint64Range(0, 3).Draw(t, name+" incarnation"), // few values, so that they are often equal
		Increments:  rapid.Int64Range(0, 5).Draw(t, name+" increments"),
		Decrements:  rapid.Int64Range(0, 5).Draw(t, name+" decrements"),
	}
}

func TestMergeOfPairs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := pair(t, "a"), pair(t, "b"), pair(t, "c")
		if ab, ba := mergePairs(a, b), mergePairs(b, a); ab != ba {
			t.Fatalf("not commutative: %v and %v", ab, ba)
		}

		if left, right := mergePairs(mergePairs(a, b), c), mergePairs(a, mergePairs(b, c)); left != right {
			t.Fatalf("not associative: %v and %v", left, right)
		}

		if aa := mergePairs(a, a); aa != a {
			t.Fatalf("not idempotent: %v became %v", a, aa)
		}

		if value(a) < 0 {
			t.Fatalf("negative: %v", a)
		}
	})
}

func TestValue(t *testing.T) {
	for p, want := range map[pncounter.Pair]int64{
		{Incarnation: 1, Increments: 7, Decrements: 4}: 3,
		{Incarnation: 2, Increments: 3, Decrements: 3}: 0,
		{Incarnation: 3, Increments: 1, Decrements: 5}: 0, // more decrements than increments count as 0
	} {
		if n := value(p); n != want {
			t.Errorf("the value of %v is %d, want %d", p, n, want)
		}
	}
}

// next returns the incarnation of a counter that begins at now, in Unix milliseconds. known is the highest incarnation
// that is remembered, or 0.
func next(now, known uint64) uint64 { return max(now, known+1) }

// source is a region that logs its changes, as the scripts do.
type source struct {
	log, end, floor uint64
	forgot          uint64 // up to which place the log has been forgotten
	given           uint64 // the highest incarnation that a pair was raised to
	clock           uint64 // may go back
	used            map[uint64]bool
	pairs           map[string]pncounter.Pair
	places          map[string]uint64
}

func (s *source) set(page string, users int64) {
	p, ok := s.pairs[page]
	if !ok {
		p.Incarnation = s.clock // perhaps below the floor
		for s.used[p.Incarnation] {
			p.Incarnation++
		}
		s.used[p.Incarnation] = true
	}

	if came := users - value(p); came > 0 {
		p.Increments += came
	} else {
		p.Decrements -= came
	}

	s.pairs[page] = p
	s.place(page)
}

func (s *source) place(page string) {
	s.end++
	s.places[page] = s.end
}

// batch returns the changes after from, at most limit pages.
func (s *source) batch(from uint64, limit int) pncounter.Batch {
	b := pncounter.Batch{Log: s.log, From: from, To: s.end, Floor: s.floor, Complete: true}
	// Pages are sent in the order of their last change.
	for place := from + 1; place <= s.end; place++ {
		for page, at := range s.places {
			if at != place {
				continue
			}
			if len(b.Pages) == limit {
				b.To = place - 1
				b.Complete = false
				return b
			}
			if p := s.pairs[page]; p.Incarnation < s.floor { // the pair is from before this log
				s.pairs[page] = pncounter.Pair{Incarnation: s.give(s.floor), Increments: value(p)}
			}

			b.Pages = append(b.Pages, pncounter.PagePair{Page: page, Pair: s.pairs[page]})
		}
	}

	return b
}

// lose restarts the region without data, except for the incarnation that others remember.
func (s *source) lose(known uint64) {
	s.begin(known)
	s.floor = s.log
	s.end = 0
	s.forgot = 0
	s.pairs = map[string]pncounter.Pair{}
	s.places = map[string]uint64{}
}

// raise begins a log above high, and makes void what the log does not name.
func (s *source) raise(high uint64) {
	for _, p := range s.pairs {
		high = max(high, p.Incarnation)
	}

	s.begin(high)
	s.floor = s.log
	s.forgot = 0
}

// begin begins a log above known. No two logs, and no two pairs of a page, begin in the same millisecond.
func (s *source) begin(known uint64) {
	s.log = next(s.clock, known)
	for s.used[s.log] {
		s.log++
	}
	s.used[s.log] = true
}

// give returns an incarnation that was never given before, and is least or more.
func (s *source) give(least uint64) uint64 {
	s.given = max(s.given+1, least)
	for s.used[s.given] {
		s.given++
	}
	s.used[s.given] = true

	return s.given
}

// to returns the next batch for the copy.
func (s *source) to(c *Copy, limit int) pncounter.Batch {
	if c.Log != s.log {
		return s.batch(0, limit)
	}
	// The copy may have pages that the log no longer has. A new log makes it forget them.
	if c.Cursor < s.forgot {
		s.raise(max(s.log, c.High, c.Floor))
		return s.batch(0, limit)
	}

	return s.batch(min(c.Cursor, s.end), limit)
}

// answer handles the answer of a copy, as a link does.
func (s *source) answer(b pncounter.Batch, a pncounter.Ack) {
	switch a.Status {
	case pncounter.Behind:
		if s.log <= a.High {
			s.raise(a.High)
		}

	case pncounter.Merged:
		for _, at := range a.Refused {
			page := b.Pages[at].Page
			if p, ok := s.pairs[page]; ok && p.Incarnation <= a.High {
				// The region raises the refused pairs, and sends them again.
				s.pairs[page] = pncounter.Pair{Incarnation: s.give(next(s.clock, a.High)), Increments: value(p)}
				s.place(page)
			}
		}
	}
}

// A copy converges to the region's state, whatever happens to batches on the way, to the copy, to the region's data and
// to its clock. Pages that the region has forgotten do not come back.
func TestCopyConverges(t *testing.T) {
	pages := []string{"a", "b", "c", "d"}
	rapid.Check(t, func(t *rapid.T) {
		s := &source{clock: 1000, used: map[uint64]bool{}}
		s.lose(0)

		var c Copy

		var backup Copy
		var late []pncounter.Batch // batches that were sent, and may arrive again
		deliver := func(b pncounter.Batch) { s.answer(b, c.Merge(b)) }

		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			steps := []string{
				"set", "set", "set", "send", "send", "late", "lose", "forget", "clock", "backup", "restore", "empty",
			}
			switch rapid.SampledFrom(steps).Draw(t, "step") {
			case "set":
				s.set(rapid.SampledFrom(pages).Draw(t, "page"), rapid.Int64Range(0, 4).Draw(t, "users"))
			case "send":
				b := s.to(&c, rapid.IntRange(1, 4).Draw(t, "limit"))
				if rapid.Bool().Draw(t, "keep") {
					late = append(late, b)
				}

				switch rapid.SampledFrom([]string{"arrives", "its answer is lost", "is lost"}).Draw(t, "batch") {
				case "arrives":
					deliver(b)
				case "its answer is lost":
					c.Merge(b)
				}
			case "late":
				if len(late) > 0 {
					deliver(late[rapid.IntRange(0, len(late)-1).Draw(t, "which")])
				}
			case "lose": // processes and peers may remember nothing, and the clock may be wrong
				s.lose(rapid.SampledFrom([]uint64{0, s.log}).Draw(t, "known"))
			case "forget": // an empty page, whoever knows that it is empty
				page := rapid.SampledFrom(pages).Draw(t, "page")
				if value(s.pairs[page]) == 0 {
					s.forgot = max(s.forgot, s.places[page])
					delete(s.pairs, page)
					delete(s.places, page)
				}
			case "clock":
				s.clock = uint64(rapid.IntRange(900, 1100).Draw(t, "clock"))
			case "backup":
				backup = clone(c)
			case "restore":
				c = clone(backup)
			case "empty":
				c = Copy{}
			}

			for _, page := range pages {
				if n := c.Value(page); n < 0 {
					t.Fatalf("%q has %d users", page, n)
				}
			}
		}

		// Everything is healed: the link continues from the copy's position.
		for i := 0; ; i++ {
			deliver(s.to(&c, 2))
			if c.Log == s.log && c.Done && c.Cursor == s.end && c.Cursor >= s.forgot {
				break
			}

			if i > 20 {
				t.Fatalf("the link does not come to an end: %+v, %+v", s, c)
			}
		}

		for _, page := range pages {
			if got, want := c.Value(page), value(s.pairs[page]); got != want {
				t.Fatalf("%q has %d users in the copy, %d in the region\n%+v\n%+v", page, got, want, s, c)
			}
		}
	})
}

// If the reply with refused pairs is lost, the pairs are refused again, until the region has raised them.
func TestPairsAreRefusedUntilTheyAreRaised(t *testing.T) {
	var c Copy
	batch := func(from, to, incarnation uint64) pncounter.Batch {
		page := pncounter.PagePair{
			Page: "a", Pair: pncounter.Pair{Incarnation: incarnation, Increments: int64(incarnation)},
		}
		return pncounter.Batch{Log: 5, From: from, To: to, Complete: true, Pages: []pncounter.PagePair{page}}
	}

	c.Merge(batch(0, 1, 9))

	// The first of the two replies is lost, so the same batch comes again.
	for range 2 {
		if a := c.Merge(batch(1, 2, 7)); len(a.Refused) != 1 || a.Cursor != 1 || c.Value("a") != 9 {
			t.Fatalf("the answer is %+v, with %d users; want a refusal, position 1 and 9 users", a, c.Value("a"))
		}
	}

	if a := c.Merge(batch(1, 3, 10)); len(a.Refused) != 0 || a.Cursor != 3 || !a.Done || c.Value("a") != 10 {
		t.Fatalf("the answer is %+v, with %d users; want no refusal, position 3 and 10 users", a, c.Value("a"))
	}
}

func clone(c Copy) Copy {
	pairs := map[string]pncounter.Pair{}
	for page, p := range c.Pairs {
		pairs[page] = p
	}
	c.Pairs = pairs
	return c
}
