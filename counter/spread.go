package counter

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// SubCounters is over how many parts a hot sum is spread.
const SubCounters = 16

// Epoch is one time of a sum's being spread. Later ones are greater.
type Epoch struct{ Incarnation, Number uint64 }

// String is how stores keep it.
func (e Epoch) String() string {
	return strconv.FormatUint(e.Incarnation, 10) + "." + strconv.FormatUint(e.Number, 10)
}

// ParseEpoch reads what String wrote.
func ParseEpoch(text string) (Epoch, error) {
	incarnation, number, _ := strings.Cut(text, ".")
	i, err := strconv.ParseUint(incarnation, 10, 64)
	n, err1 := strconv.ParseUint(number, 10, 64)
	if err := errors.Join(err, err1); err != nil {
		return Epoch{}, fmt.Errorf("epoch %q: %w", text, err)
	}
	return Epoch{i, n}, nil
}

// Compare returns -1, 0 or 1 as e is before, is or is after other.
func (e Epoch) Compare(other Epoch) int {
	return cmp.Or(cmp.Compare(e.Incarnation, other.Incarnation), cmp.Compare(e.Number, other.Number))
}

// Part is what one part of a hot sum has gained in an epoch, and by how many changes. Of two readings in one
// epoch the one with the greater Sequence is newer. One that is not there is zero.
type Part struct {
	Epoch    Epoch
	Value    int64
	Sequence uint64
	Updated  time.Time // last change
}

// Spread is what the record of a sum says of its parts. The zero Spread is that of a
// sum that was never spread.
type Spread struct {
	Epoch  Epoch
	Active bool              // false: it is whole again; its epoch stays, so that none is used twice
	Parts  [SubCounters]Part // the value and the sequence of each part that are in the sum already
}

// spreadNow is Active of the text that ParseSpread reads.
func spreadNow(text string) bool { return text != "" && !strings.HasSuffix(text, ":f") }

// ParseSpread reads the text of a State's Spread, as counter_apply.lua writes it:
// "epoch:s:value/sequence,…" of a sum that is spread, and "epoch:f" of one that is whole again. Parts that are not there
// have gained nothing. Instead of s, releases before this one wrote o or c on the way to the parts and back.
func ParseSpread(text string) (s Spread, err error) {
	if text == "" {
		return s, nil
	}
	f := strings.SplitN(text, ":", 3)
	if len(f) < 2 || len(f[1]) != 1 {
		return s, fmt.Errorf("spread %q", text)
	}
	if s.Epoch, err = ParseEpoch(f[0]); err != nil {
		return Spread{}, err
	}
	s.Active = spreadNow(text)
	if len(f) < 3 {
		return s, nil
	}
	for i, part := range strings.Split(f[2], ",") {
		value, sequence, _ := strings.Cut(part, "/")
		v, err := strconv.ParseInt(value, 10, 64)
		n, err1 := strconv.ParseUint(sequence, 10, 64)
		if err := errors.Join(err, err1); err != nil || i == SubCounters {
			return Spread{}, fmt.Errorf("spread %q: %w", text, err)
		}
		s.Parts[i] = Part{Value: v, Sequence: n}
	}
	return s, nil
}

// With is c, whose record has s, with all that its parts have gained beyond that in the epoch of s.
func (s *Spread) With(c Counter, parts *[SubCounters]Part) Counter {
	if !s.Active {
		return c
	}
	for i := range parts {
		// A part that is behind has lost its memory: what is in the sum of it stays there.
		if p, has := &parts[i], &s.Parts[i]; p.Epoch == s.Epoch && p.Sequence > has.Sequence {
			c.Value += p.Value - has.Value
			c.Version.Sequence += p.Sequence - has.Sequence
			if p.Updated.After(c.Updated) {
				c.Updated = p.Updated
			}
		}
	}
	if c.Version.Sequence == 0 { // it was deleted in another region, and its parts have gained nothing since
		return Counter{Key: c.Key}
	}
	return c
}

// SpreadStep is a step of the record of a hot sum. A step that comes late, or a second time, changes nothing.
type SpreadStep struct {
	To    SpreadTo
	Epoch Epoch  // of all but ToSpread
	Parts []Part // of ToGather and ToFold: all parts, of the latter as they were closed
}

// SpreadTo says what a SpreadStep is.
type SpreadTo string

// The steps. Package hot has what lies between them.
const (
	ToSpread SpreadTo = "spread" // the next epoch begins, unless the sum is spread
	ToGather SpreadTo = "gather" // what parts have gained goes to the sum
	ToFold   SpreadTo = "fold"   // the last gathering; all parts are closed
)

// AppendRest appends the part of a state that stores keep as one text: the slots, then how
// it is spread.
func (s *State) AppendRest(b []byte) []byte {
	b = s.Slots.Append(b)
	if s.Spread != nil {
		b = append(b, " *"...)
		b = append(b, *s.Spread...)
	}
	return b
}

// ParseRest reads what AppendRest wrote.
func (s *State) ParseRest(text string) (err error) {
	slots, spread, is := strings.Cut(text, "*")
	if is {
		s.Spread = &spread
	}
	s.Slots, err = ParseSlots(slots)
	return err
}
