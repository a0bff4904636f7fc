package owner

import (
	"context"
	"encoding/binary"
	"time"

	"headcount/counter/limit"
	"headcount/internal/rows"
)

// limits is the collection of the states of limits.
const limits = "limits"

// limitsMost bounds the memory for the states of limits in one partition, which makes 192 MB for all. Beyond it new
// limits are refused: to forget a state instead would let more calls pass than its limit allows.
const limitsMost = 3 << 20

// limitName returns the name of the row of a limit's state.
func limitName(n limit.Name) rows.Name {
	field := binary.AppendVarint([]byte{byte(n.Algorithm)}, n.Window)

	return rows.Name{Collection: limits, Field: string(field) + n.Key}
}

// limitOf returns the limit whose state is in the row with that field.
func limitOf(field string) limit.Name {
	r := reader{rest: []byte(field)}
	n := limit.Name{Algorithm: limit.Algorithm(r.byte()), Window: r.int()}
	n.Key = string(r.rest)

	return n
}

// ForgetLimit returns the call that deletes all states of a limit that a store has. Its error is
// counter.ErrUnavailable.
func ForgetLimit(ctx context.Context, store rows.Store, key string) (Call, error) {
	call := Call{Partition: rows.PartitionOf(key), More: &More{}}
	// Fields begin with the algorithm and the window, so the states of one key are scattered among all others.
	err := store.Scan(ctx, call.Partition, limits, "", func(field string, _ []byte) error {
		if limitOf(field).Key == key {
			gone := Expiring{Row: rows.Row{Name: rows.Name{Collection: limits, Field: field}}}
			call.More.Rows = append(call.More.Rows, gone)
		}

		return nil
	})
	if err != nil {
		return Call{}, unavailable("scan limits", err)
	}

	return call, nil
}

// limit judges a request to a limit.
func (d *draft) limit(request *limit.Request) limit.Answer {
	name := limitName(request.Name)
	row := d.get(name)
	state, err := limit.Parse(row)
	if err != nil {
		d.malformed = err
		return limit.Answer{}
	}

	// The owner's clock decides, so that the clocks of gateways need not agree.
	now := d.now.UnixMilli()
	isSetBack := state.SetBack(request.Name, now)
	answer := state.Take(*request, now)
	changes := request.Cost > 0 || request.Cost < 0 && row != nil // without a state, nothing can be given back
	// What is refused costs nothing, and looking writes no row. But a state that was set back ages from now on.
	if !isSetBack && (!answer.Allowed || !changes) {
		return answer
	}

	next := state.Append(nil)
	// Only a state that grows needs room.
	if d.near != nil && len(next) > len(row) && d.near.Size(d.p.id, limits) > limitsMost {
		d.full = true
		return limit.Answer{}
	}

	d.put(name, next)
	// Later requests postpone the expiry: a sweep looks at the state again before it deletes the row.
	if row == nil {
		d.expire(name, time.UnixMilli(state.End(request.Name)))
	}

	return answer
}
