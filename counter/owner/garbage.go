package owner

import (
	"strconv"
	"time"

	"headcount/internal/rows"
)

// Collections that belong to no counter any more, and rows that expire. Who owns the partition sweeps them.
const (
	garbage = "garbage"
	expiry  = "expiry:" // before a time in minutes
)

// discard has all rows of a collection deleted, some time later.
func (d *draft) discard(collection string) {
	d.put(rows.Name{Collection: garbage, Field: collection}, []byte{1})
}

// expire has a row deleted at some time after a moment.
func (d *draft) expire(name rows.Name, after time.Time) {
	row := Expiry(name, after)
	d.put(row.Name, row.Value)
}

// Expiry returns the row that has another row of its partition deleted at some time after a moment.
func Expiry(name rows.Name, after time.Time) rows.Row {
	minute := after.Unix()/60 + 1
	at := rows.Name{Collection: expiry + strconv.FormatInt(minute, 10), Field: joinName(name)}

	return rows.Row{Name: at, Value: []byte{1}}
}

// joinName returns a name as one text.
func joinName(name rows.Name) string {
	return strconv.Itoa(len(name.Collection)) + " " + name.Collection + name.Field
}
