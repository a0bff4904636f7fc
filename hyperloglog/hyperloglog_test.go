package hyperloglog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"testing"
)

func of(members ...string) Registers {
	var r Registers
	r.Add(members...)
	return r
}

// numbered adds n members that no other set has.
func numbered(r *Registers, set, n int) {
	var name [8]byte
	binary.LittleEndian.PutUint32(name[:], uint32(set))

	var all []string
	for i := range n {
		binary.LittleEndian.PutUint32(name[4:], uint32(i))

		// Raising a register of the dense form directly is much faster than Add.
		if len(r.b) == denseSize {
			r.raise(Place(string(name[:])))
		} else {
			all = append(all, string(name[:]))
		}
	}

	r.Add(all...)
}

// TestErrors: the estimate of one set, from 10 members to 10 million, is off by at most four standard errors, and over
// many sets the error has the promised size.
func TestErrors(t *testing.T) {
	var r Registers
	r.b = new(Union).dense()
	var name [8]byte

	for i, next := 0, 10; i < 10_000_000; {
		binary.LittleEndian.PutUint64(name[:], uint64(i))
		r.raise(Place(string(name[:])))
		i++
		if i < next {
			continue
		}

		next *= 10
		off := float64(r.Count()-int64(i)) / float64(i)
		t.Logf("%d members: %d, %+.2f %%", i, r.Count(), 100*off)
		if math.Abs(off) > 4*0.0081 || i <= 100 && math.Abs(off*float64(i)) > 1 {
			t.Errorf("%d members: %d", i, r.Count())
		}
	}

	// One set says little about the error, so this measures it over many sets.
	const sets, size = 100, 20_000
	squares := 0.0
	for set := range sets {
		r := Registers{new(Union).dense()}
		numbered(&r, set, size)
		off := float64(r.Count()-size) / size
		squares += off * off
	}

	if rms := math.Sqrt(squares / sets); rms < 0.0061 || rms > 0.0101 { // 0.0081, measured within a quarter
		t.Errorf("the standard error is %.2f %%", 100*rms)
	}
}

// TestRedisReadsTheSame: Redis 7.0 stores these bytes after PFADD of a, b and c.
func TestRedisReadsTheSame(t *testing.T) {
	r := of("a", "b", "c")
	const want = "HYLL\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80`\xf3\x80P\xb1\x84K\xfb\x80BZ"
	if string(r.Bytes()) != want {
	}
}

func TestFewMembersAreSmall(t *testing.T) {
	var r Registers
	if r.Add() || !r.Empty() || r.Bytes() != nil || r.Count() != 0 {
		t.Errorf("%q of an empty set", r.Bytes())
	}

	// The sparse form grows with the members, until the dense one is smaller.
	for n, most := range map[int]int{1: 30, 10: 60, 100: 350, 1000: head + sparseMost, 20_000: denseSize} {
		var r Registers
		numbered(&r, 1, n)
		if len(r.Bytes()) > most || n == 20_000 && len(r.Bytes()) != most {
			t.Errorf("%d members take %d bytes, want at most %d", n, len(r.Bytes()), most)
		}
	}
}

func TestAddReportsChanges(t *testing.T) {
	for _, size := range []int{5, 1000, 5000} {
		var r Registers
		numbered(&r, 1, size)
		if !r.Add("new") {
			t.Fatal("a new member changed nothing")
		}

		before := r.Clone()
		if r.Add("new", "new") || !bytes.Equal(before.b, r.b) {
			t.Errorf("with %d members, adding a known one changed the registers", size)
		}
	}
}

// TestUnions: the order in which sets are made and merged does not matter.
func TestUnions(t *testing.T) {
	var sets []Registers
	for set := range 2 {
		for _, size := range []int{0, 1, 5, 300, 900, 3000} {
			var r Registers
			numbered(&r, set, size)
			sets = append(sets, r)
		}
	}

	for i, a := range sets {
		for j, b := range sets {
			unions(t, a, b, sets[(i+j)%len(sets)])
		}
	}
}

func unions(t *testing.T, a, b, c Registers) {
	t.Helper()
	merged := func(of ...Registers) Registers {
		out := of[0].Clone()
		for _, r := range of[1:] {
			out.Merge(r)
		}

		return out
	}

	same := func(what string, x, y Registers) {
		t.Helper()
		if !values(x, y) || x.Count() != y.Count() {
			t.Fatalf("%s: %d, %d", what, x.Count(), y.Count())
		}
	}

	ab, ba := merged(a, b), merged(b, a)
	same("commutative", ab, ba)
	same("associative", merged(ab, c), merged(a, merged(b, c)))
	same("idempotent", merged(ab, b, a), ab)

	again, err := Parse(ab.Clone().b)
	if err != nil {
		t.Fatal(err)
	}
	same("written and read", again, ab)

	var u Union
	u.Merge(a)
	u.Merge(b)
	if u.Count() != ab.Count() {
		t.Fatalf("a union of %d, merged %d", u.Count(), ab.Count())
	}
}

func values(x, y Registers) bool {
	var u, v Union
	u.Merge(x)
	v.Merge(y)

	return u == v
}

func TestBadBytes(t *testing.T) {
	few, many := of("a"), Registers{new(Union).dense()}
	change := func(r Registers, f func(b []byte) []byte) []byte { return f(r.Clone().b) }

	for name, b := range map[string][]byte{
		"short":           []byte("HYLL"),
		"other":           change(few, func(b []byte) []byte { b[0] = 'h'; return b }),
		"another form":    change(few, func(b []byte) []byte { b[4] = 2; return b }),
		"dense too short": change(many, func(b []byte) []byte { return b[:len(b)-1] }),
		"dense too long":  change(many, func(b []byte) []byte { return append(b, 0) }),
		"sparse too few":  change(few, func(b []byte) []byte { return b[:len(b)-2] }),
		"sparse too many": change(few, func(b []byte) []byte { return append(b, 0) }),
		"sparse cut off":  change(few, func(b []byte) []byte { return b[:len(b)-1] }),
	} {
		if _, err := Parse(b); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}

	if r, err := Parse(nil); err != nil || !r.Empty() {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	few := of("a", "b")
	f.Add(few.b)
	f.Add(new(Union).dense())

	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Parse(bytes.Clone(b))
		if err != nil {
			return
		}

		r.Add("one", "two")
		if _, err := Parse(r.Bytes()); err != nil || r.Count() < 0 {
			t.Fatalf("%d, %v", r.Count(), err)
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	for _, size := range []int{10, 1000, 100_000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			var r Registers
			numbered(&r, 1, size)

			names := make([]string, 1024)
			for i := range names {
				names[i] = fmt.Sprint("member ", i%size)
			}

			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r.Add(names[i%len(names)])
			}
		})
	}
}

func BenchmarkCount(b *testing.B) {
	var r Registers
	numbered(&r, 1, 100_000)

	for b.Loop() {
		r.Count()
	}
}
