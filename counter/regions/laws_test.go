package regions_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// text is all that two shares may differ in.
func text(s Share) string {
	return fmt.Sprint(s.Kind, s.Died, s.Emptied, s.Parts, s.Seen.Count(), s.Value())
}

// share is any share of a kind, of few regions and small numbers, so that they meet. One
// sequence of one life may have two values, as an older memory leaves them.
func share(t *rapid.T, name string, kind counter.Kind) Share {
	s := Share{Kind: kind, Died: rapid.Uint64Range(0, 2).Draw(t, name+" died")}
	if rapid.IntRange(0, 4).Draw(t, name+" is deleted") == 0 {
		return Share{Died: s.Died}
	}
	if kind != counter.Sum {
		s.Emptied = rapid.Uint64Range(0, 2).Draw(t, name+" emptied")
	}
	if kind == counter.Unique {
		seen := hyperloglog.Registers{}
		seen.Add(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 4).Draw(t, name+" sees")...)
		s.Seen = seen
		return s
	}
	s.Parts = map[Incarnation]Part{}
	for range rapid.IntRange(0, 4).Draw(t, name+" has parts") {
		life := Incarnation{Region: rapid.SampledFrom([]string{"us", "eu"}).Draw(t, name+" region"), Number: rapid.Uint64Range(1, 2).Draw(t, name+" life")}
		p := Part{Sequence: rapid.Uint64Range(1, 4).Draw(t, name+" sequence")}
		p.Value = rapid.Int64Range(-2, 9).Draw(t, name+" value")
		if kind == counter.Sum {
			p.At = rapid.Uint64Range(0, p.Sequence).Draw(t, name+" at")
			p.Base = int64(p.At * p.At * life.Number)
		}
		s.Parts[life] = p
	}
	return s
}

func TestServerTheLawsOfMerging(t *testing.T) {
	for _, kind := range []counter.Kind{counter.Sum, counter.Members, counter.Unique} {
		t.Run(kind.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				a, b, c := share(t, "a", kind), share(t, "b", kind), share(t, "c", kind)
				before := text(a) + text(b)
				if ab, ba := text(a.Merge(b)), text(b.Merge(a)); ab != ba {
					t.Fatalf("not commutative: %s and %s", ab, ba)
				}
				if left, right := text(a.Merge(b).Merge(c)), text(a.Merge(b.Merge(c))); left != right {
					t.Fatalf("not associative: %s and %s", left, right)
				}
				ab := a.Merge(b)
				if text(ab.Merge(a)) != text(ab) || text(ab.Merge(ab)) != text(ab) {
					t.Fatalf("not idempotent: %s", text(ab))
				}
				if text(a)+text(b) != before {
					t.Fatal("merging has changed what was merged")
				}
			})
		})
	}
}

// Three regions change a sum, reset it, lose their memory, and hear what others told at some time, also late and
// twice. When all have heard all, they agree; and without a loss each change counts but those that a reset knew of.
func TestServerRegionsAgree(t *testing.T) {
	for _, kind := range []counter.Kind{counter.Sum, counter.Members} {
		t.Run(kind.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				regions := []*Region{{Name: "us"}, {Name: "eu"}, {Name: "ap"}}
				var told []Share
				made := map[int]bool{}                 // changes, by number
				knows := []map[int]bool{{}, {}, {}}    // of each region; whoever hears a share knows what its teller knew
				var knew []map[int]bool                // of told
				delta := map[int]int64{}               // of changes
				faults := rapid.Bool().Draw(t, "with") // losses and deletions
				for n := range rapid.IntRange(1, 40).Draw(t, "steps") {
					now := rapid.Uint64Range(1, 50).Draw(t, "now") // clocks are wrong
					i := rapid.IntRange(0, 2).Draw(t, "who")
					r := regions[i]
					switch what := rapid.IntRange(0, 11).Draw(t, "what"); {
					case what < 4 && kind == counter.Sum:
						made[n], knows[i][n], delta[n] = true, true, rapid.Int64Range(-3, 9).Draw(t, "delta")
						r.Add(delta[n], now)
					case what < 4:
						r.Join(rapid.Int64Range(0, 3).Draw(t, "join"), now)
					case what < 6:
						told, knew = append(told, r.Share), append(knew, copied(knows[i]))
					case what < 9 && len(told) > 0:
						at := rapid.IntRange(0, len(told)-1).Draw(t, "hears")
						r.Receive(told[at], now)
						for n := range knew[at] {
							knows[i][n] = true
						}
					case what == 9:
						r.Reset(now)
						for n := range knows[i] {
							delete(made, n)
						}
					case what == 10 && faults:
						r.Lose()
					case what == 11 && faults:
						r.Delete(now)
					}
				}
				for range 4 { // who begins a new life tells it once more
					for _, a := range regions {
						for _, b := range regions {
							if a != b {
								a.Receive(b.Share, 60)
							}
						}
					}
				}
				for _, r := range regions[1:] {
					if r.Value() != regions[0].Value() {
						t.Fatalf("%s says %d, %s says %d:\n%+v\n%+v", r.Name, r.Value(), regions[0].Name, regions[0].Value(), r, regions[0])
					}
				}
				if kind != counter.Sum || faults {
					return
				}
				want := int64(0)
				for n := range made {
					want += delta[n]
				}
				if got := regions[0].Value(); got != want {
					t.Fatalf("the total is %d, and what no reset knew of is %d", got, want)
				}
			})
		})
	}
}

func copied(set map[int]bool) map[int]bool {
	out := map[int]bool{}
	for n := range set {
		out[n] = true
	}
	return out
}
