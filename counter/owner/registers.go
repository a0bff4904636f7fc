package owner

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
	"headcount/internal/rows"
)

// The registers of a set are in one row while few of them are set, and later in 16 rows of 1,024 each. So a new member
// writes a row of at most 1 KB instead of all 12 KB. The first byte of a row is its form.
const (
	// aloneForm: three bytes, register and rank, for each register that is not 0. It is the only row of the set.
	aloneForm = 'a'
	// sparseForm: two bytes for each register that is not 0, with its index within the row.
	sparseForm = 's'
	// denseForm: six bits for each register of the row.
	denseForm = 'd'
)

const (
	registerRows   = 16
	registersOfRow = hyperloglog.Size / registerRows
	aloneMost      = 340 // maximum number of registers in aloneForm
	sparseMost     = 127 // maximum number of registers in sparseForm
	rankBits       = 6
	rankMask       = 1<<rankBits - 1
	denseSize      = registersOfRow * rankBits / 8
)

// ranks has the number of registers with each rank, which is enough to estimate the cardinality.
type ranks [hyperloglog.MaxRank + 1]uint16

// registers are the registers of one set within a draft.
type registers struct {
	d          *draft
	collection string
	prefix     string    // prefix of the field names
	until      time.Time // when the rows expire; zero: never
	counts     bool      // the caller needs the ranks if the registers are in several rows
	ranks      *ranks    // nil while all registers are in one row
}

func (r *registers) name(row int) rows.Name {
	return rows.Name{Collection: r.collection, Field: r.prefix + strconv.FormatInt(int64(row), registerRows)}
}

// add adds members, and reports whether a register changed.
func (r *registers) add(members []string) bool {
	changed := false
	for _, member := range members {
		index, rank := hyperloglog.Place(member)
		if r.raise(index, rank) {
			changed = true
		}
	}

	return changed
}

// raise raises a register to at least rank.
func (r *registers) raise(index int, rank uint8) bool {
	// Registers that were imported, or that another region sent, may have ranks that would index beyond the array of
	// ranks.
	rank = min(rank, hyperloglog.MaxRank)
	// Only registers in several rows have ranks.
	if r.ranks != nil {
		return r.raiseInRow(index, rank)
	}

	// Only the form of the first row tells whether there are several.
	first := r.get(0)
	if isOneOfMany(first) {
		return r.raiseInRow(index, rank)
	}

	at := findAlone(first, index)
	if at >= 0 && first[at+2]&rankMask >= rank {
		return false
	}

	first = r.own(0, aloneForm)
	if at < 0 {
		at = len(first)
		first = append(first, 0, 0, 0)
	}
	putAlone(first[at:], index, rank)
	r.d.put(r.name(0), first)

	if len(first) > 1+3*aloneMost {
		r.split(first)
	}

	return true
}

// get returns a row, or nil if its contents are not valid registers.
func (r *registers) get(row int) []byte {
	b := r.d.get(r.name(row))
	if err := checkRow(b); err != nil {
		r.d.malformed = err
		return nil
	}

	return b
}

// own returns a row that may be modified. A new row gets a form, and expires with the others.
func (r *registers) own(row int, form byte) []byte {
	name := r.name(row)
	b := r.d.own(name)
	if b != nil {
		return b
	}
	if !r.until.IsZero() {
		r.d.expire(name, r.until)
	}

	return []byte{form}
}

// split distributes the registers of the only row over 16 rows.
func (r *registers) split(alone []byte) {
	// Only a counter's own registers have ranks. Time buckets are always read as a whole.
	if r.counts {
		r.ranks = &ranks{0: hyperloglog.Size}
	}

	// The first row marks the change of form, even if it has no register.
	r.d.put(r.name(0), []byte{sparseForm})
	for at := 1; at < len(alone); at += 3 {
		r.raiseInRow(getAlone(alone[at:]))
	}
}

// raiseInRow raises a register in one of 16 rows to at least rank.
func (r *registers) raiseInRow(index int, rank uint8) bool {
	row, at := index/registersOfRow, index%registersOfRow
	before := rankIn(r.get(row), at)
	if before >= rank {
		return false
	}

	b := r.own(row, sparseForm)
	// Only a register that was 0 makes the row longer.
	if b[0] == sparseForm && before == 0 && len(b) > 2*sparseMost {
		b = dense(b)
	}
	r.d.put(r.name(row), putRank(b, at, rank))
	// The ranks of all rows are in the head, so that Count needs no reads of the other rows.
	if r.ranks != nil {
		r.ranks[before]--
		r.ranks[rank]++
	}

	return true
}

// isOneOfMany reports whether the first row of a set shows that there are others.
func isOneOfMany(first []byte) bool { return len(first) > 0 && first[0] != aloneForm }

// findAlone returns the offset of a register in aloneForm, or -1.
func findAlone(b []byte, index int) int {
	for at := 1; at+3 <= len(b); at += 3 {
		is, _ := getAlone(b[at:])
		if is == index {
			return at
		}
	}

	return -1
}

func getAlone(b []byte) (index int, rank uint8) {
	n := int(b[0])<<16 | int(b[1])<<8 | int(b[2])

	// A row that another program wrote may have a rank that would index beyond the array of ranks.
	return n >> rankBits % hyperloglog.Size, min(uint8(n&rankMask), hyperloglog.MaxRank)
}

func putAlone(b []byte, index int, rank uint8) {
	n := index<<rankBits | int(rank)
	b[0] = byte(n >> 16)
	b[1] = byte(n >> 8)
	b[2] = byte(n)
}

// findSparse returns the offset of a register in sparseForm, or -1.
func findSparse(b []byte, at int) int {
	for i := 1; i+2 <= len(b); i += 2 {
		if int(binary.BigEndian.Uint16(b[i:])>>rankBits) == at {
			return i
		}
	}

	return -1
}

// rankIn returns the rank of a register in a row.
func rankIn(b []byte, at int) uint8 {
	if len(b) == 0 {
		return 0
	}
	if b[0] == denseForm {
		shift := at * rankBits % 8
		return uint8(denseWord(b, at)>>shift) & rankMask
	}

	i := findSparse(b, at)
	if i < 0 {
		return 0
	}

	return b[i+1] & rankMask
}

// putRank sets a register of a row in place, and returns the row, which may have grown.
func putRank(b []byte, at int, rank uint8) []byte {
	if b[0] == denseForm {
		shift := at * rankBits % 8
		word := denseWord(b, at)&^(rankMask<<shift) | uint16(rank)<<shift
		first := 1 + at*rankBits/8
		// A rank may lie in two bytes, so both are written.
		b[first] = byte(word)
		b[first+1] = byte(word >> 8)
		return b
	}

	word := uint16(at)<<rankBits | uint16(rank)
	i := findSparse(b, at)
	if i < 0 {
		return binary.BigEndian.AppendUint16(b, word)
	}
	binary.BigEndian.PutUint16(b[i:], word)

	return b
}

// denseWord returns the two bytes of a row in denseForm that contain a register.
func denseWord(b []byte, at int) uint16 {
	first := 1 + at*rankBits/8

	return uint16(b[first]) | uint16(b[first+1])<<8
}

// dense converts a row to denseForm. It has one byte more than the registers need, so that denseWord can always read
// two.
func dense(sparse []byte) []byte {
	b := make([]byte, 1+denseSize+1)
	b[0] = denseForm
	for i := 1; i+2 <= len(sparse); i += 2 {
		word := binary.BigEndian.Uint16(sparse[i:])
		putRank(b, int(word>>rankBits), uint8(word&rankMask))
	}

	return b
}

// checkRow returns why a row is not one of registers, or nil.
func checkRow(b []byte) error {
	if len(b) == 0 {
		return nil
	}

	valid := false
	size := len(b) - 1
	switch b[0] {
	case aloneForm:
		valid = size%3 == 0
	case sparseForm:
		valid = size%2 == 0
	case denseForm:
		// One byte more than the ranks need, so that the last one, too, is read with the byte after it.
		valid = size == denseSize+1
	}
	if !valid {
		return fmt.Errorf("%w: %d bytes of registers in form %d", ErrMalformed, len(b), b[0])
	}

	return nil
}

// mergeRow adds the registers of one row of a set to a union.
func mergeRow(into *hyperloglog.Union, row int, b []byte) error {
	err := checkRow(b)
	if err != nil || len(b) == 0 {
		return err
	}

	first := row * registersOfRow
	switch b[0] {
	case aloneForm:
		for at := 1; at < len(b); at += 3 {
			into.Raise(getAlone(b[at:]))
		}
	case sparseForm:
		for at := 1; at < len(b); at += 2 {
			word := binary.BigEndian.Uint16(b[at:])
			// The remainder keeps a malformed index within the row.
			into.Raise(first+int(word>>rankBits)%registersOfRow, uint8(word&rankMask))
		}
	default:
		for at := range registersOfRow {
			into.Raise(first+at, rankIn(b, at))
		}
	}

	return nil
}

// unique is a counter of kind unique within a draft.
type unique struct {
	d *draft
	h *head
}

// Registers implements counter.Tx.
func (d *draft) Registers(key string) counter.Registers { return unique(d.set(key)) }

// Add implements counter.Registers.
func (u unique) Add(members ...string) bool {
	r := registers{d: u.d, collection: setCollection(u.h), ranks: u.h.ranks, counts: true}
	changed := r.add(members)
	if changed {
		u.h.parts |= hasSet // Judge also calls Changed, so the head is written
		u.h.ranks = r.ranks
	}

	return changed
}

// Count implements counter.Registers.
func (u unique) Count() int64 {
	var histogram [hyperloglog.MaxRank + 1]int
	if u.h.ranks != nil {
		for rank, n := range u.h.ranks {
			histogram[rank] = int(n)
		}
		return hyperloglog.Estimate(&histogram)
	}

	// A single row is so small that its ranks are counted when needed.
	r := registers{d: u.d, collection: setCollection(u.h)}
	alone := r.get(0)
	histogram[0] = hyperloglog.Size
	for at := 1; at+3 <= len(alone); at += 3 {
		_, rank := getAlone(alone[at:])
		histogram[0]--
		histogram[rank]++
	}

	return hyperloglog.Estimate(&histogram)
}

// append appends the non-zero entries of the ranks; nothing for nil.
func (r *ranks) append(b []byte) []byte {
	if r == nil {
		return b
	}

	for rank, n := range r {
		if n > 0 {
			b = append(b, byte(rank))
			b = binary.AppendUvarint(b, uint64(n))
		}
	}

	return b
}

// ranks reads what append wrote, to the end.
func (r *reader) ranks() *ranks {
	if len(r.rest) == 0 {
		return nil
	}

	var all ranks
	for len(r.rest) > 0 {
		rank := r.byte()
		n := r.uint()
		// A row that another program wrote must not index beyond the array.
		if int(rank) >= len(all) || n > hyperloglog.Size {
			r.fail()
			return nil
		}
		all[rank] = uint16(n)
	}

	return &all
}
