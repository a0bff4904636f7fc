package simulate

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"headcount/client"
)

const (
	ledgerPage  = 1000
	severalKeys = 100
)

// checkpoint compares the truth with the server. It has two stages:
//
//   - quiet: no call begins any more, and it waits until all calls are answered.
//   - settling: exact reads, ledgers, sets, limits and sums over prefixes must be right at once. Reads that may lag,
//     and the values that subscribers hold, must be right within 10 s, which begin anew when a connection was lost or
//     the store was away.
//
// A wrong value is reported once: from then on it counts as right. At the final checkpoint rest ends the workers.
func (r *lastingRun) checkpoint(ctx context.Context, name string, rest func()) error {
	defer r.enterPhase(r.enterPhase("checkpoint " + name))
	began := time.Now()

	// Waits for the calls under way, which hold the gate for reading, and keeps new ones out.
	r.gate.Lock()
	defer r.gate.Unlock()

	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}

	// While the gate is locked, so that no worker begins another call.
	if name == "final" {
		rest()
	}

	quiet := time.Now()
	before, _ := r.faults.get()
	cp := Checkpoint{
		Name:     name,
		Users:    len(r.workers),
		Clients:  len(r.subscribers),
		Counters: len(r.all),
		QuietMS:  quiet.Sub(began).Milliseconds(),
	}

	gets, err := r.checkExact(ctx)
	if err == nil {
		err = r.converge(ctx)
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}

	after, _ := r.faults.get()
	failures := r.calls.failures() + r.stats.drops.Load()
	cp.Failures = failures - r.failures
	r.failures = failures
	cp.Gets = gets
	cp.Wrong = after - before
	cp.AtS = time.Since(r.began).Seconds()
	cp.SettleMS = time.Since(quiet).Milliseconds()

	r.result.Checkpoints = append(r.result.Checkpoints, cp)
	return nil
}

// checkExact checks everything that must be right at once, and returns how many values and members it has read.
func (r *lastingRun) checkExact(ctx context.Context) (gets int, err error) {
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(getsAtOnce)
	look := func(what func(ctx context.Context, rng *rand.Rand) error) {
		gets++
		// Each goroutine has a source of its own. It is seeded from the driver's, so that a seed repeats a run.
		rng := rand.New(rand.NewPCG(r.rng.Uint64(), 0))
		group.Go(func() error { return what(gctx, rng) })
	}

	for _, t := range r.all {
		look(func(ctx context.Context, rng *rand.Rand) error { return r.checkValue(ctx, rng, t) })
	}
	for _, w := range r.workers {
		for _, m := range w.members {
			look(func(ctx context.Context, rng *rand.Rand) error {
				err := r.checkMember(ctx, rng, m, m.name, w.fan)
				if err == nil && w.fan != nil {
					err = r.checkMember(ctx, rng, m, w.fan.called(), nil) // with the API key, by the fan's name
				}
				return err
			})
		}
	}

	if err := group.Wait(); err != nil {
		return gets, err
	}

	for _, q := range r.quotas {
		q.check(r.wrong)
	}
	for i := range lastingKinds {
		if err := r.checkSum(ctx, i); err != nil {
			return gets, err
		}
	}

	return gets, nil
}

// checkValue compares the exact value, with one read for each gateway, and the ledger.
func (r *lastingRun) checkValue(ctx context.Context, rng *rand.Rand, t *tally) error {
	// Each read goes to a random gateway, so that most gateways are asked.
	for range r.cfg.URL {
		since := t.now()
		l, err := r.read(ctx, rng, t, true)
		if err != nil {
			return err
		}
		if want := t.value(); l.Value != want {
			t.doubt() // so that later answers do not report it again
			r.wrong("counter %q: its exact value is %d; the acknowledged changes are %d", t.key, l.Value, want)
			t.correct(l.Value)
		}
		r.bounded(t, since, &l, false)
	}

	t.trust() // later answers are judged by the value that was just read
	if t.kind == "exact" {
		return r.checkLedger(ctx, rng, t)
	}
	return nil
}

// checkLedger reads the new entries of a ledger. They must begin where the last checkpoint ended, add up to the value,
// and be as many as the changes that were acknowledged.
func (r *lastingRun) checkLedger(ctx context.Context, rng *rand.Rand, t *tally) error {
	for {
		var entries []client.Entry
		var next uint64
		_, err := r.ask(ctx, rng, other("the ledger of "+t.key, func(ctx context.Context, api *client.API) (err error) {
			entries, next, err = api.Ledger(ctx, t.key, t.read, ledgerPage)
			return err
		}))
		if err != nil {
			return err
		}

		for _, e := range entries {
			r.checkEntry(t, e)
		}

		if next == 0 {
			break
		}

		// With such a next the loop would read the same page for ever.
		if len(entries) == 0 || next != t.read {
			return fmt.Errorf("%w: the ledger of %s: next is %d after entry %d", errUnexpected, t.key, next, t.read)
		}
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	value := t.landed.up - t.landed.down
	if t.after != value {
		r.wrong("counter %q: its ledger ends with %d; the value is %d", t.key, t.after, value)
		t.after = value
	}

	if t.read != t.entries {
		r.wrong("counter %q: its ledger has %d entries; %d changes were acknowledged", t.key, t.read, t.entries)
		t.entries = t.read
	}
	return nil
}

func (r *lastingRun) checkEntry(t *tally, e client.Entry) {
	if e.Seq != t.read+1 {
		r.wrong("counter %q: entry %d of its ledger follows entry %d", t.key, e.Seq, t.read)
	} else if e.Before != t.after {
		r.wrong("counter %q: entry %d of its ledger has %d before; the entry before has %d after",
			t.key, e.Seq, e.Before, t.after)
	} else if e.Before+e.Delta != e.After || e.After < 0 {
		r.wrong("counter %q: entry %d of its ledger: %d and %d is not %d, or is below 0",
			t.key, e.Seq, e.Before, e.Delta, e.After)
	} else if !possible(e) {
		r.wrong("counter %q: entry %d of its ledger cannot be: %+v", t.key, e.Seq, e)
	}

	if e.At.IsZero() {
		r.wrong("counter %q: entry %d of its ledger has no time", t.key, e.Seq)
	}

	// The next entry is compared with this one even after a fault, so that each gap is reported once.
	t.read = e.Seq
	t.after = e.After
}

// possible reports whether the operation of an entry can have its sign, its reason and its author.
func possible(e client.Entry) bool {
	explained := e.Reason != "" && e.By != ""
	switch e.Op {
	case "increment":
		return e.Delta >= 0 && !explained
	case "decrement":
		return e.Delta <= 0 && !explained
	case "adjust":
		return explained
	}
	return false
}

// checkMember asks whether a member is in its set, under a name: as the fan who, or with the API key.
func (r *lastingRun) checkMember(ctx context.Context, rng *rand.Rand, m *membership, name string, who *user) error {
	call := fmt.Sprintf("GET of member %q of %s", name, m.t.key)
	q := one(call, func(ctx context.Context, api *client.API) (client.Counter, error) {
		return api.Member(ctx, m.t.key, name)
	})
	q.who = who

	l, err := r.counter(ctx, rng, m.t, q)
	if err == nil && *l.Member != m.in {
		r.wrong("counter %q: member %q is in it: %t; the truth is %t", m.t.key, name, *l.Member, m.in)
		m.in = *l.Member
	}
	return err
}

// checkSum compares the sum over all counters of one rule.
func (r *lastingRun) checkSum(ctx context.Context, kind int) error {
	want := int64(0)
	least := 0 // counters that must exist
	most := r.cfg.Pages
	// r.all is in the order of lastingKinds.
	for _, t := range r.all[kind*r.cfg.Pages : (kind+1)*r.cfg.Pages] {
		want += t.value()
		if t.touched() {
			least++
		}
	}

	match := lastingKinds[kind].prefix + r.name + "/*"
	var sum client.Aggregate
	q := other("the aggregate of "+match, func(ctx context.Context, api *client.API) (err error) {
		sum, err = api.Aggregate(ctx, match)
		return err
	})
	if _, err := r.ask(ctx, r.rng, q); err != nil {
		return err
	}

	if sum.Value != want || sum.Counters < least || sum.Counters > most {
		r.wrong("the aggregate of %q is %d over %d counters; the true sum is %d over %d",
			match, sum.Value, sum.Counters, want, least)
	}
	return nil
}

// converge waits until all subscribers and reads that may lag have the truth.
func (r *lastingRun) converge(ctx context.Context) error {
	failures := r.calls.failures() + r.stats.drops.Load()
	began := time.Now()
	since := began

	for {
		wrong := &faults{}
		for _, s := range r.subscribers {
			s.compare(wrong)
		}

		if wrong.n == 0 {
			if err := r.readAll(ctx, wrong); err != nil {
				return err
			}
		}

		now := r.calls.failures() + r.stats.drops.Load()
		// After a failure the time begins anew, but not for ever: a server that fails again and again is wrong.
		if now != failures && time.Since(began) < placeLimit {
			failures = now
			since = time.Now()
		}

		if wrong.n == 0 || time.Since(since) > r.settle {
			r.faults.merge(wrong)
			return nil
		}

		if err := sleep(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// readAll reads all counters, many with each call, and compares them.
func (r *lastingRun) readAll(ctx context.Context, wrong *faults) error {
	for batch := range slices.Chunk(r.all, severalKeys) {
		keys := make([]string, len(batch))
		for i, t := range batch {
			keys[i] = t.key
		}

		const name = "a read of several counters"
		do := func(ctx context.Context, api *client.API) ([]client.Counter, error) {
			return api.Counters(ctx, keys...)
		}
		got, err := r.ask(ctx, r.rng, call{name: name, do: do})
		if err != nil {
			return err
		}

		for i, t := range batch {
			l := &got[i]
			if err := t.check(l); err != nil {
				return unexpected(name, fmt.Errorf("counter %q: %w", t.key, err))
			}
			if want := t.value(); l.Value != want || l.Stale {
				wrong.add("counter %q: a read of several counters says %d (stale: %t); the true value is %d",
					t.key, l.Value, l.Stale, want)
			}
		}
	}
	return nil
}

// clear deletes the counters of the run.
func (r *lastingRun) clear(ctx context.Context) error {
	defer r.enterPhase(r.enterPhase("deleting"))
	r.deleting.Store(true)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(getsAtOnce)
	for _, t := range r.all {
		rng := rand.New(rand.NewPCG(r.rng.Uint64(), 0))
		group.Go(func() error {
			q := other("DELETE of "+t.key, func(ctx context.Context, api *client.API) error {
				return api.Delete(ctx, t.key)
			})
			if _, err := r.ask(ctx, rng, q); err != nil {
				return err
			}

			l, err := r.read(ctx, rng, t, true)
			if err == nil && (l.Value != 0 || l.Version != client.Version{}) {
				r.wrong("counter %q: after DELETE its value is %d and its version %s", t.key, l.Value, l.Version)
			}

			return err
		})
	}

	return group.Wait()
}
