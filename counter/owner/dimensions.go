package owner

import (
	"encoding/binary"
	"strconv"

	"headcount/counter"
	"headcount/internal/rows"
)

// Each value of a dimension has a row with its count. The dimension itself has one more row: the number of values that
// have rows, and the total count of all other values.

func dimensionsOf(h *head) string {
	return "dimensions:" + strconv.FormatUint(h.life, 36) + ":" + h.key
}

// Count implements counter.Tx.
func (d *draft) Count(key, dimension, value string, delta int64) {
	// Beyond the maximum number of values, the remaining ones share one count, in the row of the dimension itself.
	h := d.head(key)
	h.parts |= hasDimensions // Judge also calls Changed, so the head is written
	collection := dimensionsOf(h)

	rest := rows.Name{Collection: collection, Field: dimension}
	name := rows.Name{Collection: collection, Field: dimension + "\x00" + value}

	is := d.get(name)
	all := reader{rest: d.get(rest)}
	values := all.uint()
	other := all.int()

	switch {
	case is != nil:
		// A value that has a row keeps it, also after the dimension has become full.
		one := reader{rest: is}
		d.put(name, binary.AppendVarint(nil, counter.Saturated(one.int(), delta)))
		return
	case values < counter.MaxValues:
		d.put(name, binary.AppendVarint(nil, delta))
		values++
	default:
		other = counter.Saturated(other, delta)
	}

	d.put(rest, binary.AppendVarint(binary.AppendUvarint(nil, values), other))
}
