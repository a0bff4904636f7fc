package counterredis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// These are what counter_apply.lua is given and answers.
type (
	script struct {
		Buckets []place     `json:"buckets"`
		Ops     []operation `json:"ops"`
		Told    int         `json:"told"`   // members that one update names
		Kept    int64       `json:"kept"`   // how long a ledger without a rule is kept, ms
		Values  int         `json:"values"` // of a dimension, that are told apart
		Front   bool        `json:"front,omitempty"`
		Region  string      `json:"region,omitempty"` // this one, when there are others
		Room    int         `json:"room,omitempty"`   // of a bucket, for what is not persisted
		Token   string      `json:"token,omitempty"`  // that the buckets must have
	}
	place struct {
		At      int    `json:"at"` // number of its first key
		Channel string `json:"channel,omitempty"`
	}
	operation struct {
		ID      int      `json:"id,omitempty"`       // number of the identity's key
		Bucket  int      `json:"idbucket,omitempty"` // its place in Buckets
		Asked   bool     `json:"asked,omitempty"`    // PostgreSQL does not know the identity
		Changes []change `json:"changes"`
	}
	change struct {
		At      int      `json:"at"` // its index in the Op
		Key     string   `json:"key"`
		Bucket  int      `json:"bucket"` // place in Buckets, from 1
		Verb    string   `json:"verb"`
		Kind    string   `json:"kind"`
		Delta   string   `json:"delta,omitempty"`
		Merged  bool     `json:"merged,omitempty"`
		Floor   string   `json:"floor,omitempty"`
		Ceiling string   `json:"ceiling,omitempty"`
		Kept    int64    `json:"kept,omitempty"` // ms; 0: for ever
		Ledger  int      `json:"ledger"`         // number of its key
		Set     int      `json:"set,omitempty"`  // number of its key
		Join    []string `json:"join,omitempty"` // hash and name
		Leave   []string `json:"leave,omitempty"`
		Reason  string   `json:"reason,omitempty"`
		By      string   `json:"by,omitempty"`
		Moved   []int    `json:"moved,omitempty"` // numbers of the keys of what became of members, by epoch
		Old     int      `json:"old,omitempty"`   // number of the key of a ledger that a cut needs

		Buckets []bucket `json:"buckets,omitempty"` // of Add, and of Edit for a unique
		Past    []int    `json:"past,omitempty"`    // numbers of the keys of histories, in front of those by epoch

		Step  string   `json:"step,omitempty"` // of a hot sum to its parts or back
		Epoch string   `json:"epoch,omitempty"`
		Parts [][2]any `json:"parts,omitempty"` // value and sequence
		Time  int64    `json:"time,omitempty"`  // when the newest of them changed, ms
		Hot   int      `json:"hot,omitempty"`   // number of the key of hot sums

		Registers    int         `json:"registers,omitempty"`    // number of the key of registers
		OldRegisters int         `json:"oldregisters,omitempty"` // number of the key of those that a cut needs
		Steps        int         `json:"steps,omitempty"`        // number of the key of the list of steps of a unique
		Dimensions   [][2]string `json:"dimensions,omitempty"`   // names and values
		Counted      []int       `json:"counted,omitempty"`      // number of the key of what was counted, in front by epoch
		Top          int         `json:"top,omitempty"`          // number of the key of the rule's marks, of a hot sum that is gathered
	}
	bucket struct {
		Step int64 `json:"step"`           // seconds
		Kept int64 `json:"kept"`           // ms
		Past int   `json:"past,omitempty"` // number of the key of its history; none in front
	}
	outcome struct {
		Busy    *string           `json:"busy"`
		Aborted bool              `json:"aborted"`
		Lost    bool              `json:"lost"`
		Full    bool              `json:"full"`
		Results luaList[made]     `json:"results"`
		States  map[string]string `json:"states"`
		Stop    *stop             `json:"stop"`
		Token   string            `json:"token"`
	}
	stop struct {
		Ask     bool            `json:"ask"`
		Ways    []Way           `json:"ways"`
		Cold    luaList[string] `json:"cold"`
		Deleted uint64          `json:"deleted,string"`
	}
	made struct {
		Replay  bool   `json:"replay"`
		Refused string `json:"refused"`
		At      int    `json:"at"`
		Value   string `json:"value"`
		Kind    string `json:"kind"`
		Detail  string `json:"detail"`
	}
)

// luaList is a list as Lua encodes it: an empty one is {}.
type luaList[T any] []T

func (l *luaList[T]) UnmarshalJSON(text []byte) error {
	if string(text) == "{}" {
		*l = nil
		return nil
	}
	return json.Unmarshal(text, (*[]T)(l))
}

var verbs = [...]string{counter.Add: "add", counter.Adjust: "adjust", counter.Reset: "reset", counter.Edit: "edit", counter.Delete: "delete", counter.Divide: "divide"}

// group is the operations, or parts of one, that one run of a script makes.
type group struct {
	names *names
	call  script
	ops   []int // for each operation its index in Apply
	size  int   // changes

	bucket int // -1: any
}

func (s *Store) newGroup() *group {
	g := &group{names: s.newNames(), call: script{Region: s.cfg.Region, Told: maxTold, Kept: counter.DefaultLedger.Milliseconds(), Values: counter.MaxValues}}
	if s.cfg.Behind != nil {
		g.call.Front, g.call.Room, g.call.Values = true, maxPending, maxCounted
	}
	return g
}

// add adds the changes of op that are in bucket; bucket -1: all, and in any case
// the identity when it is there.
func (g *group) add(at int, op *counter.Op, bucket int) {
	o := operation{Changes: []change{}}
	if op.Identity != (counter.Identity{}) {
		if b := identityBucket(op.Identity); bucket < 0 || b == bucket {
			o.Bucket = g.names.bucket(b)
			o.ID = g.names.key(identityKey(b, op.Identity))
		}
	}
	for i := range op.Changes {
		if b := bucketOf(op.Changes[i].Key); bucket < 0 || b == bucket {
			o.Changes = append(o.Changes, g.change(i, &op.Changes[i], b))
		}
	}
	g.call.Ops, g.ops, g.size = append(g.call.Ops, o), append(g.ops, at), g.size+len(o.Changes)
}

func (g *group) change(at int, c *counter.Change, b int) change {
	out := change{
		At: at, Key: c.Key, Bucket: g.names.bucket(b), Verb: verbs[c.Verb], Kind: c.Rule.Kind.String(), Merged: c.Merged > 1,
		Kept: c.Rule.Ledger.Milliseconds(), Ledger: g.names.key(ledgerKey(b, c.Key)), Reason: c.Reason, By: c.By,
	}
	if c.Delta != 0 {
		out.Delta = strconv.FormatInt(c.Delta, 10)
	}
	if f := c.Rule.Floor; f != nil {
		out.Floor = strconv.FormatInt(*f, 10)
	}
	if f := c.Rule.Ceiling; f != nil {
		out.Ceiling = strconv.FormatInt(*f, 10)
	}
	if c.Verb == counter.Edit || c.Verb == counter.Reset || c.Verb == counter.Delete {
		out.Set = g.names.key(membersKey(b, c.Key))
		out.Registers, out.Steps = g.names.key(registersKey(b, c.Key)), g.names.key(stepsKey(b, c.Key))
		if g.call.Front {
			out.OldRegisters = g.names.key(oldRegistersKey(b, c.Key))
			out.Moved = []int{g.names.key(movedKey(b, 0, c.Key)), g.names.key(movedKey(b, 1, c.Key))}
			out.Old = g.names.key(oldLedgerKey(b, c.Key))
		}
	}
	if step := c.Spread; step != nil {
		out.Step, out.Epoch, out.Hot = string(step.To), step.Epoch.String(), g.names.key(hotKey(b))
		if !step.Updated.IsZero() {
			out.Time = step.Updated.UnixMilli()
		}
		for _, p := range step.Parts {
			value, sequence := strconv.FormatInt(p.Value, 10), strconv.FormatUint(p.Sequence, 10)
			out.Parts = append(out.Parts, [2]any{value, json.Number(sequence)})
		}
	}
	if c.Rule.Top && c.Verb == counter.Divide { // what is gathered may count in a later step than that in which it was marked
		out.Top = g.names.key(marksKey(b, c.Rule.Match))
	}
	if len(c.Dimensions) > 0 || c.Verb == counter.Delete {
		if g.call.Front {
			out.Counted = []int{g.names.key(countsKey(b, 0, c.Key)), g.names.key(countsKey(b, 1, c.Key))}
		} else {
			out.Counted = []int{g.names.key(countedKey(b, c.Key))}
		}
	}
	for _, d := range c.Dimensions {
		out.Dimensions = append(out.Dimensions, [2]string{d.Name, d.Value})
	}
	switch {
	case (c.Verb == counter.Add || c.Verb == counter.Divide) && len(c.Rule.Buckets) > 0, c.Verb == counter.Edit && c.Rule.Kind == counter.Unique && len(c.Rule.Buckets) > 0,
		c.Verb == counter.Delete && g.call.Front:
		for i := range c.Rule.Buckets {
			r := &c.Rule.Buckets[i]
			bk := bucket{Step: int64(r.Step / time.Second), Kept: r.Kept.Milliseconds()}
			if !g.call.Front && c.Verb != counter.Edit {
				bk.Past = g.names.key(gainsKey(b, r.Step, c.Key))
			}
			out.Buckets = append(out.Buckets, bk)
		}
		if g.call.Front {
			out.Past = []int{g.names.key(gainedKey(b, 0, c.Key)), g.names.key(gainedKey(b, 1, c.Key))}
		}
	case c.Verb == counter.Delete: // whatever rules there were
		for _, step := range counter.BucketSteps {
			out.Past = append(out.Past, g.names.key(gainsKey(b, step, c.Key)))
		}
	}
	for _, m := range c.Join {
		out.Join = append(out.Join, counter.MemberHash(m)+m)
	}
	for _, m := range c.Leave {
		out.Leave = append(out.Leave, counter.MemberHash(m)+m)
	}
	return out
}

// run is one run of counter_apply.lua over the group. part is of a transaction.
func (s *Store) applyCall(c *redisconn.Client, g *group, mode string, part transactionPart) (*redisconn.Call, error) {
	for _, b := range g.names.order {
		g.call.Buckets = append(g.call.Buckets, place{At: g.names.at[countersKey(b)], Channel: channel(b, s.conn.DB)})
	}
	text, err := json.Marshal(g.call)
	g.call.Buckets = nil
	if err != nil {
		return nil, err
	}
	keys, tx, kept := g.names.list, "", ""
	if part.id != "" {
		record := transactionKey(part.bucket, part.id)
		keys = append(keys[:len(keys):len(keys)], record)
		tx = part.id + " " + strconv.Itoa(len(keys)) + " " + strconv.Itoa(part.home)
		switch mode {
		case "prepare":
			b, err := json.Marshal(prepared{Keys: keys, Call: string(text), Transaction: tx})
			if err != nil {
				return nil, err
			}
			kept = string(b)
		case "decide":
			b, err := json.Marshal(part.others)
			if err != nil {
				return nil, err
			}
			kept = string(b)
		}
	}
	return applyScript(c, mode, keys, string(text), tx, kept), nil
}

func applyScript(c *redisconn.Client, mode string, keys []string, text, tx, kept string) *redisconn.Call {
	return &redisconn.Call{
		Script: scripts.CounterApply, Keys: keys,
		Args: []any{c.Publish, mode, text, counter.IdentityKept.Milliseconds(), tx, kept},
	}
}

var errReply = errors.New("redis: a reply that cannot be read")

func parseOutcome(cl *redisconn.Call) (outcome, error) {
	var o outcome
	if cl.Err != nil {
		return o, cl.Err
	}
	text, ok := cl.Reply.(string)
	if !ok {
		return o, fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
	}
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return o, fmt.Errorf("%w: %w: %w", counter.ErrUnavailable, errReply, err)
	}
	switch {
	case o.Lost:
		return o, ErrLost
	case o.Full:
		return o, errFull
	}
	return o, nil
}

// failing returns what notes an error as the result of some operations.
func failing(results []counter.Result) func(at []int, err error) {
	return func(at []int, err error) {
		for _, i := range at {
			results[i] = counter.Result{Err: fmt.Errorf("counterredis: apply: %w", err)}
		}
	}
}

// Apply is as counter.Writer says. Operations of one bucket each go in one pipeline;
// one of several buckets of a Cluster goes by itself, after what comes before it.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	fail := failing(results)
	var todo []int
	for i := range ops {
		if results[i].Err = ops[i].Check(); results[i].Err == nil {
			todo = append(todo, i)
		}
	}
	c, err := s.client(ctx)
	if err != nil {
		fail(todo, err)
		return results
	}
	s.make(ctx, c, ops, todo, results, fail, nil)
	return results
}

// make makes the operations todo. left is nil, or takes those that cannot be made here.
func (s *Store) make(ctx context.Context, c *redisconn.Client, ops []counter.Op, todo []int, results []counter.Result, fail func([]int, error), left *Left) {
	waiting := map[int]*group{} // by bucket; on a single server all are in -1
	flush := func() {
		groups := make([]*group, 0, len(waiting))
		for _, g := range waiting {
			groups = append(groups, g)
		}
		clear(waiting)
		s.applyGroups(ctx, c, ops, groups, results, fail, left)
	}
	for n, i := range todo {
		op := &ops[i]
		b := -1
		if c.Cluster != nil {
			buckets := bucketsOf(op)
			if len(buckets) > 1 {
				flush()
				if left != nil && s.leave(ctx, ops, todo[n:], left, fail) {
					return
				}
				r, err := s.transact(ctx, c, op)
				if results[i] = r; err != nil {
					fail([]int{i}, err)
				}
				continue
			}
			b = buckets[0]
		}
		g := waiting[b]
		if g != nil && g.size+len(op.Changes) > maxApply {
			flush()
			g = nil
		}
		if g == nil {
			g = s.newGroup()
			g.bucket, waiting[b] = b, g
		}
		g.add(i, op, b)
		g.call.Ops[len(g.call.Ops)-1].Asked = left != nil && left.asked[op.Identity]
	}
	flush()
}

// bucketsOf are the buckets of an operation, its home first.
func bucketsOf(op *counter.Op) []int {
	var list []int
	seen := [Buckets]bool{}
	add := func(b int) {
		if !seen[b] {
			seen[b] = true
			list = append(list, b)
		}
	}
	if op.Identity != (counter.Identity{}) {
		add(identityBucket(op.Identity))
	}
	for i := range op.Changes {
		add(bucketOf(op.Changes[i].Key))
	}
	return list
}

// applyGroups makes groups, of which no two have a bucket in common, and waits for
// those whose counters are locked.
func (s *Store) applyGroups(ctx context.Context, c *redisconn.Client, ops []counter.Op, groups []*group, results []counter.Result, fail func([]int, error), left *Left) {
	w := s.wait(ctx)
	for len(groups) > 0 {
		calls := make([]*redisconn.Call, len(groups))
		for i, g := range groups {
			cl, err := s.applyCall(c, g, "make", transactionPart{})
			if err != nil { // text always marshals
				panic(err)
			}
			calls[i] = cl
		}
		_ = s.conn.Run(ctx, calls) // each call has its error
		var again []*group
		for i, g := range groups {
			o, err := parseOutcome(calls[i])
			if err == nil && o.Busy != nil {
				if err = w.locked(*o.Busy); err == nil {
					again = append(again, g)
					continue
				}
			}
			made := g.ops
			if err == nil && left != nil && o.Stop != nil && len(o.Results)+len(o.Stop.Ways) == len(g.ops) {
				made = g.ops[:len(o.Results)]
				left.stopped(g.ops[len(made):], o.Stop)
			}
			if err == nil && len(o.Results) != len(made) {
				err = fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
			}
			if left != nil && errors.Is(err, ErrLost) {
				left.lost(g.ops)
				continue
			}
			if err != nil {
				fail(g.ops, err)
				continue
			}
			for j, at := range made {
				if results[at], err = result(&ops[at], o.Results[j], o.States); err != nil {
					fail([]int{at}, err)
				}
			}
		}
		groups = again
	}
}

// result is what became of op. states has all of its counters.
func result(op *counter.Op, m made, states map[string]string) (counter.Result, error) {
	if m.Refused != "" {
		return counter.Result{Err: m.conflict(op)}, nil
	}
	r := counter.Result{Replay: m.Replay, Counters: make([]counter.Counter, len(op.Changes))}
	for i := range op.Changes {
		c, _, err := parseState(op.Changes[i].Key, states[op.Changes[i].Key])
		if err != nil {
			return counter.Result{}, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		r.Counters[i] = c.Or(op.Changes[i].Rule.Kind)
	}
	return r, nil
}

// conflict is the refusal in words.
func (m made) conflict(op *counter.Op) error {
	c := &op.Changes[m.At]
	if m.Refused == "spread" {
		return fmt.Errorf("%w: %q", counter.ErrSpread, c.Key)
	}
	out := &counter.Conflict{Key: c.Key}
	out.Value, _ = strconv.ParseInt(m.Value, 10, 64)
	switch m.Refused {
	case "floor", "ceiling":
		out.Is, out.Text = counter.ErrBound, "its "+m.Refused+" is "+m.Detail
	case "overflow":
		out.Is, out.Text = counter.ErrOverflow, fmt.Sprintf("%d and %d", out.Value, c.Delta)
		if m.Detail == "opposite" {
			out.Text = "the least number has no opposite; adjust it by 1 first"
		}
	default:
		why := map[string]string{
			"number":  "only a sum or an exact counter is moved by numbers",
			"merged":  "its changes are made one by one",
			"unique":  "it does not know its members, they are only added",
			"members": "only a counter of kind members or unique has members",
		}[m.Detail]
		out.Is, out.Text = counter.ErrKind, "it is of kind "+m.Kind+"; "+why
	}
	return out
}

// waiter waits for locks, longer each time.
type waiter struct {
	s     *Store
	ctx   context.Context
	until time.Time
	tries int
}

func (s *Store) wait(ctx context.Context) *waiter {
	return &waiter{s: s, ctx: ctx, until: time.Now().Add(s.cfg.Patience)}
}

// locked waits because of a lock, or "" for a bucket that is held still. What a dead
// process left it finishes. Its error says that nothing was changed.
func (w *waiter) locked(lock string) error {
	if l, ok := parseLock(lock); ok && l.age > abandoned {
		if err := w.s.finish(w.ctx, l); err != nil {
			return err
		}
	}
	w.tries++
	most := time.Duration(min(w.tries, 10)) * time.Millisecond
	select {
	case <-w.ctx.Done():
		return fmt.Errorf("%w: its counters are locked: %w", counter.ErrUnavailable, context.Cause(w.ctx))
	case <-time.After(most/2 + rand.N(most)):
	}
	if time.Now().After(w.until) {
		return fmt.Errorf("%w: its counters are locked for longer than %s", counter.ErrUnavailable, w.s.cfg.Patience)
	}
	return nil
}
