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

// Epoch is the time from a split of a sum to its merge. Later epochs are greater.
type Epoch struct{ Incarnation, Number uint64 }

// String returns the form that stores keep.
func (e Epoch) String() string {
	return strconv.FormatUint(e.Incarnation, 10) + "." + strconv.FormatUint(e.Number, 10)
}

// ParseEpoch parses what String returned.
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

// Shard is the increment of one shard of a sum in an epoch, and the number of additions to it. Of two readings in one
// epoch the one with the greater Sequence is newer. A shard that does not exist is the zero Shard.
type Shard struct {
	Epoch    Epoch
	Value    int64
	Sequence uint64
	Updated  time.Time // last change
}

// Sharding is the part of a sum's record about its shards. The zero Sharding is that of a sum that was never sharded.
type Sharding struct {
	Epoch  Epoch
	Active bool          // false: the sum is merged; it keeps its epoch, so that none is used twice
	Shards [Shards]Shard // what the record contains of each shard: value and sequence
}

// sharded returns Sharding.Active for the text that ParseSharding parses.
func sharded(text string) bool { return text != "" && !strings.HasSuffix(text, ":f") }

// ended returns the text of a sharding, or nil, after its merge. So the next split begins a later epoch, in which old
// shards do not count.
func ended(text *string) *string {
	if text == nil {
		return nil
	}
	epoch, _, _ := strings.Cut(*text, ":")
	epoch += ":f"
	return &epoch
}

// ParseSharding parses the text of a State's Sharding, as counter_apply.lua writes it: "epoch:s:value/sequence,…" for a
// sharded sum, and "epoch:f" for one that is merged. A record contains nothing of the shards that are missing in the
// text. Instead of s, older releases wrote o or c while the sum was split or merged.
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

// With returns c, whose record has s, with everything that its shards have in the epoch of s beyond the record.
func (s *Sharding) With(c Counter, shards *[Shards]Shard) Counter {
	if !s.Active {
		return c
	}
	for i := range shards {
		// A shard that is behind the record has lost data: the record keeps what it has of the shard.
		if p, has := &shards[i], &s.Shards[i]; p.Epoch == s.Epoch && p.Sequence > has.Sequence {
			c.Value += p.Value - has.Value
			c.Version.Sequence += p.Sequence - has.Sequence
			if p.Updated.After(c.Updated) {
				c.Updated = p.Updated
			}
		}
	}
	if c.Version.Sequence == 0 { // deleted in another region, and nothing was added to its shards since
		return Counter{Key: c.Key}
	}
	return c
}

// ReshardStep is a change of a record about its shards. A step that is late or repeated changes nothing.
type ReshardStep struct {
	To     ReshardTo
	Epoch  Epoch   // of all but ToSplit
	Shards []Shard // of ToGather and ToMerge: all shards, of the latter as they were closed
}

// ReshardTo is the kind of a ReshardStep.
type ReshardTo string

// The kinds. Package hot explains them.
const (
	ToSplit  ReshardTo = "split"  // the next epoch begins, unless the sum is sharded
	ToGather ReshardTo = "gather" // the record takes the increments of the shards
	ToMerge  ReshardTo = "merge"  // the last gathering; all shards are closed
)

// AppendRest appends the part of a state that stores keep as one text: the slots, then the sharding.
func (s *State) AppendRest(b []byte) []byte {
	b = s.Slots.Append(b)
	if s.Sharding != nil {
		b = append(b, " *"...)
		b = append(b, *s.Sharding...)
	}
	return b
}

// ParseRest parses what AppendRest appended.
func (s *State) ParseRest(text string) (err error) {
	slots, sharded, is := strings.Cut(text, "*")
	if is {
		s.Sharding = &sharded
	}
	s.Slots, err = ParseSlots(slots)
	return err
}
