package counterredis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

var verbs = [...]string{counter.Add: "add", counter.Adjust: "adjust", counter.Reset: "reset", counter.Edit: "edit", counter.Delete: "delete", counter.Reshard: "reshard", counter.Set: "set"}

// group has the operations of one run of counter_apply.lua.
type group struct {
	store   *Store
	cluster bool // the call has to name the keys of counters, too
	names   *names
	rules   []*counter.Rule
	args    []any    // the operations in the form that the script parses
	ops     []int    // for each operation, its index in Apply
	size    int      // number of changes
	states  []string // keys of counters, in the order of their first mention
	named   map[string]bool
}

func (s *Store) newGroup(c *redisconn.Client) *group {
	return &group{store: s, cluster: c.Cluster != nil, names: s.newNames(), named: map[string]bool{}}
}

func flag(is bool) string {
	if is {
		return "1"
	}
	return "0"
}

// add adds op, whose index in Apply is at.
func (g *group) add(at int, op *counter.Op, left *Unapplied) {
	id, home := 0, 0
	if op.IdempotencyKey != (counter.IdempotencyKey{}) {
		b := g.store.idempotencyBucket(op)
		home, id = g.names.bucket(b), g.names.key(idempotencyKey(b, op.IdempotencyKey))
	}
	g.args = append(g.args, id, home, flag(left.asked[op.IdempotencyKey]), len(op.Changes))
	for i := range op.Changes {
		c := &op.Changes[i]
		b := g.store.changeBucket(c)
		g.change(c, b, left.looked[c.Key])
		if g.cluster {
			g.declare(c, b)
		}
		if !g.named[c.Key] {
			g.named[c.Key] = true
			g.states = append(g.states, c.Key)
		}
	}
	g.ops, g.size = append(g.ops, at), g.size+len(op.Changes)
}

func (g *group) change(c *counter.Change, b int, looked bool) {
	g.args = append(g.args, verbs[c.Verb], c.Key, g.names.bucket(b), g.rule(c.Rule), flag(looked))
	switch c.Verb {
	case counter.Add, counter.Adjust, counter.Set:
		g.args = append(g.args, c.Delta, flag(c.Merged > 1), c.Reason, c.By, 2*len(c.Dimensions))
		for _, d := range c.Dimensions {
			g.args = append(g.args, d.Name, d.Value)
		}
	case counter.Edit:
		g.members(c.Join)
		g.members(c.Leave)
	case counter.Reset:
		g.args = append(g.args, c.Reason, c.By)
	case counter.Reshard:
		updated := int64(0)
		for _, p := range c.Reshard.Shards {
			if p.Sequence > 0 {
				updated = max(updated, p.Updated.UnixMilli())
			}
		}
		g.args = append(g.args, string(c.Reshard.To), c.Reshard.Epoch.String(), updated, 2*len(c.Reshard.Shards))
		for _, p := range c.Reshard.Shards {
			g.args = append(g.args, p.Value, p.Sequence)
		}
	}
}

// declare adds the keys of a change's counter to the call. If the slot is being moved and one of them is on another
// node, a Cluster then refuses the call before the script begins, and not in the middle of it.
func (g *group) declare(c *counter.Change, b int) {
	name := func(names ...string) {
		for _, n := range names {
			g.names.key(counterKey(b, n, c.Key))
		}
	}
	name("l", "e")
	if c.Verb == counter.Edit || c.Verb == counter.Reset || c.Verb == counter.Delete {
		name("m", "r", "v")
	}
	if g.store.inFront() { // completed time buckets are in a journal
		name("p", "b", "pt", "bt", "et", "rt")
	} else {
		for _, step := range counter.BucketSteps {
			if c.Verb == counter.Delete || slices.ContainsFunc(c.Rule.Buckets, func(k counter.Bucket) bool { return k.Step == step }) {
				g.names.key(gainsKey(b, step, c.Key))
			}
		}
	}
	if c.Verb == counter.Reshard {
		g.names.key(shardedKey(b))
		g.names.key(marksKey(b, c.Rule.Match))
	}
}

// rule returns the index of a rule in the call.
func (g *group) rule(r *counter.Rule) int {
	at := slices.Index(g.rules, r)
	if at < 0 {
		at = len(g.rules)
		g.rules = append(g.rules, r)
	}
	return at + 1
}

// members adds the hash and the name of each member.
func (g *group) members(names []string) {
	g.args = append(g.args, len(names))
	for _, m := range names {
		g.args = append(g.args, counter.MemberHash(m)+m)
	}
}

// ruleArgs returns a rule in the form that the script parses.
func ruleArgs(args []any, r *counter.Rule) []any {
	bound := func(b *int64) any {
		if b == nil {
			return ""
		}
		return *b
	}
	match := ""
	if r.Top {
		match = r.Match
	}
	args = append(args, r.Kind.String(), bound(r.Floor), bound(r.Ceiling), r.Ledger.Milliseconds(), match, len(r.Buckets))
	for i := range r.Buckets {
		args = append(args, int64(r.Buckets[i].Step/time.Second), r.Buckets[i].Kept.Milliseconds())
	}
	return args
}

// applyCall returns the run of counter_apply.lua for the group.
func (g *group) applyCall(c *redisconn.Client) *redisconn.Call {
	front, values := g.store.inFront(), counter.MaxValues
	if front {
		values = maxCounted
	}
	args := make([]any, 0, 16+2*len(g.names.order)+10*len(g.rules)+len(g.args))
	args = append(args, c.Publish, counter.IdempotencyKeyKept.Milliseconds(), maxNamed, counter.DefaultLedger.Milliseconds(), values,
		flag(front), g.store.cfg.Region, maxPending, flag(g.store.cfg.Rules != nil), len(g.names.order))
	for _, b := range g.names.order {
		args = append(args, g.names.at[countersKey(b)], channel(b, g.store.cfg.Conn.DB))
	}
	args = append(args, len(g.rules))
	for _, r := range g.rules {
		args = ruleArgs(args, r)
	}
	return &redisconn.Call{Script: scripts.CounterApply, Keys: g.names.list, Args: append(args, g.args...)}
}

var errReply = errors.New("redis: unexpected reply")

// outcome is the reply of counter_apply.lua.
type outcome struct {
	results []any             // for each operation that was judged "", "replay" or a refusal
	states  map[string]string // by key
	ask     bool              // idempotency keys have to be looked up in PostgreSQL
	unknown []string          // counters that have to be loaded, or looked for in another bucket
}

func (g *group) parseOutcome(cl *redisconn.Call) (o outcome, err error) {
	if cl.Err != nil {
		return o, cl.Err
	}
	switch cl.Reply {
	case lostReply:
		return o, ErrLost
	case "full":
		return o, errFull
	}
	reply, _ := cl.Reply.([]any)
	if len(reply) != 4 {
		return o, errReplied()
	}
	o.results, _ = reply[0].([]any)
	states, _ := reply[1].([]any)
	unknown, _ := reply[3].([]any)
	if len(states) != len(g.states) || len(o.results) > len(g.ops) {
		return o, errReplied()
	}
	o.states = make(map[string]string, len(states))
	for i, key := range g.states {
		o.states[key], _ = states[i].(string)
	}
	for _, key := range unknown {
		text, _ := key.(string)
		o.unknown = append(o.unknown, text)
	}
	o.ask = reply[2] == int64(1)
	return o, nil
}

// failing returns a function that sets an error as the result of operations.
func failing(results []counter.Result) func(at []int, err error) {
	return func(at []int, err error) {
		for _, i := range at {
			results[i] = counter.Result{Err: fmt.Errorf("counterredis: apply: %w", err)}
		}
	}
}

// Unapplied has the operations that ApplyResident could not make, and why.
type Unapplied struct {
	Ops     []int    // indexes, in order
	Unknown []string // counters that have to be loaded first
	Ask     bool     // idempotency keys have to be looked up in PostgreSQL
	Lost    bool     // Redis may have lost data

	asked  map[counter.IdempotencyKey]bool
	looked map[string]bool
}

// ApplyResident makes the operations todo of ops in order, and sets their results; those of replays have no counters.
// On a Cluster each operation must be in one bucket. asked has the idempotency keys that PostgreSQL does not know.
func (s *Store) ApplyResident(ctx context.Context, ops []counter.Op, todo []int, asked map[counter.IdempotencyKey]bool, results []counter.Result) Unapplied {
	return s.make(ctx, ops, todo, results, Unapplied{asked: asked})
}

// merges has the counters and idempotency keys of operations that a merge has to precede. Later operations on them wait,
// too, so that they do not overtake; counter_apply.lua sees to that within one of its runs.
type merges struct {
	keys map[string]bool
	ids  map[counter.IdempotencyKey]bool
}

func newMerges(ops []counter.Op, results []counter.Result) (m merges) {
	for i := range results {
		if errors.Is(results[i].Err, counter.ErrSharded) {
			m.add(&ops[i])
		}
	}
	return m
}

func (m *merges) add(op *counter.Op) {
	if m.keys == nil {
		*m = merges{map[string]bool{}, map[counter.IdempotencyKey]bool{}}
	}
	for j := range op.Changes {
		m.keys[op.Changes[j].Key] = true
	}
	if op.IdempotencyKey != (counter.IdempotencyKey{}) {
		m.ids[op.IdempotencyKey] = true
	}
}

func (m *merges) precede(op *counter.Op) bool {
	return m.ids[op.IdempotencyKey] || slices.ContainsFunc(op.Changes, func(c counter.Change) bool { return m.keys[c.Key] })
}

func (s *Store) make(ctx context.Context, ops []counter.Op, todo []int, results []counter.Result, left Unapplied) Unapplied {
	fail := failing(results)
	c, err := s.conn.Known(ctx)
	if err != nil {
		fail(todo, err)
		return left
	}
	waiting := map[int]*group{} // by bucket; on a single server everything is in -1
	merges := newMerges(ops, results)
	flush := func() {
		s.applyGroups(ctx, c, ops, slices.Collect(maps.Values(waiting)), results, fail, &left)
		clear(waiting)
		merges = newMerges(ops, results)
	}
	for _, i := range todo {
		op, b := &ops[i], -1
		if merges.precede(op) {
			results[i].Err = fmt.Errorf("%w: an earlier change waits for it", counter.ErrSharded)
			merges.add(op)
			continue
		}
		if c.Cluster != nil {
			b = s.changeBucket(&op.Changes[0])
		}
		g := waiting[b]
		if g != nil && g.size+len(op.Changes) > maxApply {
			flush()
			g = nil
		}
		if g == nil {
			g = s.newGroup(c)
			waiting[b] = g
		}
		g.add(i, op, &left)
	}
	flush()
	slices.Sort(left.Ops)
	return left
}

// applyGroups runs groups, no two of which share a bucket.
func (s *Store) applyGroups(ctx context.Context, c *redisconn.Client, ops []counter.Op, groups []*group, results []counter.Result, fail func([]int, error), left *Unapplied) {
	calls := make([]*redisconn.Call, len(groups))
	for i, g := range groups {
		calls[i] = g.applyCall(c)
	}
	_ = s.conn.Run(ctx, calls) // every call has its own error
	for i, g := range groups {
		o, err := g.parseOutcome(calls[i])
		if errors.Is(err, ErrLost) {
			left.Ops, left.Lost = append(left.Ops, g.ops...), true
			continue
		}
		if err != nil {
			fail(g.ops, err)
			continue
		}
		made := g.ops[:len(o.results)]
		left.Ops = append(left.Ops, g.ops[len(made):]...)
		left.Unknown, left.Ask = append(left.Unknown, o.unknown...), left.Ask || o.ask
		for j, at := range made {
			text, _ := o.results[j].(string)
			if results[at], err = result(&ops[at], text, o.states); err != nil {
				fail([]int{at}, err)
			}
		}
	}
}

// result parses the result of op. states has all of its counters.
func result(op *counter.Op, text string, states map[string]string) (counter.Result, error) {
	if text != "" && text != "replay" {
		return counter.Result{Err: refused(op, text)}, nil
	}
	r := counter.Result{Replay: text != "", Counters: make([]counter.Counter, len(op.Changes))}
	for i := range op.Changes {
		c, _, err := parseState(op.Changes[i].Key, states[op.Changes[i].Key])
		if err != nil {
			return counter.Result{}, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		r.Counters[i] = c.Or(op.Changes[i].Rule.Kind)
	}
	return r, nil
}

// refused returns the conflict for a refusal: index of the change, value and kind of its counter, reason, detail.
func refused(op *counter.Op, text string) error {
	f := strings.SplitN(text, " ", 5)
	at, err := strconv.Atoi(f[0])
	if err != nil || len(f) != 5 || at < 0 || at >= len(op.Changes) {
		return errReplied()
	}
	c, why, detail := &op.Changes[at], f[3], f[4]
	if why == "sharded" {
		return fmt.Errorf("%w: %q", counter.ErrSharded, c.Key)
	}
	// The detail says more than the reason, but that of a bound is its number.
	reason, known := counter.ParseRefusal(detail)
	if !known {
		reason, known = counter.ParseRefusal(why)
	}
	if !known {
		return errReplied()
	}
	kind, _ := counter.ParseKind(f[2])
	value, _ := strconv.ParseInt(f[1], 10, 64)

	return counter.Refused(reason, c, counter.Counter{Kind: kind, Value: value})
}
