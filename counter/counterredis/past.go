package counterredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file reads ledgers, histories and dimensions. In front of PostgreSQL, Redis has only what may not be persisted.

// partCall returns a run of a script that reads a part of a counter in bucket b.
func partCall(script scripts.Name, b int, front bool, keys []string, args ...any) *redisconn.Call {
	of := []string{countersKey(b)}
	if front {
		of = bucketKeys(b, true)[:4]
	}
	return &redisconn.Call{Script: script, Keys: append(of, keys...), Args: args}
}

// parsePart parses the beginning of a reply with n values: the counter's record, and whether PostgreSQL has nothing of
// it. resident is false if PostgreSQL has everything, or the counter does not exist.
func parsePart(key string, reply any, n int) (row []any, st counter.State, resident, alone bool, err error) {
	if reply == lostReply {
		return nil, st, false, false, ErrLost
	}
	row, _ = reply.([]any)
	if len(row) != n {
		return nil, st, false, false, errReplied()
	}
	state, _ := row[0].(string)
	if _, st, err = parseState(key, state); err != nil {
		err = fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return row, st, state != "", row[1] == int64(1), err
}

// LedgerResident returns the entries that may not be persisted. alone means that PostgreSQL has no others.
func (s *Store) LedgerResident(ctx context.Context, key string, after uint64, limit int) (entries []counter.Entry, alone bool, err error) {
	return s.ledger(ctx, located{key, s.bucketOf(key)}, s.inFront(), after, limit)
}

func (s *Store) ledger(ctx context.Context, in located, front bool, after uint64, limit int) (entries []counter.Entry, alone bool, err error) {
	first := strconv.FormatUint(after+1, 10)
	cl := partCall(scripts.CounterLedger, in.bucket, front, []string{ledgerKey(in.bucket, in.key)}, in.key, first, limit)
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, false, err
	}
	row, _, resident, alone, err := parsePart(in.key, cl.Reply, 3)
	if err != nil || !resident {
		return nil, false, err
	}
	entries, err = parseEntries(row[2])
	return entries, alone, err
}

// Ledger implements counter.Reader.
func (s *Store) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	if after >= math.MaxInt64 {
		return counter.Ledger{}, nil
	}
	entries, _, err := s.LedgerResident(ctx, key, after, limit+1)
	if err != nil {
		return counter.Ledger{}, fmt.Errorf("counterredis: ledger of %q: %w", key, err)
	}
	return counter.Ledger{Entries: entries[:min(limit, len(entries))], More: len(entries) > limit}, nil
}

// parseEntries parses the reply of XRANGE in a script.
func parseEntries(reply any) ([]counter.Entry, error) {
	list, ok := reply.([]any)
	if !ok {
		return nil, errReplied()
	}
	var out []counter.Entry
	for _, v := range list {
		pair, _ := v.([]any)
		if len(pair) != 2 {
			return nil, errReplied()
		}
		id, _ := pair[0].(string)
		fields := map[string]string{}
		for name, text := range pairs(pair[1]) {
			fields[name] = text
		}
		e, err := parseEntry(id, fields)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, e)
	}
	return out, nil
}

// parseEntry parses a ledger entry that counter_apply.lua wrote.
func parseEntry(id string, fields map[string]string) (counter.Entry, error) {
	seq, at, _ := strings.Cut(id, "-")
	e := counter.Entry{Op: counter.ParseLedgerOp(fields["op"]), Reason: fields["reason"], By: fields["by"]}
	var errs [4]error
	var ms int64
	e.Seq, errs[0] = strconv.ParseUint(seq, 10, 64)
	ms, errs[1] = strconv.ParseInt(at, 10, 64)
	e.Delta, errs[2] = strconv.ParseInt(fields["delta"], 10, 64)
	e.After, errs[3] = strconv.ParseInt(fields["after"], 10, 64)
	e.At, e.Before = time.UnixMilli(ms).UTC(), e.After-e.Delta
	if err := errors.Join(errs[:]...); err != nil {
		return e, fmt.Errorf("entry %s: %w", id, err)
	}
	return e, nil
}

// ResidentHistory is the part of a counter's history that is in Redis.
type ResidentHistory struct {
	Resident bool // if not, PostgreSQL has all of it
	State    counter.State
	// Gained has completed time buckets, and of a unique also running ones; in front those that may not be persisted.
	Gained []counter.Gain
	Alone  bool // all there is
}

// HistoriesResident reads the parts of counters' histories that are in Redis.
func (s *Store) HistoriesResident(ctx context.Context, keys []string, step time.Duration, from, to int64) ([]ResidentHistory, error) {
	calls := make([]*redisconn.Call, len(keys))
	for i, key := range keys {
		b := s.bucketOf(key)
		of := []string{stepsKey(b, key), gainsKey(b, step, key)}
		if s.inFront() {
			of = []string{stepsKey(b, key), counterKey(b, gainedJournal, key), asideKey(b, gainedJournal, key)}
		}
		seconds, first, last := strconv.Itoa(int(step/time.Second)), strconv.FormatInt(from, 10), strconv.FormatInt(to-1, 10)
		calls[i] = partCall(scripts.CounterHistory, b, s.inFront(), of, key, seconds, first, last)
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	out := make([]ResidentHistory, len(keys))
	for i, key := range keys {
		var err error
		if out[i], err = parseResidentHistory(calls[i].Reply, key, step, from, to); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func parseResidentHistory(reply any, key string, step time.Duration, from, to int64) (h ResidentHistory, err error) {
	row, st, resident, alone, err := parsePart(key, reply, 6)
	if err != nil || !resident {
		return h, err
	}
	h = ResidentHistory{Resident: true, State: st, Alone: alone}
	text, _ := row[3].(string)
	gains, err := parseGains(text)
	if err != nil {
		return h, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	for _, reply := range row[4:] {
		past, err := parsePast(reply)
		if err != nil {
			return h, err
		}
		for _, p := range past {
			if time.Duration(p.Step)*time.Second == step && st.Kind != counter.Unique {
				gains = append(gains, counter.Gain{Number: int64(p.Number), Value: p.Value})
			}
		}
	}
	gains = slices.DeleteFunc(gains, func(g counter.Gain) bool { return g.Number < from || g.Number >= to })
	seen, err := parseSeen(row[2])
	h.Gained = append(seen, gains...)
	return h, err
}

// histories returns counters and their histories.
func (s *Store) histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([]counter.Counter, [][]counter.Gain, error) {
	found, err := s.HistoriesResident(ctx, keys, step, from, to)
	if err != nil {
		return nil, nil, err
	}
	counters, gains := make([]counter.Counter, len(keys)), make([][]counter.Gain, len(keys))
	for i := range found {
		st := &found[i].State
		counters[i], gains[i] = st.Counter(keys[i]), st.With(found[i].Gained, step, from, to)
	}
	return counters, gains, nil
}

// History implements counter.Reader.
func (s *Store) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	counters, gains, err := s.histories(ctx, []string{key}, step, from, to)
	if err != nil {
		return counter.Counter{}, nil, fmt.Errorf("counterredis: history of %q: %w", key, err)
	}
	return counters[0], gains[0], nil
}

// parsePast parses the journal of completed time buckets, which has no order.
func parsePast(reply any) ([]counter.Past, error) {
	var out []counter.Past
	for name, text := range pairs(reply) {
		value, kept, _ := strings.Cut(text, " ")
		slots, err := counter.ParseSlots(name + ":" + value)
		ms, err1 := strconv.ParseInt(kept, 10, 64)
		if err := errors.Join(err, err1); err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, counter.Past{Slot: slots[0], Kept: time.Duration(ms) * time.Millisecond})
	}
	return out, nil
}

// parseGains parses the history of a sum, "index:increment " for each time bucket.
func parseGains(text string) ([]counter.Gain, error) {
	gains := make([]counter.Gain, 0, strings.Count(text, " ")+1)
	for field := range strings.FieldsSeq(text) {
		number, value, _ := strings.Cut(field, ":")
		n, err := strconv.ParseInt(number, 10, 64)
		v, err1 := strconv.ParseInt(value, 10, 64)
		if err := errors.Join(err, err1); err != nil {
			return nil, fmt.Errorf("history: %w", err)
		}
		gains = append(gains, counter.Gain{Number: n, Value: v})
	}
	return gains, nil
}

// parseSeen parses indexes and registers of time buckets, and sorts them.
func parseSeen(reply any) ([]counter.Gain, error) {
	var gains []counter.Gain
	for number, text := range pairs(reply) {
		n, err := strconv.ParseInt(number, 10, 64)
		registers, err1 := hyperloglog.Parse([]byte(text))
		if err := errors.Join(err, err1); err != nil {
			return nil, fmt.Errorf("%w: registers of a time bucket: %w", counter.ErrUnavailable, err)
		}
		gains = append(gains, counter.Gain{Number: n, Seen: &registers})
	}
	slices.SortFunc(gains, func(a, b counter.Gain) int { return cmp.Compare(a.Number, b.Number) })
	return gains, nil
}

// ResidentDimension is the part of a dimension that is in Redis.
type ResidentDimension struct {
	State counter.State
	Alone bool // Drained and Counted are everything; otherwise they have to be added to PostgreSQL's counts
	// Drained has the counts up to the version Checkpoint, and Counted those from there to the version of the state.
	// PostgreSQL has the counts up to the version of its row.
	Checkpoint       counter.Version
	Drained, Counted []counter.Count
}

// DimensionResident reads the part of a dimension that is in Redis. It returns nil if the counter is not resident.
func (s *Store) DimensionResident(ctx context.Context, key, name string) (*ResidentDimension, error) {
	b := s.bucketOf(key)
	of := []string{countedKey(b, key)}
	if s.inFront() {
		of = append(of, asideKey(b, countedJournal, key))
	}
	cl := partCall(scripts.CounterDimension, b, s.inFront(), of, key, name)
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, err
	}
	row, st, resident, alone, err := parsePart(key, cl.Reply, 5)
	if err != nil || !resident {
		return nil, err
	}
	text, _ := row[2].(string)
	d := &ResidentDimension{State: st, Alone: alone}
	var errs [3]error
	var checkpoint counter.State
	_, checkpoint, errs[0] = parseState(key, strings.TrimPrefix(text, deletedFlag))
	d.Checkpoint = checkpoint.Version
	d.Drained, errs[1] = parseCounts(row[3])
	d.Counted, errs[2] = parseCounts(row[4])
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return d, nil
}

// Dimension implements counter.Reader.
func (s *Store) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	is, err := s.DimensionResident(ctx, key, name)
	if err != nil {
		return counter.Counter{}, counter.Counted{}, fmt.Errorf("counterredis: dimension %q of %q: %w", name, key, err)
	}
	var counted counter.Counted
	if is == nil {
		return counter.Counter{Key: key}, counted, nil
	}
	for _, c := range is.Counted {
		counted.Add(c.Value, c.Count)
	}
	return is.State.Counter(key), counted, nil
}

// parseCounts parses values and their counts.
func parseCounts(reply any) ([]counter.Count, error) {
	var out []counter.Count
	for value, text := range pairs(reply) {
		count, _, _ := strings.Cut(text, " ") // of the empty value there is more
		n, err := strconv.ParseInt(count, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: counts: %w", counter.ErrUnavailable, err)
		}
		out = append(out, counter.Count{Value: value, Count: n})
	}
	return out, nil
}
