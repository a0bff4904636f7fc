package counter

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Shards is how many shards a sharded sum has.
const Shards = 16

// Epoch stands for one time between a split of a sum and its merge. Later ones are greater.
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

// Shard is what one shard of a sum has gained in an epoch, and by how many changes. Of two readings in one
// epoch the one with the greater Sequence is newer. One that is not there is zero.
type Shard struct {
	Epoch    Epoch
	Value    int64
	Sequence uint64
	Updated  time.Time // last change
}

// Sharding is what the record of a sum says of its shards. The zero Sharding is that of a
// sum that was never sharded.
type Sharding struct {
	Epoch  Epoch
	Active bool          // false: it is whole again; its epoch stays, so that none is used twice
	Shards [Shards]Shard // the value and the sequence of each shard that are in the sum already
}

// sharded is Active of the text that ParseSharding reads.
func sharded(text string) bool { return text != "" && !strings.HasSuffix(text, ":f") }

// ParseSharding reads the text of a State's Sharding, as counter_apply.lua writes it:
// "epoch:s:value/sequence,…" of a sum that is sharded, and "epoch:f" of one that is whole again. Shards that are not there
// have gained nothing. Instead of s, releases before this one wrote o or c while the sum was split or merged.
func ParseSharding(text string) (s Sharding, err error) {
	if text == "" {
		return s, nil
	}
	f := strings.SplitN(text, ":", 3)
	if len(f) < 2 || len(f[1]) != 1 {
		return s, fmt.Errorf("sharded %q", text)
	}
	if s.Epoch, err = ParseEpoch(f[0]); err != nil {
		return Sharding{}, err
	}
	s.Active = sharded(text)
	if len(f) < 3 {
		return s, nil
	}
	for i, shard := range strings.Split(f[2], ",") {
		value, sequence, _ := strings.Cut(shard, "/")
		v, err := strconv.ParseInt(value, 10, 64)
		n, err1 := strconv.ParseUint(sequence, 10, 64)
		if err := errors.Join(err, err1); err != nil || i == Shards {
			return Sharding{}, fmt.Errorf("sharded %q: %w", text, err)
		}
		s.Shards[i] = Shard{Value: v, Sequence: n}
	}
	return s, nil
}

// With is c, whose record has s, with all that its shards have gained beyond that in the epoch of s.
func (s *Sharding) With(c Counter, shards *[Shards]Shard) Counter {
	if !s.Active {
		return c
	}
	for i := range shards {
		// A shard that is behind has lost its memory: what is in the sum of it stays there.
		if p, has := &shards[i], &s.Shards[i]; p.Epoch == s.Epoch && p.Sequence > has.Sequence {
			c.Value += p.Value - has.Value
			c.Version.Sequence += p.Sequence - has.Sequence
			if p.Updated.After(c.Updated) {
				c.Updated = p.Updated
			}
		}
	}
	if c.Version.Sequence == 0 { // it was deleted in another region, and its shards have gained nothing since
		return Counter{Key: c.Key}
	}
	return c
}

// ReshardStep is a step of the record of a sharded sum. A step that comes late, or a second time, changes nothing.
type ReshardStep struct {
	To     ReshardTo
	Epoch  Epoch   // of all but ToSplit
	Shards []Shard // of ToGather and ToMerge: all shards, of the latter as they were closed
}

// ReshardTo says what a ReshardStep is.
type ReshardTo string

// The steps. Package hot has what lies between them.
const (
	ToSplit  ReshardTo = "split"  // the next epoch begins, unless the sum is sharded
	ToGather ReshardTo = "gather" // what shards have gained goes to the sum
	ToMerge  ReshardTo = "merge"  // the last gathering; all shards are closed
)

// AppendRest appends the part of a state that stores keep as one text: the slots, then how
// it is sharded.
func (s *State) AppendRest(b []byte) []byte {
	b = s.Slots.Append(b)
	if s.Sharding != nil {
		b = append(b, " *"...)
		b = append(b, *s.Sharding...)
	}
	return b
}

// ParseRest reads what AppendRest wrote.
func (s *State) ParseRest(text string) (err error) {
	slots, sharded, is := strings.Cut(text, "*")
	if is {
		s.Sharding = &sharded
	}
	s.Slots, err = ParseSlots(slots)
	return err
}
