package counter

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// SubCounters is over how many parts a hot sum is spread.
const SubCounters = 16

// Phase says where a hot sum is on its way to its parts and back.
type Phase byte

// The phases. Stores keep them: they never change.
const (
	Whole   Phase = 0   // it was never spread
	Opening Phase = 'o' // its parts are being opened; nobody adds to them yet
	Open    Phase = 's' // it is spread
	Closing Phase = 'c' // its parts are being closed; what was added to them is theirs until it is folded
	Folded  Phase = 'f' // it is whole again; the epoch stays, so that it is never used again
)

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

// Part is what one part of a hot sum has gained in its epoch, and by how many changes.
// Of two readings of one part the one with the greater Sequence is newer.
type Part struct {
	Value    int64
	Sequence uint64
}

// Spread is what the record of a sum says of its parts. The zero Spread is that of a
// sum that was never spread.
type Spread struct {
	Epoch Epoch
	Phase Phase
	Parts [SubCounters]Part // what of each part is in the sum already
}

// Active reports whether parts may have what the sum's record has not.
func (s *Spread) Active() bool { return s.Phase != Whole && s.Phase != Folded }

// spreadNow is Active of the text that ParseSpread reads.
func spreadNow(text string) bool {
	return text != "" && !strings.HasSuffix(text, ":"+string(rune(Folded)))
}

// ParseSpread reads the text of a State's Spread, as counter_apply.lua writes it:
// "epoch:phase:value/sequence,…"; parts that are not there have gained nothing.
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
	s.Phase = Phase(f[1][0])
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
		s.Parts[i] = Part{v, n}
	}
	return s, nil
}

// With is c, whose record has s, with all that its parts have gained beyond that. It changes
// neither s nor parts; parts are of the epoch of s.
func (s *Spread) With(c Counter, parts *[SubCounters]Part) Counter {
	if !s.Active() {
		return c
	}
	for i := range parts {
		// A part that is behind has lost its memory: what is in the sum of it stays there.
		if p, has := parts[i], s.Parts[i]; p.Sequence > has.Sequence {
			c.Value += p.Value - has.Value
			c.Version.Sequence += p.Sequence - has.Sequence
		}
	}
	return c
}

// SpreadStep is a step of a hot sum on its way to its parts and back. A step that comes late,
// or a second time, changes nothing.
type SpreadStep struct {
	To    SpreadTo
	Epoch Epoch // of all but ToOpening
	// Of ToGather and ToFolded: all parts, of the latter as they were closed, and when the newest of them changed.
	Parts   []Part
	Updated time.Time
}

// SpreadTo says what a SpreadStep is.
type SpreadTo string

// The steps, in their order. Package hot has what lies between them.
const (
	ToOpening SpreadTo = "open"   // the next epoch begins, unless the sum is spread
	ToOpen    SpreadTo = "spread" // all parts are open
	ToGather  SpreadTo = "gather" // what parts have gained goes to the sum
	ToClosing SpreadTo = "close"
	ToFolded  SpreadTo = "fold" // the last gathering; all parts are closed
	ToForget  SpreadTo = "forget"
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
