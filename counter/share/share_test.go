package share_test

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"headcount/counter"
	"headcount/counter/share"
	"headcount/hyperloglog"
)

var kinds = []counter.Kind{counter.Sum, counter.Members, counter.Unique}

// anyShare draws a share of few regions and small numbers.
func anyShare(t *rapid.T, kind counter.Kind) share.Share {
	s := share.Share{Kind: kind, Deletion: rapid.Uint64Range(0, 2).Draw(t, "died")}
	if rapid.IntRange(0, 4).Draw(t, "is deleted") == 0 {
		return share.Share{Deletion: s.Deletion}
	}
	if kind != counter.Sum {
		s.Emptied = rapid.Uint64Range(0, 2).Draw(t, "emptied")
	}
	if kind == counter.Unique {
		s.Seen.Add(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 4).Draw(t, "sees")...)
		return s
	}

	for range rapid.IntRange(0, 4).Draw(t, "parts") {
		p := share.Part{Region: rapid.SampledFrom([]string{"us", "eu"}).Draw(t, "region")}
		p.Life = rapid.Uint64Range(1, 2).Draw(t, "life")
		p.Sequence = rapid.Uint64Range(1, 4).Draw(t, "sequence")
		p.Value = rapid.Int64Range(-2, 9).Draw(t, "value")
		if kind == counter.Sum {
			p.At = rapid.Uint64Range(0, p.Sequence).Draw(t, "at")
			p.Base = int64(p.At * p.At * p.Life)
		}
		s.Parts = append(s.Parts, p)
	}

	return s
}

func TestSharesAreReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyShare(t, rapid.SampledFrom(kinds).Draw(t, "kind"))
		s.Updated = rapid.Int64().Draw(t, "updated")

		b := s.Append(nil)
		read, err := share.Parse(b)
		if err != nil || !reflect.DeepEqual(read, s) || !bytes.Equal(read.Append(nil), b) {
			t.Fatalf("%+v became %+v, %v", s, read, err)
		}

		cut := rapid.IntRange(0, len(b)-1).Draw(t, "cut")
		if _, err := share.Parse(b[:cut]); err == nil {
			t.Fatalf("the first %d of %d bytes were accepted as a share", cut, len(b))
		}
	})
}

// TestTotalsMayPassThroughMoreThan64Bits: parts are added with more than 64 bits, and only the total must fit.
func TestTotalsMayPassThroughMoreThan64Bits(t *testing.T) {
	s := share.Share{Kind: counter.Sum, Parts: []share.Part{
		{Region: "ap", Life: 1, Sequence: 1, Value: math.MaxInt64},
		{Region: "eu", Life: 1, Sequence: 1, Value: math.MaxInt64},
		{Region: "us", Life: 1, Sequence: 1, Value: math.MinInt64},
	}}
	if total, ok := s.Total(); total != math.MaxInt64-1 || !ok {
		t.Errorf("the total is %d, %v", total, ok)
	}
	if _, ok := s.Without("us", 1).Value(); ok {
		t.Error("twice the greatest number fits")
	}
}

// region is a region with one counter, as its owner has it.
type region struct {
	share.Local
	size int64 // number of members of its set
	life uint64
}

func (r *region) own(kind counter.Kind, now uint64, value int64) {
	if r.Kind == 0 {
		r.Kind = kind
		r.Life = max(now, r.life+1, r.Deletion+1)
	}
	r.life = max(r.life, r.Life)
	r.Changed = true
	r.SetOwn(r.Sequence+1, value)
}

func (r *region) add(delta int64, now uint64) { r.own(counter.Sum, now, r.Value+delta) }

func (r *region) join(members int64, now uint64) {
	r.size += members
	r.own(counter.Members, now, r.size)
}

func (r *region) see(now uint64, member string) {
	r.own(counter.Unique, now, 0)
	r.Seen.Add(member)
}

func (r *region) reset(now uint64) {
	if r.Kind == 0 {
		return
	}
	r.Reset(now)
	if r.Kind != counter.Sum {
		r.size = 0
		r.Seen = hyperloglog.Registers{}
		r.own(r.Kind, now, 0)
	}
	r.Changed = true
}

func (r *region) delete(now uint64) {
	if r.Kind == 0 {
		return
	}
	died := r.Delete(now)
	r.Local = share.Local{Region: r.Region, Share: share.Share{Deletion: died}}
	r.size = 0
}

func (r *region) lose() { *r = region{Local: share.Local{Region: r.Region}} }

func (r *region) hear(from string, s *share.Share, now uint64) {
	e := r.Merge(from, s, now)
	if e.Dropped || e.Emptied {
		r.size = 0
		r.Seen = hyperloglog.Registers{}
	}
	if s.Deletion == r.Deletion && s.Kind == counter.Unique && s.Emptied == r.Emptied {
		r.Seen.Merge(s.Seen)
	}
}

func (r *region) total() int64 {
	if r.Kind == counter.Unique {
		return r.Seen.Count()
	}
	total, _ := r.Total()

	return total
}

// TestRegionsAgree: three regions change a counter, reset it, delete it, lose it, and receive each other's shares, also
// late and twice. When all have received everything, they agree. Without a loss each addition to a sum counts, unless a
// reset knew of it.
func TestRegionsAgree(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { regionsAgree(t, kind) })
		})
	}
}

// asSent returns a share as another region reads it.
func asSent(t interface{ Fatal(...any) }, s *share.Share) share.Share {
	is, err := share.Parse(s.Append(nil))
	if err != nil {
		t.Fatal(err)
	}

	return is
}

type said struct {
	by string
	share.Share
	knew map[int]bool // the additions that it has received
}

func regionsAgree(t *rapid.T, kind counter.Kind) {
	var all []*region
	for _, name := range []string{"us", "eu", "ap"} {
		all = append(all, &region{Local: share.Local{Region: name}})
	}

	var told []said
	knows := map[*region]map[int]bool{}
	for _, r := range all {
		knows[r] = map[int]bool{}
	}

	counts := map[int]int64{} // the additions that no reset knew of
	faults := rapid.Bool().Draw(t, "faults")

	for n := range rapid.IntRange(1, 40).Draw(t, "steps") {
		now := rapid.Uint64Range(1, 50).Draw(t, "now") // the clocks are not in order
		r := all[rapid.IntRange(0, 2).Draw(t, "who")]
		what := rapid.IntRange(0, 11).Draw(t, "what")
		switch {
		case what < 4:
			delta := rapid.Int64Range(0, 9).Draw(t, "delta")
			change(r, kind, delta, now)
			knows[r][n] = true
			counts[n] = delta

		case what < 6:
			told = append(told, said{r.Region, asSent(t, &r.Share), maps.Clone(knows[r])})
		case what < 9:
			if len(told) == 0 {
				continue
			}
			one := &told[rapid.IntRange(0, len(told)-1).Draw(t, "hears")]
			r.hear(one.by, &one.Share, now)
			maps.Copy(knows[r], one.knew)

		case what == 9:
			r.reset(now)
			for n := range knows[r] {
				delete(counts, n)
			}

		case !faults:
		case what == 10:
			r.lose()
		default:
			r.delete(now)
		}
	}

	for range 4 { // a region that begins a new life sends that, too
		for _, a := range all {
			for _, b := range all {
				if a != b {
					is := asSent(t, &b.Share)
					a.hear(b.Region, &is, 60)
				}
			}
		}
	}

	for _, r := range all[1:] {
		if r.total() != all[0].total() {
			t.Fatalf("%s has %d, %s has %d:\n%+v\n%+v",
				r.Region, r.total(), all[0].Region, all[0].total(), r, all[0])
		}
	}

	want := int64(0)
	for _, delta := range counts {
		want += delta
	}

	if kind == counter.Sum && !faults && all[0].total() != want {
		t.Fatalf("the total is %d, want the sum %d of the additions that no reset knew of", all[0].total(), want)
	}
}

func change(r *region, kind counter.Kind, delta int64, now uint64) {
	switch kind {
	case counter.Sum:
		r.add(delta, now)
	case counter.Members:
		r.join(delta, now)
	default:
		r.see(now, fmt.Sprint(delta))
	}
}

// TestWhatWasOnlyHeardEnds: a counter that a region only received ends with a deletion, whatever its numbers are: the
// lives of two regions come from two clocks.
func TestWhatWasOnlyHeardEnds(t *testing.T) {
	us := &region{Local: share.Local{Region: "us"}}
	eu := &region{Local: share.Local{Region: "eu"}}
	us.add(3, 10)
	eu.hear("us", &us.Share, 1000)
	us.delete(20)
	eu.hear("us", &us.Share, 1000)
	if eu.Kind != 0 {
		t.Errorf("after the deletion the counter is %+v, want none", eu.Local)
	}

	// A region's own changes that it made without knowing of the deletion stay.
	ap := &region{Local: share.Local{Region: "ap"}}
	ap.add(5, 1000)
	ap.hear("us", &us.Share, 1000)
	if ap.total() != 5 {
		t.Errorf("a region's own changes are %+v, want 5", ap.Local)
	}
}

// TestWhoHasLostItsOwnPartIsTold: a region that sends less than it had before is sent what others know of it.
func TestWhoHasLostItsOwnPartIsTold(t *testing.T) {
	us := &region{Local: share.Local{Region: "us"}}
	eu := share.Local{Region: "eu"}
	us.add(3, 10)
	older := asSent(t, &us.Share)
	us.add(4, 10)
	if e := eu.Merge("us", &us.Share, 20); e.Send {
		t.Errorf("a plain change is sent back to its region: %+v", e)
	}
	if e := eu.Merge("us", &older, 20); !e.Send {
		t.Errorf("a region that has lost a change is sent nothing: %+v", e)
	}

	// The region has received the counter since, without its own part.
	without := older
	without.Parts = nil
	if e := eu.Merge("us", &without, 20); !e.Send {
		t.Errorf("a region that has lost its part is sent nothing: %+v", e)
	}
}
