package region_test

import (
	"context"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/rows"
)

// work makes one change of a region's counters after another.
func (r *simRegion) work(w int, stop <-chan struct{}) {
	name := fmt.Sprint(r.name, " works ", w)
	dice := simtest.NewDice(r.of.seed, name)
	caller := call.New(r, call.Config{Stream: name})
	mine := map[string]int{} // members of each set that this worker has added
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Millisecond + dice.UpTo(500*time.Millisecond)):
		}

		if !r.begin() {
			continue
		}
		r.change(caller, dice, name, mine)
		r.busy.Done()
	}
}

// begin reports whether a change may be made.
func (r *simRegion) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.paused || !r.joined {
		return false
	}
	r.busy.Add(1)

	return true
}

// change makes one change, and notes what it was.
func (r *simRegion) change(caller *call.Caller, dice *simtest.Dice, name string, mine map[string]int) {
	s := r.of
	k := simKeys[dice.Below(len(simKeys))]
	if k.quiet && time.Since(s.Start) > simLoud {
		return
	}

	c := counter.Change{Key: k.key, Rule: k.rule, Verb: counter.Add}
	if k.resets && dice.Chance(0.2) {
		c.Verb = counter.Reset
		if dice.Chance(0.3) {
			c.Verb = counter.Delete
		}
		r.do(caller, c)
		return
	}

	switch k.rule.Kind {
	case counter.Sum:
		c.Delta = int64(dice.Below(9)) - 3
		if c.Delta == 0 {
			c.Delta = 10
		}

	case counter.Members:
		c.Verb = counter.Edit
		mine[k.key]++
		c.Join = []string{fmt.Sprint(name, mine[k.key])}
		if last := mine[k.key] - 2; last > 0 && dice.Chance(0.4) {
			c.Leave = []string{fmt.Sprint(name, last)}
		}

	case counter.Unique:
		c.Verb = counter.Edit
		c.Join = []string{fmt.Sprint("visitor ", dice.Below(60))}
	}

	r.do(caller, c)

	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case k.resets:
	case k.rule.Kind == counter.Sum:
		s.sums[k.key] += c.Delta
	case k.rule.Kind == counter.Members:
		s.likes[k.key] += int64(len(c.Join) - len(c.Leave))
	default:
		s.seen[k.key].Add(c.Join...)
	}
}

// do makes a change, and repeats it until it succeeds.
func (r *simRegion) do(caller *call.Caller, c counter.Change) {
	op := counter.Op{Changes: []counter.Change{c}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r.of.Logf("%s asks: %s %v %d", r.name, c.Key, c.Verb, c.Delta)
	answer, err := caller.Do(ctx, owner.Call{Partition: rows.PartitionOf(c.Key), Ops: []counter.Op{op}})
	if err == nil {
		err = answer.Results[0].Err
	}
	if err != nil {
		r.of.Failf("own change", "%s: %s %v: %v", r.name, c.Key, c.Verb, err)
		return
	}

	is := answer.Results[0].Counters[0]
	r.of.Logf("%s is answered: %s is %d, version %v", r.name, c.Key, is.Value, is.Version)
	r.mu.Lock()
	r.noteLocked(c.Key, is.Version, is.Value)
	r.mu.Unlock()
}

// read returns a counter from the store of a region.
func (r *simRegion) read(key string) counter.Counter {
	way := &way{to: r.home, dice: simtest.NewDice(0, ""), most: 1}
	way.passes = func() bool { return true }
	way.lost = func() float64 { return 0 }
	read, err := owner.NewReader(way, rows.PartitionOf).Read(context.Background(), []string{key}, "", 0)
	if err != nil {
		r.of.Failf("newest", "%v", err)
		return counter.Counter{}
	}

	return read[0].Counter
}

// check compares the regions with each other, and with what was acknowledged.
func (s *simulation) check() {
	for _, k := range simKeys {
		first := s.regions[0].read(k.key)
		for _, r := range s.regions[1:] {
			if is := r.read(k.key); is.Value != first.Value || is.Touched() != first.Touched() {
				s.Failf("newest", "%s: %s has %+v, %s has %+v", k.key, s.regions[0].name, first, r.name, is)
			}
		}

		s.Logf("check: %s is %d", k.key, first.Value)
		want := first.Value
		isKnown := !s.lossy // a lost member makes the set smaller than what was acknowledged
		switch {
		case k.resets:
		case k.rule.Kind == counter.Sum:
			want = s.sums[k.key]
		case k.rule.Kind == counter.Members:
			if isKnown {
				want = s.likes[k.key]
			}
		case k.rule.Kind == counter.Unique:
			want = s.seen[k.key].Count()
		}

		if first.Value != want {
			s.Failf("once", "%s is %d, and %d was acknowledged", k.key, first.Value, want)
		}
	}
}

// epilogue resets counters in one region, and then counts in all regions.
func (s *simulation) epilogue() {
	var callers []*call.Caller
	for _, r := range s.regions {
		callers = append(callers, call.New(r, call.Config{Stream: r.name + " ends"}))
	}

	for i, k := range simKeys {
		at := i % len(s.regions)
		s.regions[at].do(callers[at], counter.Change{Key: k.key, Rule: k.rule, Verb: counter.Reset})
	}

	time.Sleep(simSettle)
	for _, k := range simKeys {
		for _, r := range s.regions {
			if is := r.read(k.key); is.Value != 0 {
				s.Failf("newest", "%s: %s is %d after a reset", r.name, k.key, is.Value)
			}
		}
	}

	for i, r := range s.regions {
		for _, k := range simKeys {
			c := counter.Change{Key: k.key, Rule: k.rule, Verb: counter.Edit, Join: []string{fmt.Sprint("last ", i)}}
			if k.rule.Kind == counter.Sum {
				c.Verb = counter.Add
				c.Delta = 1
				c.Join = nil
			}
			r.do(callers[i], c)
		}
	}

	time.Sleep(simSettle)
	for _, k := range simKeys {
		for _, r := range s.regions {
			if is := r.read(k.key); is.Value != int64(len(s.regions)) {
				s.Failf("once", "%s: %s is %d after a reset and %d additions", r.name, k.key, is.Value, len(s.regions))
			}
		}
	}
}
