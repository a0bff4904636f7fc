package owner

import (
	"strconv"
	"strings"

	"headcount/counter"
	"headcount/internal/rows"
)

// EncodeHead returns the row of an exact counter for partition Outside.
func EncodeHead(is counter.State) []byte {
	h := head{record: record{State: is, life: is.Version.Incarnation}}

	return h.append(nil)
}

// Outline is what one row says about a counter, for stores that also keep counters in tables for people to query.
type Outline struct {
	Key string
	// State has the counter, or the zero Version if it is deleted. It is nil in the outline of a ledger.
	State *counter.State
	// Life names the ledger of the counter; First and Last are the range of Seq that the row can have. If Entries is
	// empty, the entries of this range have been deleted.
	Life        uint64
	First, Last uint64
	Entries     []counter.Entry
}

// OutlineOf returns the outline of a row, or false for a row that has none. The error is ErrMalformed.
func OutlineOf(row *rows.Row) (is Outline, ok bool, err error) {
	if row.Collection == heads {
		h := head{key: row.Field}
		err := h.decode(row.Value)
		return Outline{Key: row.Field, State: &h.State}, true, err
	}

	of, isLedger := strings.CutPrefix(row.Collection, "ledger:")
	if !isLedger {
		return Outline{}, false, nil
	}

	// A life has no colon, but a key may have some.
	life, key, _ := strings.Cut(of, ":")
	is.Key = key
	is.Life, err = strconv.ParseUint(life, 36, 64)
	if err != nil {
		return Outline{}, false, ErrMalformed
	}
	segment, err := strconv.ParseUint(row.Field, 10, 64)
	if err != nil {
		return Outline{}, false, ErrMalformed
	}

	is.First = segment*ledgerRow + 1
	is.Last = is.First + ledgerRow - 1
	read := reader{rest: row.Value}
	is.Entries = read.entries(is.First)

	return is, true, read.end("a ledger")
}
