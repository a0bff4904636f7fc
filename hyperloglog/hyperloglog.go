// Package hyperloglog estimates how many distinct members were added to a set, in at most 12 KB and less while there
// are few. The standard error is 0.81 %.
//
// # Format
//
// [Registers] have the exact format that Redis keeps for PFADD: 2^14 registers of 6 bits after a header of 16 bytes,
// dense or sparse. Redis hashes members with MurmurHash64A under a fixed seed; so does this package. So one store may
// let Redis add members, and another one reads, counts, merges and extends the same bytes without conversion.
//
// Few members are sparse: runs of registers with the same value, about two bytes for each member, up to 3,000 bytes.
//
// The estimate is Ertl's, as in Redis since 4.0. It has no bias at any size, and the same registers give the same
// number everywhere.
//
// The hash has no key. Whoever chooses members on purpose can make a counter too small or too large, but nothing else
// depends on the number.
package hyperloglog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

const (
	indexBits  = 14
	registers  = 1 << indexBits
	rankBits   = 64 - indexBits // of a hash that give the rank, which is at most one more
	head       = 16
	denseSize  = head + registers*6/8
	sparseMost = 3000 // bytes after the header, the default of hll-sparse-max-bytes in Redis
	denseForm  = 0
	sparseForm = 1

	// Opcodes of the sparse form, told apart by the two highest bits of a byte.
	zeroMost  = 64 // 00xxxxxx: x+1 registers that are 0
	longMark  = 0x40
	longMost  = registers // 01xxxxxx yyyyyyyy: the same with more bits
	valueMark = 0x80
	valueMost = 32 // 1vvvvvxx: x+1 registers that are v+1
	valueRun  = 4
)

// ErrFormat is wrapped by every error about bytes that are not registers.
var ErrFormat = errors.New("bad registers")

// Registers are the registers of one set. The zero Registers are those of an empty set. A copy shares the bytes: use
// Clone before changing one.
type Registers struct{ b []byte }

// Parse returns the registers in b, which Add and Merge then change in place. No bytes are an empty set.
func Parse(b []byte) (Registers, error) {
	if len(b) == 0 {
		return Registers{}, nil
	}
	if len(b) < head || string(b[:4]) != "HYLL" {
		return Registers{}, fmt.Errorf("%w: %d bytes without a head", ErrFormat, len(b))
	}
	// The length is all that can be wrong with the dense form: any bytes are registers.
	if b[4] == denseForm && len(b) == denseSize {
		return Registers{b}, nil
	}
	if b[4] != sparseForm {
		return Registers{}, fmt.Errorf("%w: %d bytes of form %d", ErrFormat, len(b), b[4])
	}

	// The runs of the sparse form must end with the last register.
	n := 0
	for at := head; at < len(b); {
		isCut := b[at]&0xc0 == longMark && at+1 == len(b)
		if isCut {
			return Registers{}, fmt.Errorf("%w: the last run is cut off", ErrFormat)
		}
		_, run, size := opcode(b[at:])
		n += run
		at += size
	}
	if n != registers {
		return Registers{}, fmt.Errorf("%w: %d registers, want %d", ErrFormat, n, registers)
	}

	return Registers{b}, nil
}

// opcode decodes a run of registers: their value, their number, and the length of the opcode in bytes.
func opcode(b []byte) (value uint8, run, size int) {
	switch {
	case b[0]&valueMark != 0:
		return b[0]>>2&(valueMost-1) + 1, int(b[0]&(valueRun-1)) + 1, 1
	case b[0]&longMark != 0:
		return 0, (int(b[0]&0x3f)<<8 | int(b[1])) + 1, 2
	default:
		return 0, int(b[0]) + 1, 1
	}
}

// Bytes returns the registers in the form of Parse, or nil for an empty set. The caller must not change them.
func (r *Registers) Bytes() []byte { return r.b }

// Empty reports whether no member was ever added.
func (r *Registers) Empty() bool { return len(r.b) == 0 }

// Clone returns a copy that may be changed.
func (r *Registers) Clone() Registers { return Registers{slices.Clone(r.b)} }

// Add adds members and reports whether a register changed.
func (r *Registers) Add(members ...string) bool {
	// The dense form is changed in place, and never becomes sparse again, as registers only grow.
	if len(r.b) == denseSize {
		changed := false
		for _, m := range members {
			index, rank := Place(m)
			changed = r.raise(index, rank) || changed
		}
		return changed
	}
	if r.has(members) {
		return false
	}

	// A run of the sparse form may have to be split, which is simpler when all registers are written anew.
	var u Union
	u.Merge(*r)
	changed := false
	for _, m := range members {
		index, rank := Place(m)
		if u.values[index] < rank {
			u.values[index] = rank
			changed = true
		}
	}
	if changed {
		r.b = u.encode(r.b)
	}

	return changed
}

// has reports whether members would change no register of the sparse form. It recognizes members that come again
// without decoding the registers.
func (r *Registers) has(members []string) bool {
	if r.Empty() || len(members) > 4 { // otherwise it would not be cheaper than decoding
		return false
	}

	for _, m := range members {
		index, rank := Place(m)
		if r.sparse(index) < rank {
			return false
		}
	}

	return true
}

// sparse returns a register of the sparse form.
func (r *Registers) sparse(index int) uint8 {
	at := head
	for end := 0; ; {
		value, run, size := opcode(r.b[at:])
		end += run
		if index < end {
			return value
		}
		at += size
	}
}

// raise raises a register of the dense form to at least rank.
func (r *Registers) raise(index int, rank uint8) bool {
	// A register may span two bytes; the last register ends with the last byte.
	at := head + index*6/8
	shift := index * 6 % 8
	wide := uint16(r.b[at])
	if at+1 < len(r.b) {
		wide |= uint16(r.b[at+1]) << 8
	}
	if uint8(wide>>shift&63) >= rank {
		return false
	}

	wide = wide&^(63<<shift) | uint16(rank)<<shift
	r.b[at] = byte(wide)
	if at+1 < len(r.b) {
		r.b[at+1] = byte(wide >> 8)
	}
	forget(r.b)

	return true
}

// forget marks the estimate that Redis caches in the header as invalid.
func forget(b []byte) { binary.LittleEndian.PutUint64(b[8:], 1<<63) }

// Size is the number of registers, and MaxRank the greatest value of one.
const (
	Size    = registers
	MaxRank = rankBits + 1
)

// Place returns the register of a member, and the value that it has at least after adding the member.
func Place(member string) (index int, rank uint8) {
	h := hash(member)

	// The bit above the last one bounds the rank where the hash has only zeros.
	return int(h & (registers - 1)), uint8(bits.TrailingZeros64(h>>indexBits|1<<rankBits)) + 1
}

// hash returns MurmurHash64A with the seed of Redis.
func hash(s string) uint64 {
	const m, r = 0xc6a4a7935bd1e995, 47
	h := 0xadc83b19 ^ uint64(len(s))*m
	// Redis reads the bytes in this order, whatever the machine's is.
	for ; len(s) >= 8; s = s[8:] {
		k := uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
			uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
		k *= m
		k ^= k >> r
		h = (h ^ k*m) * m
	}

	// The rest has less than eight bytes.
	if len(s) > 0 {
		for i := range len(s) {
			h ^= uint64(s[i]) << (8 * i)
		}
		h *= m
	}

	h ^= h >> r
	h *= m

	return h ^ h>>r
}

// Count returns the estimate.
func (r *Registers) Count() int64 {
	var histogram [64]int
	switch {
	case r.Empty():
		return 0
	case r.b[4] == denseForm:
		// Four registers of 6 bits are three bytes.
		for b := r.b[head:]; len(b) >= 3; b = b[3:] {
			histogram[b[0]&63]++
			histogram[(b[0]>>6|b[1]<<2)&63]++
			histogram[(b[1]>>4|b[2]<<4)&63]++
			histogram[b[2]>>2]++
		}
	default:
		for at := head; at < len(r.b); {
			value, run, size := opcode(r.b[at:])
			histogram[value] += run
			at += size
		}
	}

	return estimate(&histogram)
}

// Estimate returns the estimate from the number of registers with each value.
func Estimate(histogram *[MaxRank + 1]int) int64 {
	var wide [64]int
	copy(wide[:], histogram[:])

	return estimate(&wide)
}

// estimate returns the estimate from the number of registers with each value: Ertl, "New cardinality estimation
// algorithms for HyperLogLog sketches" (2017), algorithm 6.
func estimate(histogram *[64]int) int64 {
	const m = float64(registers)
	const alpha = 0.721347520444481703680 // 1 / (2 ln 2)
	z := m * tau((m-float64(histogram[rankBits+1]))/m)
	for value := rankBits; value >= 1; value-- {
		z = (z + float64(histogram[value])) * 0.5
	}
	z += m * sigma(float64(histogram[0])/m)

	return int64(math.Round(alpha * m * m / z))
}

func sigma(x float64) float64 {
	// No register is set; the sum below is infinite then.
	if x == 1 {
		return math.Inf(1)
	}

	y, z := 1.0, x
	// Until the floating-point number changes no more; NaN differs from everything, so there is a first round.
	for before := math.NaN(); before != z; {
		x *= x
		before = z
		z += x * y
		y += y
	}

	return z
}

func tau(x float64) float64 {
	if x == 0 || x == 1 {
		return 0
	}

	y, z := 1.0, 1-x
	for before := math.NaN(); before != z; {
		x = math.Sqrt(x)
		before = z
		y *= 0.5
		z -= (1 - x) * (1 - x) * y
	}

	return z / 3
}

// Merge adds all members of o: each register becomes the greater of both.
func (r *Registers) Merge(o Registers) {
	if o.Empty() {
		return
	}

	// A byte for each register makes one way of four: dense or sparse, into dense or sparse.
	var u Union
	u.Merge(*r)
	u.Merge(o)
	r.b = u.encode(r.b)
}

// Each calls each with the registers that are not 0.
func (r *Registers) Each(each func(index int, rank uint8)) {
	var u Union
	u.Merge(*r)
	for index, rank := range u.values {
		if rank > 0 {
			each(index, rank)
		}
	}
}

// Union is the union of many sets, with a byte for each register. The zero Union is empty.
type Union struct{ values [registers]uint8 }

// Merge adds all members of r.
func (u *Union) Merge(r Registers) {
	switch {
	case r.Empty():
		return
	case r.b[4] == denseForm:
		b := r.b[head:]
		for i := 0; i < registers; i, b = i+4, b[3:] {
			u.values[i] = max(u.values[i], b[0]&63)
			u.values[i+1] = max(u.values[i+1], (b[0]>>6|b[1]<<2)&63)
			u.values[i+2] = max(u.values[i+2], (b[1]>>4|b[2]<<4)&63)
			u.values[i+3] = max(u.values[i+3], b[2]>>2)
		}
	default:
		i := 0
		for at := head; at < len(r.b); {
			value, run, size := opcode(r.b[at:])
			// Most of a sparse set are zeros, which raise nothing.
			if value > 0 {
				for j := i; j < i+run; j++ {
					u.values[j] = max(u.values[j], value)
				}
			}
			i += run
			at += size
		}
	}
}

// Raise raises one register to at least rank.
func (u *Union) Raise(index int, rank uint8) { u.values[index] = max(u.values[index], rank) }

// Count returns the estimate of the union.
func (u *Union) Count() int64 {
	var histogram [64]int
	for _, v := range u.values {
		histogram[v]++
	}

	return estimate(&histogram)
}

// Registers returns the registers of the union.
func (u *Union) Registers() Registers { return Registers{u.encode(nil)} }

// encode returns registers as bytes, in the sparse form if they fit. It may reuse the memory of old.
func (u *Union) encode(old []byte) []byte {
	// At most the capacity that the sparse form needs, so that it does not keep the memory of a dense one.
	b := append(old[:0:min(cap(old), head+sparseMost)], "HYLL\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80"...)
	for i := 0; i < registers; {
		value := u.values[i]
		// One opcode more must fit; and the sparse form has no greater values.
		if value > valueMost || len(b)+2 > head+sparseMost {
			return u.dense()
		}

		most := longMost
		if value > 0 {
			most = valueRun
		}
		// The longest runs that the opcodes permit, as Redis makes them.
		run := 1
		for run < most && i+run < registers && u.values[i+run] == value {
			run++
		}

		switch {
		case value > 0:
			b = append(b, valueMark|(value-1)<<2|byte(run-1))
		case run <= zeroMost:
			b = append(b, byte(run-1))
		default:
			b = append(b, longMark|byte((run-1)>>8), byte(run-1))
		}
		i += run
	}

	return b
}

func (u *Union) dense() []byte {
	b := make([]byte, denseSize)
	copy(b, "HYLL")
	forget(b)

	// Four registers are three bytes.
	for i, at := 0, head; i < registers; i, at = i+4, at+3 {
		v := u.values[i : i+4]
		b[at] = v[0] | v[1]<<6
		b[at+1] = v[1]>>2 | v[2]<<4
		b[at+2] = v[2]>>4 | v[3]<<2
	}

	return b
}
