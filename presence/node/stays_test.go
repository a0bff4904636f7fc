package node

import (
	"testing"

	"pgregory.net/rapid"
)

// Stays are what a map of pages to their ends is, whatever their number.
func TestStaysAreAMap(t *testing.T) {
	pages := make([]*page, 3*fewStays)
	for i := range pages {
		pages[i] = &page{}
	}
	rapid.Check(t, func(rt *rapid.T) {
		var s stays
		model := map[*page]int64{}
		for range rapid.IntRange(0, 200).Draw(rt, "steps") {
			pg := rapid.SampledFrom(pages).Draw(rt, "page")
			until := int64(rapid.IntRange(0, 5).Draw(rt, "until"))
			st := s.find(pg)
			if have, ok := model[pg]; ok != (st != nil) || ok && st.until != have {
				rt.Fatalf("found %v, want %d, %t", st, have, ok)
			}
			switch {
			case st == nil:
				s.add(pg, until)
				model[pg] = until
			case rapid.Bool().Draw(rt, "remove"):
				s.remove(st)
				delete(model, pg)
			default:
				s.set(st, until)
				model[pg] = until
			}
			lasting, soonest := 0, int64(0)
			for _, until := range model {
				if until == 0 {
					lasting++
				} else if soonest == 0 || until < soonest {
					soonest = until
				}
			}
			if s.live() != (lasting > 0) || len(s.list) != len(model) || soonest != 0 && (s.soonest == 0 || s.soonest > soonest) {
				rt.Fatalf("live %t, %d stays, soonest %d; want %d lasting of %d, and %d or earlier", s.live(), len(s.list), s.soonest, lasting, len(model), soonest)
			}
		}
	})
}
