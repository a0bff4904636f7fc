package rowstier

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter/simtest"
	"headcount/internal/models/modeltest"
	"headcount/internal/rows"
)

// The simulation records what it does to one partition as actions of internal/models/behind.pml, and spin searches for
// a run of the model that does the same. So what is proved of the model holds for the product.

// action is one action of the model. The model describes the fields that each kind has.
type action struct {
	kind       int
	slot       int // of the process
	former     uint64
	epoch      uint64
	after      uint64
	number     uint64
	value      version
	isEvicted  bool // no value, because the row is evicted
	to         uint64
	token      string
	isComplete bool
	outcome    int
	isOdd      bool // without its answer it has no effect, and is left out
	seen       bool // the answer arrives
}

// Kinds of actions, as the model numbers them.
const (
	claims = iota + 1
	commits
	isAnswered
	takeoverEnds
	readsState
	readsDrained
	takes
	gives
	lists
	readsRow
	confirms
	readsChanged
	restores
	reads
	readsOn
	releases
	evicts
	ends
	loses
	comesLate
	yields
	holds
	checks
	hasRival
	sends
	isDrain
	isDrained
)

var kinds = map[int]string{
	claims: "claim", commits: "commit", isAnswered: "commit is answered", takeoverEnds: "takeover ends",
	readsState: "state", readsDrained: "drained", takes: "takes", gives: "token", lists: "marks",
	readsRow: "undrained row", confirms: "confirmation", readsChanged: "changed rows", restores: "restoration",
	reads: "read", readsOn: "read in the durable store", releases: "release", evicts: "eviction", ends: "end",
	loses: "loss", comesLate: "late claim", yields: "overtaken before a drain", holds: "hold",
	checks: "check of a drain", hasRival: "rival", sends: "drain is sent", isDrain: "drain",
	isDrained: "drain is answered",
}

// Outcomes, as the model numbers them.
const (
	isLost = iota + 1
	isFenced
	isMade
	isNever
	isRefused
	isOwned
	hasFailed
	isOvertaken
)

var outcomes = map[int]string{
	isLost: "lost", isFenced: "fenced", isMade: "made", isNever: "does not arrive", isRefused: "refused by the tier",
	isOwned: "owned", hasFailed: "failed", isOvertaken: "overtaken",
}

func outcomeOf(err error) int {
	switch err.(type) {
	case nil:
		return isMade
	case *rows.Fenced:
		return isFenced
	case *rows.Lost:
		return isLost
	default:
		return 0
	}
}

// recorder records the actions on a partition. A nil recorder records nothing. Its methods may be called from any
// goroutine.
type recorder struct {
	partition int

	mu      sync.Mutex // guards the fields below, and the actions
	actions []*action
}

// add records an action of a process that lives, and returns it.
func (r *recorder) add(p *process, partition int, one action) *action {
	if r == nil || partition != r.partition || p != nil && p.IsDead() {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	if p != nil {
		one.slot = p.slot
	}
	r.actions = append(r.actions, &one)

	return &one
}

// see records that answers are not lost.
func (r *recorder) see(seen ...*action) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	for _, one := range seen {
		if one != nil {
			one.seen = true
		}
	}
}

func (r *recorder) claim(p *process, kind callKind, former rows.Former, is rows.Claim) *action {
	switch {
	case kind == takesOver:
		return r.add(p, former.Partition, action{
			kind: claims, former: former.Epoch, epoch: is.Epoch, number: is.Number,
		})
	case is.Epoch == 0:
		return r.add(p, former.Partition, action{kind: yields, isOdd: true})
	default:
		return r.add(p, former.Partition, action{kind: comesLate, epoch: is.Epoch})
	}
}

func (r *recorder) commitFast(p *process, kind callKind, c *rows.Commit, arrives bool, err error) *action {
	one := action{epoch: c.Epoch, after: c.After, number: c.Number, outcome: outcomeOf(err)}
	isProbe := c.After == c.Number // which changes nothing, see probeOf
	isConfirmation := kind == takesOver && isProbe
	switch {
	case kind == turns:
		one.kind = commits
		if !arrives {
			one.outcome = isNever
		}
	case !arrives:
		return nil
	case isConfirmation:
		one.kind = confirms
		one.isOdd = true
	case kind == takesOver:
		one.kind = restores
	case p.tracked.checks(c.Partition):
		one.kind = checks
		one.isOdd = true
	default:
		return nil // before the claim: it has no effect
	}

	if row, writes := valueOf(c); writes {
		one.value = decodeVersion(row.Value)
		one.isEvicted = row.Value == nil
	}
	if i := slices.IndexFunc(c.Rows, func(row rows.Row) bool { return row.Name == stateName }); i >= 0 {
		is, _ := decodeState(c.Rows[i].Value)
		one.token = is.token
		one.isComplete = is.complete
	}

	return r.add(p, c.Partition, one)
}

func (r *recorder) answer(p *process, partition int) { r.add(p, partition, action{kind: isAnswered}) }

// refused records that the tier has refused a commit, and sent nothing.
func (r *recorder) refused(o *partitionOwner, c *rows.Commit) {
	if o.hasSent.Load() {
		return
	}

	r.add(o.process, c.Partition, action{
		kind: commits, epoch: c.Epoch, after: c.After, number: c.Number, outcome: isRefused,
	})
}

// ended records how a takeover has ended.
func (r *recorder) ended(o *partitionOwner, is rows.Claim, err error) {
	one := action{kind: takeoverEnds, epoch: is.Epoch, number: is.Number}
	switch {
	case err != nil:
		one = action{kind: takeoverEnds, outcome: hasFailed}
	case is.Epoch == 0:
		one.outcome = isOvertaken
	default:
		one.outcome = isOwned
	}

	added := r.add(o.process, o.partition, one)
	if added != nil && one.outcome == isOwned {
		r.endBeforeSend(added)
	}
}

// endBeforeSend moves the end of a takeover before a drain that was waiting for it. The tier lets the drain go on a
// moment before it tells the owner, who records the end; in the model the two are one action.
func (r *recorder) endBeforeSend(end *action) {
	r.mu.Lock()
	defer r.mu.Unlock()

	at := slices.Index(r.actions, end)
	for i := at - 1; i >= 0; i-- {
		if r.actions[i].slot != end.slot {
			continue
		}
		if r.actions[i].kind == sends {
			r.actions = slices.Insert(slices.Delete(r.actions, at, at+1), i, end)
		}

		return
	}
}

func (r *recorder) release(o *partitionOwner) { r.add(o.process, o.partition, action{kind: releases}) }

func (r *recorder) evict(o *partitionOwner) { r.add(o.process, o.partition, action{kind: evicts}) }

func (r *recorder) end(p *process) {
	for id := range simPartitions {
		r.add(p, id, action{kind: ends})
	}
}

// lose records that the fast store loses what it knows about a partition.
func (r *recorder) lose(partition int) { r.add(nil, partition, action{kind: loses}) }

// readFast records what is read of the partition in the fast store.
func (r *recorder) readFast(p *process, kind callKind, addresses []rows.Address, found []rows.Found) *action {
	if r == nil {
		return nil
	}

	one := action{isOdd: true}
	for i, at := range addresses {
		switch {
		case at.Partition != r.partition:
		case at.Name == stateName:
			is, _ := decodeState(found[i].Value)
			one.token = is.token
			one.isComplete = is.complete
			one.kind = max(one.kind, readsState)
		case kind == turns:
			one.kind = reads
			one.value = decodeVersion(found[i].Value)
		default:
			one.kind = readsRow
			one.value = decodeVersion(found[i].Value)
		}
	}

	if one.kind == 0 {
		return nil
	}

	return r.add(p, r.partition, one)
}

// list records that the marks of a partition are read.
func (r *recorder) list(p *process, partition int, isAway bool) *action {
	if isAway {
		return nil
	}

	return r.add(p, partition, action{kind: lists, isOdd: true})
}

// readDurable records what is read of the partition in the durable store.
func (r *recorder) readDurable(p *process, kind callKind, addresses []rows.Address, found []rows.Found) *action {
	if r == nil {
		return nil
	}

	i := slices.IndexFunc(addresses, func(at rows.Address) bool { return at.Partition == r.partition })
	if i < 0 {
		return nil
	}

	is := decodeDrainRecord(found[i].Value)
	one := action{isOdd: true}
	switch kind {
	case turns:
		one.kind = readsOn
		one.value = decodeVersion(found[i].Value)
	case takesOver:
		one.kind = readsDrained
		one.to = is.upTo
		one.token = is.token
		one.isComplete = !is.unconfirmed
	default:
		one.kind = hasRival
	}

	return r.add(p, r.partition, one)
}

func (r *recorder) readChanged(p *process, partition int, isAway bool) *action {
	if isAway {
		return nil
	}

	return r.add(p, partition, action{kind: readsChanged, isOdd: true})
}

func (r *recorder) claimDurable(p *process, kind callKind, former rows.Former, is rows.Claim) *action {
	one := action{kind: holds, former: min(former.Epoch, 1), epoch: min(is.Epoch, 1), number: is.Number}
	if kind == takesOver {
		one.kind = takes
	}

	return r.add(p, former.Partition, one)
}

// drainOf returns what a commit of the durable store has.
func drainOf(c *rows.Commit) action {
	one := action{number: c.Number}
	if row, writes := valueOf(c); writes {
		one.value = decodeVersion(row.Value)
	}
	is := decodeDrainRecord(c.Rows[len(c.Rows)-1].Value)
	one.to = is.upTo
	one.token = is.token

	return one
}

// send records that a drain is sent, which may not arrive.
func (r *recorder) send(p *process, kind callKind, c *rows.Commit) {
	if kind != drains {
		return
	}

	one := drainOf(c)
	one.kind = sends
	r.add(p, c.Partition, one)
}

func (r *recorder) commitDurable(p *process, kind callKind, c *rows.Commit, err error) *action {
	one := drainOf(c)
	one.kind = isDrain
	one.outcome = outcomeOf(err)
	if kind == takesOver {
		one.kind = gives
	}

	return r.add(p, c.Partition, one)
}

// drained records that a drain is answered.
func (r *recorder) drained(p *process, kind callKind, c *rows.Commit) {
	if kind == drains {
		r.add(p, c.Partition, action{kind: isDrained})
	}
}

// tracked distinguishes the two probes of a drain, one of which comes before the claim in the durable store.
type tracked struct {
	mu        sync.Mutex // guards the fields below
	hasHeld   [rows.Partitions]bool
	isChecked [rows.Partitions]bool
}

// holds records that partitions are claimed in the durable store for the first time.
func (t *tracked) holds(partitions []rows.Former) {
	t.mu.Lock()
	defer t.mu.Unlock()

	for _, former := range partitions {
		t.hasHeld[former.Partition] = former.Epoch == 0
	}
}

// probes records that commits are on their way.
func (t *tracked) probes(commits []rows.Commit) {
	t.mu.Lock()
	defer t.mu.Unlock()

	for _, c := range commits {
		t.isChecked[c.Partition] = t.hasHeld[c.Partition]
		t.hasHeld[c.Partition] = false
	}
}

// checks reports whether the probe under way comes after the claim.
func (t *tracked) checks(partition int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.isChecked[partition]
}

// most is the greatest number of a commit in the model, which has a set of them.
const most = 29

// trace returns the actions up to the greatest number, without those whose effect no process has learned of.
func (r *recorder) trace() []action {
	var all []action
	for _, one := range r.actions {
		if one.isOdd && !one.seen {
			continue
		}
		if max(one.number, one.to) > most && one.kind != takes && one.kind != holds && one.kind != gives &&
			one.kind != isDrain && one.kind != sends {
			break
		}
		all = append(all, *one)
	}

	return all
}

// text returns a trace in the form that the model reads.
func text(trace []action) string {
	epochs := []uint64{0}
	tokens := []string{""}
	for _, one := range trace {
		isGranted := one.kind == claims || one.kind == comesLate
		if isGranted && one.epoch != 0 {
			epochs = append(epochs, one.epoch)
		}
		if one.kind == gives && one.outcome == isMade && !slices.Contains(tokens, one.token) {
			tokens = append(tokens, one.token)
		}
	}

	// Epochs are times and tokens are random. The model has small numbers, so both are replaced by their places in
	// order.
	slices.Sort(epochs)
	epochs = slices.Compact(epochs)

	var b strings.Builder
	for _, one := range trace {
		is := func(epoch uint64) int { return slices.Index(epochs, epoch) }
		epoch := is(one.epoch)
		former := is(one.former)
		if one.kind == takes || one.kind == holds {
			epoch = int(one.epoch)
			former = int(one.former)
		}

		value := 0
		if one.value.epoch != 0 {
			const sequences = 64
			value = is(one.value.epoch)*sequences + one.value.sequence
		}
		if one.isEvicted {
			value = 32000
		}
		outcome := one.outcome
		if outcome == 0 && one.seen {
			outcome = 1
		}
		if one.kind == gives {
			outcome = modeltest.Bit(one.seen)
		}
		token := slices.Index(tokens, one.token)
		if one.kind == gives && one.outcome != isMade {
			token = 0
		}

		fmt.Fprintln(&b, one.kind, one.slot, former, epoch, one.after, one.number, value, one.to, token,
			modeltest.Bit(one.isComplete), outcome)
	}

	return b.String()
}

// record runs a simulation, and returns the trace of one of its partitions.
func record(t *testing.T, seed uint64, plant ...func(*stores)) []action {
	t.Helper()
	// The model has one partition, so each seed shows one of the two.
	r := &recorder{partition: int(seed % simPartitions)}
	synctest.Test(t, func(*testing.T) {
		s := newSimulation(seed, &simtest.Notes{Start: time.Now()})
		s.stores.trace = r
		for _, one := range plant {
			one(s.stores)
		}
		s.run()
	})

	return r.trace()
}

// nameOf returns the name under which the test counts an action.
func nameOf(a action) string {
	name := kinds[a.kind]
	if a.outcome != 0 {
		name += ": " + outcomes[a.outcome]
	}

	mayBeRefused := a.kind == claims || a.kind == holds
	isRefused := mayBeRefused && a.epoch == 0
	isRenewed := mayBeRefused && a.former != 0
	switch {
	case isRefused:
		name += " refused"
	case isRenewed:
		name += " renewed"
	}

	mayBeUnanswered := mayBeRefused || a.kind == takes || a.kind == gives
	if mayBeUnanswered && !a.seen {
		name += ", unanswered"
	}

	return name
}

// drainIn returns the index of a drain that is answered at once, the first in the second half of a trace, or else the
// last one. It is a first attempt: the answer to a repetition could belong to the first.
func drainIn(trace []action) int {
	last := 0
	sent := map[uint64]bool{}
	for i, one := range trace[:len(trace)-1] {
		isFirst := one.kind == isDrain && one.outcome == isMade && !sent[one.number]
		if one.kind == isDrain {
			sent[one.number] = true
		}
		if !isFirst || trace[i+1].kind != isDrained {
			continue
		}

		last = i
		if i >= len(trace)/2 {
			break
		}
	}

	return last
}

// TestServerTracesOfTiers: what simulations do to a partition is a possible run of the model of a fast store in front
// of a durable one.
func TestServerTracesOfTiers(t *testing.T) {
	all := modeltest.Traces[action, *stores]{
		Model: modeltest.New(t, "../../models/behind.pml"),
		Of: func(seed uint64, plant ...func(*stores)) [][]action {
			return [][]action{record(t, seed, plant...)}
		},
		Text: text,
		Name: nameOf,
		Pair: drainIn,
	}

	// Every kind of action has to occur in some trace: one that never does would be checked by nothing.
	all.Follow(t, 100, []string{
		"claim", "claim, unanswered", "claim renewed", "claim refused",
		"commit: made", "commit: fenced", "commit: does not arrive", "commit is answered",
		"takeover ends: owned", "takeover ends: failed", "takeover ends: overtaken",
		"state", "drained", "takes", "takes, unanswered", "token: made", "token: made, unanswered", "token: fenced",
		"marks", "undrained row", "confirmation: made", "restoration: made", "restoration: fenced",
		"read", "read in the durable store", "release", "eviction", "end", "loss", "late claim",
		"overtaken before a drain", "hold", "hold renewed", "hold refused", "hold, unanswered",
		"check of a drain: made", "rival", "drain is sent", "drain: made", "drain: fenced", "drain is answered",
	})

	// A model that accepted everything would prove nothing, so it has to refuse the traces of faulty stores.
	all.Refuse(t, plantedFaults)
}
