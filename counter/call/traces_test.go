package call_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/models/modeltest"
	"headcount/internal/rows"
)

// internal/models has formal models, and the checker spin explores all their states. Here the simulation records what
// it does to one partition as actions of a model, and spin searches for a run of the model that does the same. So what
// is proved of the model holds for the product.

// action is one action of a model: of a process, of a gateway, the late arrival of a commit, or a loss of the store.
// The models describe the fields that each kind has.
type action struct {
	kind    int
	process string // or the stream of a gateway
	former  uint64
	epoch   uint64
	after   uint64
	number  uint64
	writes  bool // the commit changes something
	again   bool // the call was sent before
	outcome int
	seen    bool // the answer arrives
	slot    int

	calls map[string]uint64 // the calls whose answers a commit has, by stream
}

// Kinds of actions, as the model numbers them.
const (
	claims = iota + 1
	commits
	copies
	arrivesLate
	keeps
	loses
	ends
	sends
	tells
)

// Outcomes of a commit. Spin numbers the names of an mtype from the last one.
const (
	isLost = iota + 1
	isFenced
	isMade
)

var (
	kinds    = map[int]string{copies: "copy", keeps: "tail", loses: "loss", ends: "end"}
	outcomes = map[int]string{isLost: "lost", isFenced: "fenced", isMade: "made"}
)

// recorder records the actions on a partition. A nil recorder records nothing. Its methods may be called from any
// goroutine.
type recorder struct {
	partition int

	mu      sync.Mutex // guards the fields below
	actions []action
	owners  map[uint64]string // by epoch
	granted []uint64          // the epochs of the claims that the store has
}

func newRecorder(partition int) *recorder {
	return &recorder{partition: partition, owners: map[uint64]string{}}
}

// claim records that a claim has arrived.
func (r *recorder) claim(process string, former rows.Former, is rows.Claim) {
	if r == nil || former.Partition != r.partition {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	if is.Epoch != 0 {
		r.owners[is.Epoch] = process
		r.granted = append(r.granted, is.Epoch)
	}
	r.actions = append(r.actions, action{
		kind: claims, process: process, former: former.Epoch, epoch: is.Epoch, number: is.Number,
	})
}

// commit records that a commit has arrived, unless it is refused for another reason than its epoch or its number: then
// nothing is written, and its owner makes another one.
func (r *recorder) commit(c rows.Commit, isLate bool, err error) {
	outcome := outcomeOf(err)
	if r == nil || c.Partition != r.partition || outcome == 0 {
		return
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	one := action{
		kind: commits, process: r.owners[c.Epoch], epoch: c.Epoch, after: c.After, number: c.Number,
		writes: len(c.Rows)+len(c.IDs) > 0, outcome: outcome, calls: map[string]uint64{},
	}

	for _, row := range c.Rows {
		if row.Collection == "streams" {
			one.calls[row.Field], _ = binary.Uvarint(row.Value)
		}
	}

	if isLate {
		one.kind = arrivesLate
	}
	r.actions = append(r.actions, one)
}

func outcomeOf(err error) int {
	var fenced *rows.Fenced
	var lost *rows.Lost
	switch {
	case err == nil:
		return isMade
	case errors.As(err, &fenced):
		return isFenced
	case errors.As(err, &lost):
		return isLost
	default:
		return 0
	}
}

// answer records that a process has received the answer to its last claim or commit.
func (r *recorder) answer(process string, partition int, err error) {
	if r == nil || partition != r.partition || outcomeOf(err) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	for i := len(r.actions) - 1; i >= 0; i-- {
		one := &r.actions[i]
		if one.process == process && one.kind != arrivesLate {
			one.seen = true
			return
		}
	}
}

// send records that a gateway makes a call, perhaps not for the first time.
func (r *recorder) send(c owner.Call) {
	if r == nil || c.Partition != r.partition {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	r.actions = append(r.actions, action{kind: sends, process: c.Stream, number: c.Number, again: c.Repeated})
}

// tell records that a gateway receives the answer to a call.
func (r *recorder) tell(c owner.Call, answer owner.Answer, err error) {
	told := toldOf(c, answer, err)
	if r == nil || c.Partition != r.partition || told == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	r.actions = append(r.actions, action{
		kind: tells, process: c.Stream, number: c.Number, again: c.Repeated, outcome: told,
	})
}

// What a gateway learns from an answer. A repetition under an idempotency key changes nothing, and neither does a
// refusal.
const (
	toldMade = iota + 1
	toldRefused
	toldBusy
)

var answers = map[int]string{
	toldMade: "told made", toldRefused: "told of a refusal", toldBusy: "told that the store is full",
}

func toldOf(c owner.Call, answer owner.Answer, err error) int {
	// A repeated call may have been made earlier, so to its gateway "busy" does not mean that it was not.
	if errors.Is(err, counter.ErrBusy) && !c.Repeated {
		return toldBusy
	}
	if err != nil {
		return 0
	}

	one := &answer.Results[0]
	if one.Err != nil || one.Replay {
		return toldRefused
	}

	return toldMade
}

// lose records that the store has lost the end of its log, and is now at the given log.
func (r *recorder) lose(log []change) {
	if r == nil {
		return
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	one := action{kind: loses}
	granted := 0
	for _, c := range log {
		if c.former != nil && c.former.Partition == r.partition {
			one.epoch = r.granted[granted]
			granted++
		}
		if c.commit != nil && c.commit.Partition == r.partition {
			one.number = c.commit.Number
		}
	}

	r.granted = r.granted[:granted]
	r.actions = append(r.actions, one)
}

// end records that a process has ended.
func (r *recorder) end(process string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	r.actions = append(r.actions, action{kind: ends, process: process})
}

// trace returns the actions, and adds those that only later ones reveal: where the lost tail begins, and when a commit
// arrives again. It leaves out what does not change the partition.
func (r *recorder) trace() []action {
	states := r.states()
	before := make([][]action, len(r.actions)) // actions to add, by index
	left := map[int]bool{}
	losses := 0
	late := 0
	known := map[string]bool{}

	for i := range r.actions {
		one := &r.actions[i]
		switch one.kind {
		case loses:
			if states[i+1] == states[i] {
				left[i] = true
				continue
			}
			// The tail begins after the last moment in which the store knew the same as after the loss.
			from := lastIndex(states[:i], states[i+1])
			before[from] = append(before[from], action{kind: keeps, slot: losses})
			losses++

		case arrivesLate:
			one.slot = late
			late++
			from := r.sent(i)
			before[from] = append(before[from], *one)
			before[from][len(before[from])-1].kind = copies

		case ends:
			left[i] = !known[one.process]
		}
		known[one.process] = true
	}

	var all []action
	for i, one := range r.actions {
		all = append(all, before[i]...)
		if !left[i] {
			all = append(all, one)
		}
	}

	return all
}

// ofOwners returns the actions for the model of owners.
func ofOwners(trace []action) []action {
	return slices.DeleteFunc(trace, func(one action) bool { return one.kind == sends || one.kind == tells })
}

// ofCalls returns the actions for the model of calls, with one stream up to its call number most. What became of the
// calls of other streams is left out.
func ofCalls(trace []action, stream string, most uint64) []action {
	var all []action
	for _, one := range trace {
		isOfGateway := one.kind == sends || one.kind == tells
		if isOfGateway && one.process != stream {
			continue
		}
		if isOfGateway && one.number > most {
			break
		}

		one.calls = map[string]uint64{"": one.calls[stream]}
		if isOfGateway {
			one.process = ""
		}
		all = append(all, one)
	}

	return all
}

// held is what the store knows about the claim of a partition, and its last commit.
type held struct{ epoch, number uint64 }

// states returns what the store knows before each action, and after the last.
func (r *recorder) states() []held {
	var is held
	states := []held{is}
	for _, one := range r.actions {
		switch one.kind {
		case claims:
			is.epoch = max(is.epoch, one.epoch)
		case commits, arrivesLate:
			if one.outcome == isMade {
				is.number = one.number
			}
		case loses:
			is = held{one.epoch, one.number}
		}

		states = append(states, is)
	}

	return states
}

func lastIndex(states []held, is held) int {
	last := 0
	for i := range states {
		if states[i] == is {
			last = i
		}
	}

	return last
}

// sent returns the index of an action before which the late commit was sent: one at which it arrived already, or the
// end of its process.
func (r *recorder) sent(late int) int {
	is := r.actions[late]
	first := late
	for i := late - 1; i >= 0; i-- {
		one := r.actions[i]
		switch one.kind {
		case loses:
			return first // a loss discards what was on its way
		case ends:
			if one.process == is.process {
				first = i
			}
		case commits:
			if one.epoch == is.epoch && one.after == is.after && one.number == is.number {
				first = i
			}
		}
	}

	return first
}

// text returns a trace in the form that the model reads.
func text(trace []action) string {
	var epochs []uint64
	var processes []string
	for _, one := range trace {
		epochs = append(epochs, one.epoch, one.former, 0)
		if one.process != "" && !slices.Contains(processes, one.process) {
			processes = append(processes, one.process)
		}
	}
	slices.Sort(epochs)
	epochs = slices.Compact(epochs)

	var b strings.Builder
	for _, one := range trace {
		by := max(0, slices.Index(processes, one.process)) // there is one gateway
		fmt.Fprintln(&b, one.kind, by,
			slices.Index(epochs, one.former), slices.Index(epochs, one.epoch), one.after, one.number,
			modeltest.Bit(one.writes || one.again), one.outcome, modeltest.Bit(one.seen), one.slot, one.calls[""])
	}

	return b.String()
}

// record runs a simulation, and returns the trace of one of its partitions.
func record(t *testing.T, seed uint64, plant ...func(*world)) []action {
	t.Helper()
	var r *recorder
	synctest.Test(t, func(*testing.T) {
		s := newSimulation(seed, &simtest.Notes{Start: time.Now()})
		all := s.partitions()
		r = newRecorder(all[seed%uint64(len(all))])
		s.world.trace = r
		for _, one := range plant {
			one(s.world)
		}

		s.run()
	})

	return r.trace()
}

// pair returns the index of a commit that is directly followed by another one of the same owner, in the second half of
// a trace.
func pair(t *testing.T, trace []action) int {
	t.Helper()
	for i := len(trace) / 2; i < len(trace)-1; i++ {
		one := trace[i]
		next := trace[i+1]
		isPair := one.kind == commits && next.kind == commits && one.epoch == next.epoch && one.number == next.after
		if isPair && one.seen {
			return i
		}
	}
	t.Fatalf("among %d actions no owner makes two commits in a row", len(trace))

	return 0
}

// followed returns what spin needs to follow traces of the simulation in a model.
func followed(
	t *testing.T, model, setting string, of func(seed uint64, plant ...func(*world)) [][]action,
) modeltest.Traces[action, *world] {
	t.Helper()

	return modeltest.Traces[action, *world]{
		Model: modeltest.New(t, "../../internal/models/"+model, setting),
		Of:    of,
		Text:  text,
		Name:  nameOf,
		Pair:  func(trace []action) int { return pair(t, trace) },
	}
}

// TestServerTracesOfOwners: what simulations do to a partition is a possible run of the model of its owners.
func TestServerTracesOfOwners(t *testing.T) {
	all := followed(t, "ownership.pml", "-DLOSS", func(seed uint64, plant ...func(*world)) [][]action {
		return [][]action{ofOwners(record(t, seed, plant...))}
	})

	all.Follow(t, 100, []string{
		"claim", "renewal", "renewal refused", "made", "fenced", "lost", "made, part of what was lost",
		"made, unanswered", "fenced, unanswered", "late: fenced", "late: lost", "loss", "end",
	})
	all.Refuse(t, map[string]func(*world){
		"an answer before the commit": func(w *world) { w.hasty = true },
		"no fence":                    func(w *world) { w.trust = true },
		"a loss that nobody notices":  func(w *world) { w.complete = true },
	})
}

// TestServerTracesOfCalls: what simulations do to a partition with the calls of a gateway is a possible run of the
// model of calls. In these simulations the store loses nothing.
func TestServerTracesOfCalls(t *testing.T) {
	const most = 30 // calls, of which the model has a set
	all := followed(t, "calls.pml", "-DMERGED", func(seed uint64, plant ...func(*world)) [][]action {
		trace := record(t, seed, append(plant, func(w *world) { w.safe = true })...)
		var traces [][]action
		for g := range simGateways {
			traces = append(traces, ofCalls(trace, fmt.Sprintf("gateway %d.0", g), most))
		}

		return traces
	})

	all.Follow(t, 34, []string{
		"call", "call again", "claim", "renewal refused", "made", "made, unanswered", "fenced", "told made",
		"told of a refusal", "told that the store is full", "late: fenced", "late: lost", "end",
	})
	all.Refuse(t, map[string]func(*world){
		"an answer before the commit": func(w *world) { w.hasty = true },
		"no fence":                    func(w *world) { w.trust = true },
		"a forgotten replay":          func(w *world) { w.forget = true },
	})
}

// nameOf returns the name under which the test counts an action.
func nameOf(a action) string {
	name := ""
	switch a.kind {
	case claims:
		name = "claim"
		if a.former != 0 {
			name = "renewal"
		}
		if a.epoch == 0 {
			name += " refused"
		}

	case commits:
		name = outcomes[a.outcome]
		if a.number > a.after+1 {
			name += ", part of what was lost"
		}

	case arrivesLate:
		return "late: " + outcomes[a.outcome]
	case sends:
		if a.again {
			return "call again"
		}

		return "call"

	case tells:
		return answers[a.outcome]
	default:
		return kinds[a.kind]
	}

	if !a.seen {
		name += ", unanswered"
	}

	return name
}
