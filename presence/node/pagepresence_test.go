package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// Page presences behave like a map of pages to their ends, however many there are.
func TestPagePresencesAreAMap(t *testing.T) {
	pages := make([]*page, 3*maxUnindexed)
	for i := range pages {
		pages[i] = &page{}
	}

	rapid.Check(t, func(rt *rapid.T) {
		var s pagePresences
		model := map[*page]time.Duration{}

		for range rapid.IntRange(0, 200).Draw(rt, "steps") {
			pg := rapid.SampledFrom(pages).Draw(rt, "page")
			until := time.Duration(rapid.IntRange(0, 5).Draw(rt, "until"))

			st := s.find(pg)
			if have, ok := model[pg]; ok != (st != nil) || ok && st.until != have {
				rt.Fatalf("found %v, want one that ends at %d: %t", st, have, ok)
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

			lasting := 0
			soonest := time.Duration(0)
			for _, until := range model {
				if until == 0 {
					lasting++
				} else if soonest == 0 || until < soonest {
					soonest = until
				}
			}

			tooLate := soonest != 0 && (s.earliestEnd == 0 || s.earliestEnd > soonest)
			if s.live() != (lasting > 0) || len(s.list) != len(model) || tooLate {
				rt.Fatalf("live %t, %d presences, the first ends at %d; want %d open-ended of %d, and %d or earlier",
					s.live(), len(s.list), s.earliestEnd, lasting, len(model), soonest)
			}
		}
	})
}

// A user who was on thousands of pages, and now is on a few, takes no more memory than other users.
func TestFewPagePresencesTakeLittle(t *testing.T) {
	var s pagePresences
	for range 1000 {
		s.add(&page{}, 0)
	}

	for len(s.list) > 1 {
		s.remove(&s.list[0])
	}

	if cap(s.list) > 2*maxUnindexed || s.index != nil {
		t.Errorf("room for %d presences and the index %v, want at most %d and no index",
			cap(s.list), s.index, 2*maxUnindexed)
	}
}

// BenchmarkArriveDepart measures a join and a leave, in a partition's actor, of a user who is on many other pages.
func BenchmarkArriveDepart(b *testing.B) {
	for _, grace := range []time.Duration{0, 2 * time.Second} {
		for _, others := range []int{1, 10, 1000, 10_000} {
			b.Run(fmt.Sprintf("%d,grace=%s", others, grace), func(b *testing.B) {
				n, err := New(newStore(), Config{
					Name:            "n",
					Partitions:      1,
					PresenceTimeout: timeout,
					Reply:           replies(func(string, *heartbeat.Reply) {}),
					Log:             zerolog.Nop(),
				})

				if err != nil {
					b.Fatal(err)
				}

				p := newPartition(n, presence.Claim{})
				src := &source{Source: gw("a")}
				for i := range others {
					p.arrive(src, &heartbeat.Beat{}, 1, p.page(fmt.Sprint(i)))
				}

				for b.Loop() {
					p.arrive(src, &heartbeat.Beat{}, 1, p.page("p"))
					p.depart(src, 1, "p", grace)
				}
			})
		}
	}
}
