package counterredis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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
		Looks   bool        `json:"looks,omitempty"`  // a counter that does not exist is looked for elsewhere first
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
		Looked  bool     `json:"looked,omitempty"` // it is nowhere else
		Bucket  int      `json:"bucket"`           // place in Buckets, from 1
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

		Buckets []bucket `json:"buckets,omitempty"` // of Add, and of Edit for a unique
		Past    []int    `json:"past,omitempty"`    // of Delete: numbers of the keys of histories

		Step  string   `json:"step,omitempty"` // of a hot sum to its parts or back
		Epoch string   `json:"epoch,omitempty"`
		Parts [][2]any `json:"parts,omitempty"` // value and sequence
		Time  int64    `json:"time,omitempty"`  // when the newest of them changed, ms
		Hot   int      `json:"hot,omitempty"`   // number of the key of hot sums

		Registers  int         `json:"registers,omitempty"`  // number of the key of registers
		Steps      int         `json:"steps,omitempty"`      // number of the key of the list of steps of a unique
		Dimensions [][2]string `json:"dimensions,omitempty"` // names and values
		Counted    int         `json:"counted,omitempty"`    // number of the key of what was counted
		Top        int         `json:"top,omitempty"`        // number of the key of the rule's marks, of a hot sum that is gathered
	}
	bucket struct {
		Step int64 `json:"step"`           // seconds
		Kept int64 `json:"kept"`           // ms
		Past int   `json:"past,omitempty"` // number of the key of its history; none in front
	}
	outcome struct {
		Busy    bool              `json:"busy"`
		Lost    bool              `json:"lost"`
		Full    bool              `json:"full"`
		Results luaList[made]     `json:"results"`
		States  map[string]string `json:"states"`
		Stop    *stop             `json:"stop"`
	}
	stop struct {
		Ask     bool            `json:"ask"`
		Unknown luaList[string] `json:"unknown"`
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

// group is the operations that one run of a script makes.
type group struct {
	store *Store
	names *names
	call  script
	ops   []int // for each operation its index in Apply
	size  int   // changes
}

func (s *Store) newGroup() *group {
	g := &group{store: s, names: s.newNames(), call: script{Region: s.cfg.Region, Told: maxTold, Kept: counter.DefaultLedger.Milliseconds(), Values: counter.MaxValues, Looks: s.cfg.Rules != nil}}
	if s.cfg.Behind != nil {
		g.call.Front, g.call.Room, g.call.Values = true, maxPending, maxCounted
	}
	return g
}

// add adds op, whose index in Apply is at.
func (g *group) add(at int, op *counter.Op, left *Unapplied) {
	o := operation{Changes: make([]change, len(op.Changes)), Asked: left.asked[op.Identity]}
	if op.Identity != (counter.Identity{}) {
		b := g.store.identityBucket(op)
		o.Bucket, o.ID = g.names.bucket(b), g.names.key(identityKey(b, op.Identity))
	}
	for i := range op.Changes {
		c := &op.Changes[i]
		o.Changes[i] = g.change(i, c, g.store.changeBucket(c))
		o.Changes[i].Looked = left.looked[c.Key]
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
		out.Counted = g.names.key(countedKey(b, c.Key))
	}
	for _, d := range c.Dimensions {
		out.Dimensions = append(out.Dimensions, [2]string{d.Name, d.Value})
	}
	switch {
	case c.Verb == counter.Add || c.Verb == counter.Divide, c.Verb == counter.Edit && c.Rule.Kind == counter.Unique:
		for i := range c.Rule.Buckets {
			r := &c.Rule.Buckets[i]
			bk := bucket{Step: int64(r.Step / time.Second), Kept: r.Kept.Milliseconds()}
			if !g.call.Front && c.Verb != counter.Edit {
				bk.Past = g.names.key(gainsKey(b, r.Step, c.Key))
			}
			out.Buckets = append(out.Buckets, bk)
		}
	case c.Verb == counter.Delete && !g.call.Front: // whatever rules there were
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

// applyCall is one run of counter_apply.lua over the group.
func (g *group) applyCall(c *redisconn.Client) *redisconn.Call {
	g.call.Buckets = nil
	for _, b := range g.names.order {
		g.call.Buckets = append(g.call.Buckets, place{At: g.names.at[countersKey(b)], Channel: channel(b, g.store.conn.DB)})
	}
	text, err := json.Marshal(g.call)
	if err != nil { // it always marshals
		panic(err)
	}
	return &redisconn.Call{Script: scripts.CounterApply, Keys: g.names.list, Args: []any{c.Publish, string(text), counter.IdentityKept.Milliseconds()}}
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

// Unapplied is what ApplyResident could not make.
type Unapplied struct {
	Ops     []int    // indexes, in order
	Unknown []string // counters to look for elsewhere first
	Ask     bool     // identities have to be looked for in PostgreSQL
	Lost    bool     // Redis may have lost its memory

	asked  map[counter.Identity]bool
	looked map[string]bool
}

// ApplyResident makes the operations todo of ops, in their order and each in one bucket when Redis is a Cluster, and fills in their
// results, those of replays without counters. asked are identities that PostgreSQL does not know.
func (s *Store) ApplyResident(ctx context.Context, ops []counter.Op, todo []int, asked map[counter.Identity]bool, results []counter.Result) Unapplied {
	return s.make(ctx, ops, todo, results, Unapplied{asked: asked})
}

func (s *Store) make(ctx context.Context, ops []counter.Op, todo []int, results []counter.Result, left Unapplied) Unapplied {
	fail := failing(results)
	c, err := s.client(ctx)
	if err != nil {
		fail(todo, err)
		return left
	}
	waiting := map[int]*group{} // by bucket; on a single server all are in -1
	flush := func() {
		s.applyGroups(ctx, c, ops, slices.Collect(maps.Values(waiting)), results, fail, &left)
		clear(waiting)
	}
	for _, i := range todo {
		op, b := &ops[i], -1
		if c.Cluster != nil {
			b = s.changeBucket(&op.Changes[0])
		}
		g := waiting[b]
		if g != nil && g.size+len(op.Changes) > maxApply {
			flush()
			g = nil
		}
		if g == nil {
			g = s.newGroup()
			waiting[b] = g
		}
		g.add(i, op, &left)
	}
	flush()
	slices.Sort(left.Ops)
	return left
}

// applyGroups makes groups, of which no two have a bucket in common, and waits for buckets that are held still.
func (s *Store) applyGroups(ctx context.Context, c *redisconn.Client, ops []counter.Op, groups []*group, results []counter.Result, fail func([]int, error), left *Unapplied) {
	w := s.wait(ctx)
	for len(groups) > 0 {
		calls := make([]*redisconn.Call, len(groups))
		for i, g := range groups {
			calls[i] = g.applyCall(c)
		}
		_ = s.conn.Run(ctx, calls) // each call has its error
		var again []*group
		for i, g := range groups {
			o, err := parseOutcome(calls[i])
			if err == nil && o.Busy {
				if err = w.held(); err == nil {
					again = append(again, g)
					continue
				}
			}
			made := g.ops
			if err == nil && o.Stop != nil && len(o.Results) < len(g.ops) {
				made = g.ops[:len(o.Results)]
				left.Ops = append(left.Ops, g.ops[len(made):]...)
				left.Unknown, left.Ask = append(left.Unknown, o.Stop.Unknown...), left.Ask || o.Stop.Ask
			}
			if err == nil && len(o.Results) != len(made) {
				err = fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
			}
			if errors.Is(err, ErrLost) {
				left.Ops, left.Lost = append(left.Ops, g.ops...), true
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

// waiter waits while buckets are held still, longer each time.
type waiter struct {
	ctx      context.Context
	patience time.Duration
	until    time.Time
	tries    int
}

func (s *Store) wait(ctx context.Context) *waiter {
	return &waiter{ctx: ctx, patience: s.cfg.Patience, until: time.Now().Add(s.cfg.Patience)}
}

// held waits for a bucket that is held still. Its error says that nothing was changed.
func (w *waiter) held() error {
	w.tries++
	longest := time.Duration(min(w.tries, 10)) * time.Millisecond
	select {
	case <-w.ctx.Done():
		return fmt.Errorf("%w: its counters are held still: %w", counter.ErrUnavailable, context.Cause(w.ctx))
	case <-time.After(longest/2 + rand.N(longest)):
	}
	if time.Now().After(w.until) {
		return fmt.Errorf("%w: its counters are held still for longer than %s", counter.ErrUnavailable, w.patience)
	}
	return nil
}
