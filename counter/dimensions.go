package counter

import (
	"cmp"
	"maps"
	"slices"
	"strconv"

	"headcount/presence"
)

// MaxValues is how many values of one dimension of a counter have a count each. Later values share one count.
const MaxValues = 1000

// Counted has the counts of one dimension of a counter. The zero Counted is empty.
type Counted struct {
	Values map[string]int64 // at most MaxValues
	Other  int64            // of all further values
}

// Add adds delta to the count of value. The empty value stands for those beyond MaxValues.
func (c *Counted) Add(value string, delta int64) {
	count, isKnown := c.Values[value]
	isBeyond := value == "" || !isKnown && len(c.Values) >= MaxValues
	if isBeyond {
		c.Other = Saturated(c.Other, delta)
		return
	}

	// The zero Counted has no map, as most counters have no dimensions.
	if c.Values == nil {
		c.Values = map[string]int64{}
	}
	c.Values[value] = Saturated(count, delta)
}

// Clone returns a deep copy.
func (c *Counted) Clone() Counted { return Counted{maps.Clone(c.Values), c.Other} }

// AppendJSON appends the form that clients see, with the n values of the greatest counts; "other" has the rest:
// {"key":"views:1","dimension":"country","values":[{"value":"de","count":12}],"other":3}.
func (c Counted) AppendJSON(b []byte, key, name string, n int) []byte {
	names := slices.SortedFunc(maps.Keys(c.Values), func(x, y string) int {
		// Equal counts are in the order of their names, so that repeated answers are equal.
		return cmp.Or(cmp.Compare(c.Values[y], c.Values[x]), cmp.Compare(x, y))
	})
	other := c.Other
	// What is not listed is counted as other, so that all numbers together are everything that was counted.
	for len(names) > n {
		last := len(names) - 1
		other = Saturated(other, c.Values[names[last]])
		names = names[:last]
	}

	b = append(b, `{"key":`...)
	b = presence.AppendString(b, presence.KeyOf(key))
	b = append(b, `,"dimension":`...)
	b = presence.AppendString(b, name)

	b = append(b, `,"values":[`...)
	for i, value := range names {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"value":`...)
		b = appendText(b, value)
		b = append(b, `,"count":`...)
		b = strconv.AppendInt(b, c.Values[value], 10)
		b = append(b, '}')
	}

	b = append(b, `],"other":`...)
	b = strconv.AppendInt(b, other, 10)

	return append(b, '}')
}

// count counts an addition in the dimensions of a sum: each value that the change names grows by the delta, too.
func count(tx Tx, s *State, c *Change) {
	if !s.Kind.Gains() || c.Verb != Add {
		return
	}

	for _, d := range c.Dimensions {
		tx.Count(c.Key, d.Name, d.Value, c.Delta)
	}
}
