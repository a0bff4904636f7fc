package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"headcount/client"
)

// lastingRun is the scenario "counters", about counters of the server's built-in rules. Most of its users are servers
// with an API key: they increment, decrement, send batches, compete for stock and edit sets. The others are fans, who
// vote and like. All of them repeat a call with the same Idempotency-Key until it is answered, and sometimes once more.
// Of the calls with a key, the client itself cuts off --kill-fraction. --pages is the number of counters of each rule.
//
// So at a checkpoint, when no call is under way, the value of every counter is the sum of all changes that were
// acknowledged. The servers may be killed and started again at any time: a 503 or a lost connection is no fault, but a
// delay.
type lastingRun struct {
	*crowd
	web   *http.Client // of the calls
	calls callStats

	sums, stocks, sets []*tally
	views, votes       []*tally // of the sums: those that only grow, and those that fans may increment
	all                []*tally
	quotas             []*quota
	workers            []*worker
	fans               []*tab
	subscribers        []*subscriber
	fail               func(error) // ends the run

	gate     sync.RWMutex // held for reading while a call is under way, and for writing by checkpoints
	failures int64        // at the last checkpoint; the driver's
	deleting atomic.Bool  // the run is over and deletes its counters
}

const (
	roundTime   = 2 * time.Second // between two checkpoints
	fanPause    = 150 * time.Millisecond
	remembered  = 16        // changes that a worker may repeat later
	membersEach = 3         // of a worker
	far         = 1<<53 + 1 // the first change of one counter, which no float64 holds exactly
)

// lastingKinds are the rules of the counters: the prefix of their keys, and their kind.
var lastingKinds = []struct{ prefix, kind string }{
	{"views:", "sum"}, {"votes:", "sum"}, {"", "sum"}, {"likes:", "members"}, {"stock:", "exact"},
}

// lastingConns returns how many connections the scenario needs at once, at most.
func lastingConns(cfg *Command) int {
	return 2*cfg.Users + len(cfg.URL)*(len(lastingKinds)*cfg.Pages/watchPages+1) + cfg.Users/4
}

func (c *crowd) lasting(ctx context.Context) error {
	r := &lastingRun{crowd: c}

	err := r.work(ctx)
	// The crowd counts subscribers as users, but the report is about users who change counters.
	c.users = c.cfg.Users

	var problem *client.Error
	if errors.As(err, &problem) && problem.Status == http.StatusUnauthorized {
		return fmt.Errorf("the server refuses the key or a token: give --api-key one of the server's, "+
			"and --jwt-secret the same value as the server has: %w", problem)
	}
	// An answer that breaks the contract is a finding, and the report must have it.
	if errors.Is(err, errUnexpected) {
		r.wrong("%v", err)
		return nil
	}
	return err
}

// open makes the tallies and the workers, and starts the subscribers.
func (r *lastingRun) open() {
	// A connection for each worker, because a worker has one call at a time.
	transport := &http.Transport{MaxIdleConnsPerHost: r.cfg.Users + getsAtOnce}
	r.web = &http.Client{Timeout: answerTimeout, Transport: transport}

	byPrefix := map[string][]*tally{}
	for _, k := range lastingKinds {
		for i := range r.cfg.Pages {
			t := newTally(k.kind, k.prefix+r.name+"/"+strconv.Itoa(i))
			byPrefix[k.prefix] = append(byPrefix[k.prefix], t)
			r.all = append(r.all, t)
		}
	}

	r.views = byPrefix["views:"]
	r.votes = byPrefix["votes:"]
	r.sets = byPrefix["likes:"]
	r.stocks = byPrefix["stock:"]
	r.sums = slices.Concat(r.views, r.votes, byPrefix[""])
	r.result.Counters = len(r.all)
	r.openQuotas()

	for i := range r.cfg.Users {
		// Each worker has random numbers of its own, so that they do not depend on the order of workers.
		w := &worker{lastingRun: r, number: i, rng: rand.New(rand.NewPCG(r.cfg.Seed, uint64(i+1)))}

		set := r.sets[i%len(r.sets)]
		// A quarter of the users are fans.
		if i >= r.cfg.Users-r.cfg.Users/4 {
			like := &membership{t: set, name: client.Me}
			w.fan = r.newUser()
			w.members = []*membership{like}
			// A fan gets its identity over its connection.
			r.fans = append(r.fans, r.subscribe(w.fan, like, set, r.votes[i%len(r.votes)]))
		} else {
			for n := range membersEach {
				w.members = append(w.members, &membership{t: set, name: fmt.Sprintf("worker %d/%d", i, n)})
			}
		}

		r.workers = append(r.workers, w)
	}

	// Each counter has a subscriber for each gateway, so that a gateway that lags is found.
	for batch := range slices.Chunk(r.all, watchPages) {
		for range r.cfg.URL {
			r.subscribe(r.newUser(), nil, batch...)
		}
	}
}

// subscribe starts a subscriber: a fan, if like is set, or a user with the API key.
func (r *lastingRun) subscribe(u *user, like *membership, tallies ...*tally) *tab {
	s := &subscriber{run: r, like: like, held: map[string]client.Counter{}, tallies: map[string]*tally{}}
	for _, t := range tallies {
		s.tallies[t.key] = t
	}

	r.subscribers = append(r.subscribers, s)
	return r.start(&tab{user: u, asks: s}, len(r.subscribers))
}

func (r *lastingRun) work(ctx context.Context) error {
	ctx, r.fail = context.WithCancelCause(ctx)
	defer r.fail(nil)

	group, ctx := errgroup.WithContext(ctx)
	r.open()
	defer r.web.CloseIdleConnections()

	err := r.awaitPlaces(ctx, r.fans)
	if err == nil {
		err = r.drive(ctx, group)
	}

	r.fail(nil) // ends the workers, whatever has ended the run
	if failure := group.Wait(); failure != nil && !errors.Is(failure, context.Canceled) {
		return failure
	}

	return err
}

// drive lets the workers change counters in rounds, with a checkpoint after each.
func (r *lastingRun) drive(ctx context.Context, group *errgroup.Group) error {
	// A value that no float64 holds exactly finds a server that computes with floats.
	first := r.workers[0]
	if err := first.adjust(ctx, r.sums[len(r.sums)-1], far); err != nil {
		return err
	}

	working, rest := context.WithCancel(ctx)
	defer rest()
	for _, w := range r.workers {
		group.Go(func() error { return w.busy(working) })
	}

	worked := time.Duration(0)
	for end := r.cfg.Duration; worked < end; {
		r.enterPhase("counting")
		before := r.calls.answered.Load()
		round := min(roundTime, end-worked)
		if err := sleep(ctx, round); err != nil {
			return err
		}

		// Only the rounds count, because checkpoints make calls of their own.
		r.result.Figures["calls_per_s"] += float64(r.calls.answered.Load() - before)

		worked += round
		name := "mid"
		if worked >= end {
			name = "final"
		}

		if err := r.checkpoint(ctx, name, rest); err != nil {
			return err
		}
	}

	r.result.Figures["calls_per_s"] /= worked.Seconds()

	r.sum()
	return r.clear(ctx)
}

// sum adds the figures to the report.
func (r *lastingRun) sum() {
	r.result.Figures["calls"] = float64(r.calls.answered.Load())
	r.result.Figures["p50_ms"] = r.calls.latency.ms(0.5)
	r.result.Figures["p99_ms"] = r.calls.latency.ms(0.99)
	for name, n := range map[string]int64{
		"retries":          r.calls.retries.Load(),
		"replays":          r.calls.replays.Load(),
		"refused":          r.calls.refused.Load(),
		"limited":          r.calls.limited.Load(),
		"limit_passed":     r.calls.passed.Load(),
		"limit_refused":    r.calls.held.Load(),
		"unavailable":      r.calls.unavailable.Load(),
		"lost_connections": r.calls.lost.Load(),
		"cut_connections":  r.calls.cuts.Load(),
	} {
		r.result.Figures[name] = float64(n)
	}
}

// busy acts until ctx ends.
func (w *worker) busy(ctx context.Context) error {
	for {
		// Locked for each call anew, so that a checkpoint can begin between two of them.
		w.gate.RLock()
		err := ctx.Err()
		if err == nil {
			err = w.act(ctx)
		}
		w.gate.RUnlock()

		// The end of the run has caused the error.
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// A worker changes counters, one call at a time. It is a server, or a fan: a user without API key, who gets an identity
// with its first WebSocket connection and makes all its calls as that user.
type worker struct {
	*lastingRun
	fan     *user // nil: it is a server
	number  int
	rng     *rand.Rand
	made    int // how many Idempotency-Keys it has made
	members []*membership
	past    []change // that it may repeat, at most remembered
}

// A membership is whether a member is in a set. One worker changes it, and a checkpoint
// reads it while no call is under way.
type membership struct {
	t    *tally
	name string
	in   bool // the member is in the set
}

// A change is a request and what it does to counters.
type change struct {
	call
	parts []part
}

type part struct {
	t     *tally
	delta int64
}

// pick draws a counter, the first ones most often.
func (w *worker) pick(of []*tally) *tally {
	// The square of a fraction is small more often than large.
	at := w.rng.Float64()
	return of[int(at*at*float64(len(of)))]
}

// act makes one random call.
func (w *worker) act(ctx context.Context) error {
	n := w.rng.IntN(100)
	if w.fan != nil {
		return w.visit(ctx)
	}

	switch {
	case n < 28:
		t := w.pick(w.sums)
		return w.add(ctx, t, w.delta(t))
	case n < 38:
		return w.batch(ctx)
	case n < 63:
		return w.add(ctx, w.pick(w.stocks), -1-w.rng.Int64N(3))
	case n < 76:
		return w.join(ctx, w.members[w.rng.IntN(len(w.members))])
	case n < 81:
		return w.edit(ctx)
	case n < 84:
		return w.adjust(ctx, w.pick(w.sums), w.rng.Int64N(1000)-1000)
	case n < 90:
		return w.look(ctx, w.pick(w.all), n < 88)
	case n < 95:
		return w.pass(ctx, w.quotas[w.rng.IntN(len(w.quotas))])
	default:
		return w.again(ctx)
	}
}

// delta draws a change of a sum.
func (w *worker) delta(t *tally) int64 {
	delta := 1 + w.rng.Int64N(5)
	// The rule of views permits no decrements.
	if slices.Contains(w.views, t) || w.rng.IntN(3) > 0 {
		return delta
	}
	return -1 - w.rng.Int64N(5)
}

// once returns an Idempotency-Key that no other call has.
func (w *worker) once() string {
	w.made++
	return fmt.Sprintf("%s-%d-%d", w.name, w.number, w.made)
}

// add increments or decrements by a delta.
func (w *worker) add(ctx context.Context, t *tally, delta int64) error {
	name := fmt.Sprintf("a change of %s by %d", t.key, delta)
	q := one(name, func(ctx context.Context, api *client.API) (client.Counter, error) {
		if delta < 0 {
			return api.Decrement(ctx, t.key, -delta)
		}
		return api.Increment(ctx, t.key, delta)
	})

	q.once = w.once()
	q.who = w.fan

	return w.change(ctx, change{q, []part{{t, delta}}})
}

func (w *worker) adjust(ctx context.Context, t *tally, delta int64) error {
	name := fmt.Sprintf("a correction of %s by %d", t.key, delta)
	q := one(name, func(ctx context.Context, api *client.API) (client.Counter, error) {
		return api.Adjust(ctx, t.key, delta, "a correction", fmt.Sprint("worker ", w.number))
	})

	q.once = w.once()
	return w.change(ctx, change{q, []part{{t, delta}}})
}

// restock raises a stock.
func (w *worker) restock(ctx context.Context, t *tally) error {
	n := 5 + w.rng.Int64N(20)
	if w.rng.IntN(4) == 0 {
		return w.adjust(ctx, t, n)
	}
	return w.add(ctx, t, n)
}

// batch changes several counters in one call: sums, or stocks, of which it lowers all or none. All changes of a batch
// have the same sign, so that none cancels another.
func (w *worker) batch(ctx context.Context) error {
	of := w.sums
	sign := int64(1)
	most := int64(9)
	switch w.rng.IntN(6) {
	case 0, 1:
		of = w.votes
		sign = -1
	case 2, 3:
		of = w.stocks
		sign = -1
		most = 2
	}

	var parts []part
	var changes []client.Change
	// A key may occur twice, as an article may in an order.
	for range 1 + w.rng.IntN(8) {
		p := part{w.pick(of), sign * (1 + w.rng.Int64N(most))}
		parts = append(parts, p)
		changes = append(changes, client.Change{Key: p.t.key, Delta: p.delta})
	}

	name := fmt.Sprintf("a batch of %d changes", len(parts))
	do := func(ctx context.Context, api *client.API) ([]client.Counter, error) {
		return api.Change(ctx, changes...)
	}
	return w.change(ctx, change{call{name: name, once: w.once(), do: do}, parts})
}

// join adds a member to its set or removes it. Sometimes the member is in or out already.
func (w *worker) join(ctx context.Context, m *membership) error {
	in := !m.in
	// A member that is added twice must count once.
	if w.rng.IntN(8) == 0 {
		in = m.in
	}

	c := change{toggle(m.t, m.name, in), []part{{m.t, toggled(m.in, in)}}}
	c.who = w.fan
	m.in = in // already now, because the call is repeated until it is answered

	return w.change(ctx, c)
}

// toggle returns a call that adds a member, or removes it.
func toggle(t *tally, member string, in bool) call {
	do := (*client.API).RemoveMember
	if in {
		do = (*client.API).AddMember
	}

	name := fmt.Sprintf("the change of a member of %s (in: %t)", t.key, in)
	return one(name, func(ctx context.Context, api *client.API) (client.Counter, error) {
		got, err := do(api, ctx, t.key, member)
		if err == nil && *got.Member != in {
			err = fmt.Errorf("%w: %s: the answer says %t", client.ErrFrame, name, *got.Member)
		}
		return got, err
	})
}

// toggled returns by how much the set grows when a member's state changes.
func toggled(from, to bool) int64 {
	if from == to {
		return 0
	}
	if to {
		return 1
	}
	return -1
}

// edit makes all members of the worker join or leave in one call.
func (w *worker) edit(ctx context.Context) error {
	var lists [2][]string // those who leave, those who join
	delta := int64(0)
	for _, m := range w.members {
		in := w.rng.IntN(2)
		lists[in] = append(lists[in], m.name)
		delta += toggled(m.in, in == 1)
		m.in = in == 1
	}

	t := w.members[0].t
	q := one("an edit of "+t.key, func(ctx context.Context, api *client.API) (client.Counter, error) {
		return api.EditMembers(ctx, t.key, lists[1], lists[0])
	})

	q.once = w.once()
	return w.change(ctx, change{q, []part{{t, delta}}})
}

// change makes a change and checks its answer.
func (w *worker) change(ctx context.Context, c change) error {
	moments := make([]moment, len(c.parts))
	for i, p := range c.parts {
		moments[i] = p.t.start(p.delta)
	}

	cuts := 0.0
	if c.once != "" {
		cuts = w.cfg.KillFraction
	}

	for unknown := false; ; {
		got, err := w.call(ctx, w.rng, c.call, cuts)
		if err != nil {
			return err
		}

		// A try without an answer, in any round of this loop, may still be made until the change is made.
		unknown = unknown || got.unknown
		if got.conflict != nil {
			w.calls.refused.Add(1)

			short, err := w.short(got, c)
			if err != nil {
				return err
			}
			if unknown {
				// A try without an answer may still be on its way and find more stock than this one. So the change is
				// repeated until it is made.
				if err := w.restock(ctx, short.t); err != nil {
					return err
				}
				continue
			}
			return w.refuse(ctx, c, moments, short)
		}

		if err := w.judge(c, moments, got); err != nil {
			return err
		}
		if got.replay && !unknown {
			w.wrong("%s: the answer calls it a repetition, but it was sent once", c.name)
		}

		for _, p := range c.parts {
			p.t.land(p.delta)
		}

		if c.once != "" {
			w.remember(c)
		}

		return nil
	}
}

// short finds the part of a change that its floor refused.
func (w *worker) short(got reply, c change) (part, error) {
	// A counter may be in a batch several times, so the changes are added up in their order.
	at := map[string]int64{} // where each part leaves its counter
	for _, p := range c.parts {
		at[p.t.key] += p.delta
		if p.t.kind == "exact" && p.delta < 0 && p.t.key == got.conflict.Key {
			return part{p.t, at[p.t.key]}, nil
		}
	}
	return part{}, unexpected(c.name, got.conflict)
}

// refuse checks that a change had to be refused, and records that it was not made.
func (w *worker) refuse(ctx context.Context, c change, moments []moment, short part) error {
	at := slices.IndexFunc(c.parts, func(p part) bool { return p.t == short.t })
	// Other workers change the stock meanwhile, so a refusal is wrong only if no moment explains it.
	if short.t.fits(moments[at]) && short.t.doubt() {
		w.wrong("counter %q: a change by %d was refused, but there was enough all the time", short.t.key, short.delta)
	}

	for _, p := range c.parts {
		p.t.refuse(p.delta)
	}

	if w.rng.IntN(3) == 0 {
		return w.restock(ctx, short.t)
	}
	return nil
}

// judge checks the answer to a change that was made.
func (w *worker) judge(c change, moments []moment, got reply) error {
	for i, p := range c.parts {
		l := &got.counters[i]
		if err := p.t.check(l); err != nil {
			return unexpected(c.name, fmt.Errorf("counter %q: %w", p.t.key, err))
		}

		w.bounded(p.t, moments[i], l, !got.replay && p.delta != 0)
		p.t.saw(l.Version)
	}
	return nil
}

// bounded checks an answer of after a moment: its value must be possible since then. If its call has changed the
// counter, the version must have grown.
func (r *lastingRun) bounded(t *tally, since moment, l *client.Counter, changed bool) {
	// A value that is not exact may lag.
	if !l.Exact {
		return
	}
	low, high := t.bounds(since)
	if (l.Value < low || l.Value > high) && t.doubt() {
		r.wrong("counter %q: an answer says %d; it was from %d to %d all the time", t.key, l.Value, low, high)
	}

	older := l.Version.Before(since.newest)
	same := l.Version == since.newest
	if older || changed && same {
		r.wrong("counter %q: an answer has version %s; an earlier change had %s", t.key, l.Version, since.newest)
	}
}

func (w *worker) remember(c change) {
	if len(w.past) < remembered {
		w.past = append(w.past, c)
		return
	}
	// It replaces a random one, so that both old and new changes are repeated.
	w.past[w.rng.IntN(remembered)] = c
}

// again repeats a change that was answered.
func (w *worker) again(ctx context.Context) error {
	if len(w.past) == 0 {
		return nil
	}

	c := w.past[w.rng.IntN(len(w.past))]
	moments := make([]moment, len(c.parts))
	for i, p := range c.parts {
		moments[i] = p.t.now()
	}

	got, err := w.call(ctx, w.rng, c.call, 0)
	if err != nil {
		return err
	}

	if got.conflict == nil && !got.replay {
		w.wrong("%s: an answered change was repeated with its Idempotency-Key, and the server made it again", c.name)
		return nil
	}

	if got.conflict != nil {
		return unexpected(c.name, got.conflict)
	}

	return w.judge(c, moments, got)
}

// look reads a counter while it moves.
func (w *worker) look(ctx context.Context, t *tally, exact bool) error {
	// Taken before the read: its value must include what was acknowledged by then.
	since := t.now()
	l, err := w.read(ctx, w.rng, t, exact)
	if err != nil {
		return err
	}

	if exact && !l.Exact {
		w.wrong("counter %q: an exact read does not call itself exact", t.key)
	}
	if exact {
		w.bounded(t, since, &l, false)
	}
	return nil
}

// visit lets a fan vote or like.
func (w *worker) visit(ctx context.Context) error {
	if err := sleep(ctx, fanPause/2+rand.N(fanPause)); err != nil {
		return err
	}

	if w.rng.IntN(2) == 0 {
		return w.add(ctx, w.pick(w.votes), 1)
	}
	return w.join(ctx, w.members[0])
}
