package owner

import (
	"encoding/binary"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// Ledger entries are stored in rows of 64: entry n is in row (n-1)/64.
const ledgerRow = 64

func ledgerCollection(h *head) string {
	return "ledger:" + strconv.FormatUint(h.life, 36) + ":" + h.key
}

// ledgerName returns the name of the row that has entry seq.
func ledgerName(h *head, seq uint64) rows.Name {
	return rows.Name{Collection: ledgerCollection(h), Field: strconv.FormatUint((seq-1)/ledgerRow, 10)}
}

// Enter implements counter.Tx.
func (d *draft) Enter(key string, e counter.Entry, kept time.Duration) {
	// The entry is appended to a copy of its row, which is made only once per commit.
	name := ledgerName(d.head(key), e.Seq)
	d.put(name, appendEntry(d.own(name), &e))

	// The last entry of a row expires last, and the row with it.
	if e.Seq%ledgerRow == 0 && kept > 0 {
		d.expire(name, e.At.Add(kept))
	}
}

func appendEntry(b []byte, e *counter.Entry) []byte {
	b = append(b, byte(e.Op))
	b = binary.AppendVarint(b, e.At.UnixMilli())
	b = binary.AppendVarint(b, e.Before)
	b = binary.AppendVarint(b, e.Delta)
	b = appendBytes(b, e.Reason)

	return appendBytes(b, e.By)
}

// entries decodes a row of a ledger whose first entry has that Seq. An entry without an operation is a placeholder for
// one that had expired before an import.
func (r *reader) entries(seq uint64) []counter.Entry {
	var all []counter.Entry
	for ; len(r.rest) > 0; seq++ {
		e := counter.Entry{Seq: seq}
		e.Op = counter.LedgerOp(r.byte())
		e.At = time.UnixMilli(r.int()).UTC()
		e.Before = r.int()
		e.Delta = r.int()
		e.After = e.Before + e.Delta
		e.Reason = string(r.bytes())
		e.By = string(r.bytes())
		if e.Op != 0 {
			all = append(all, e)
		}
	}

	return all
}
