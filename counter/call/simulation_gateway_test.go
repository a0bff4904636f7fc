package call_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/rows"
)

// gateway changes counters until stop is closed. Now and then it is killed, and another life takes its place.
func (s *simulation) gateway(number int, stop <-chan struct{}) {
	dice := s.dice(fmt.Sprint("gateway ", number), "lives", 0)
	for n := 0; ; n++ {
		l, ctx := s.live(number, n)

		var workers sync.WaitGroup
		for w := range simWorkers {
			dice := s.dice(l.name, "works", w)
			who := fmt.Sprint(l.name, ", worker ", w)
			workers.Go(func() { s.work(ctx, who, l, dice, stop) })
		}

		killed := false
		if dice.Chance(0.5) {
			select {
			case <-time.After(2*time.Second + dice.UpTo(20*time.Second)):
				killed = true
				l.kill()
			case <-stop:
			}
		}
		workers.Wait()

		// The last life ends with the simulation: webhooks still report its changes.
		if !killed {
			return
		}
	}
}

// work makes one change after another.
func (s *simulation) work(ctx context.Context, who string, l *life, dice *simtest.Dice, stop <-chan struct{}) {
	for ctx.Err() == nil {
		select {
		case <-stop:
			return
		case <-time.After(dice.UpTo(300 * time.Millisecond)):
			s.change(ctx, who, l, dice)
		case <-ctx.Done():
			return
		}
	}
}

// change makes one change of a counter, or several of them together, and notes the answer.
func (s *simulation) change(ctx context.Context, who string, l *life, dice *simtest.Dice) {
	key := s.keys[dice.Below(s.busy())]
	delta := int64(1 + dice.Below(9))
	if dice.Chance(0.45) {
		delta = -delta
	}
	op := counter.Op{Changes: []counter.Change{{Key: key, Rule: ruleOf(key), Verb: counter.Add, Delta: delta}}}

	// Another gateway may repeat a change with an idempotency key.
	name, known := "", false
	if dice.Chance(0.3) {
		name = fmt.Sprint(key, " ", dice.Below(40))
		op.IdempotencyKey = counter.NewIdempotencyKey(key, "", name)
		delta, known = s.identify(name, key, delta)
		op.Changes[0].Delta = delta
	}

	partition := rows.PartitionOf(key)
	s.Logf("%s asks: %s of partition %d by %d, idempotency key %q", who, key, partition, delta, name)
	answer, err := l.do(ctx, key, op)
	if err != nil {
		s.Logf("%s is not answered: %v", who, err)
		s.unanswered(key, name, delta, err)
		return
	}

	result := answer.Results[0]
	for _, c := range result.Counters {
		s.Logf("%s is answered: %s is %d, version %v, replay %t", who, key, c.Value, c.Version, result.Replay)
	}

	if result.Err != nil {
		s.Logf("%s is refused: %v", who, result.Err)
	}
	s.answered(key, name, delta, known, result)
}

// identify returns the delta of the change with that idempotency key, and whether it was acknowledged already.
func (s *simulation) identify(name, key string, delta int64) (is int64, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	one := s.ids[name]
	if one == nil {
		one = &identified{key: key, delta: delta}
		s.ids[name] = one
	}

	return one.delta, one.acknowledge
}

func (s *simulation) unanswered(key, name string, delta int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	switch {
	// ErrBusy promises that nothing was made, so the change counts neither as made nor as possible.
	case errors.Is(err, counter.ErrBusy):
	case name != "":
		s.ids[name].unknown = true
	default:
		s.expected[key].maybe = append(s.expected[key].maybe, delta)
	}
}

func (s *simulation) answered(key, name string, delta int64, known bool, result counter.Result) {
	if result.Err != nil && !errors.Is(result.Err, counter.ErrBound) {
		s.Failf("own change", "%s by %d: %v", key, delta, result.Err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	if result.Err != nil {
		// An acknowledged change must be known: a refusal would tell the client that it was not made.
		if known {
			s.Failf("once", "%s was made, and its repetition is refused: %v", name, result.Err)
		}
		return
	}

	c := result.Counters[0]
	if c.Value < 0 && c.Kind == counter.Exact {
		s.Failf("–", "%s is %d, below its floor", key, c.Value)
	}
	// Clients keep the value of the newest version. Two values under one version would leave clients with different
	// counts.
	at := fmt.Sprint(key, "@", c.Version)
	if value, ok := s.versions[at]; ok && value != c.Value {
		s.Failf("ordered", "%s is %d and %d", at, value, c.Value)
	}
	s.versions[at] = c.Value

	if name == "" {
		s.expected[key].sum += delta
		return
	}
	is := s.ids[name]
	is.acknowledge = true
	if !result.Replay {
		is.changed++
	}
}

// check compares the counters in the store with what was acknowledged.
func (s *simulation) check() {
	for name, is := range s.ids {
		if is.changed > 1 {
			s.Failf("once", "%s was made %d times", name, is.changed)
		}
		// Each key counts once, however often it was sent and by how many gateways.
		e := s.expected[is.key]
		switch {
		case is.acknowledge:
			e.sum += is.delta
		case is.unknown:
			e.maybe = append(e.maybe, is.delta)
		}
	}

	for _, key := range s.keys {
		read, err := owner.NewReader(s.world.store, rows.PartitionOf).Read(context.Background(), []string{key}, "", 0)
		if err != nil {
			s.Failf("newest", "%v", err)
			continue
		}

		e := s.expected[key]
		c := read[0]
		s.Logf("check: %s is %d, %d was acknowledged, perhaps also some of %v", key, c.Value, e.sum, e.maybe)
		if !canBe(c.Value-e.sum, e.maybe) {
			s.Failf("once", "%s is %d, and %d was acknowledged, perhaps also some of %v", key, c.Value, e.sum, e.maybe)
		}
	}
}

// canBe reports whether some of the deltas, or none, add up to sum.
func canBe(sum int64, deltas []int64) bool {
	// All sums that are possible, and not the subsets: there may be dozens of deltas, all of them small.
	sums := map[int64]bool{0: true}
	for _, delta := range deltas {
		for _, s := range slices.Collect(maps.Keys(sums)) {
			sums[s+delta] = true
		}
	}

	return sums[sum]
}
