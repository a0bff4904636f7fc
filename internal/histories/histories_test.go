package histories

import (
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// told is a call in a history: its beginning and end, the question, and the answer.
type told struct {
	begin, end int64
	Call
	Answer
}

// unknown returns a call without an answer, which may take effect at any time from begin on.
func unknown(begin int64, c Call) told { return told{begin, never, c, Answer{Unknown: true}} }

func shows(values ...int64) Answer { return Answer{Values: values} }

func refused(by int, value int64) Answer {
	return Answer{Refused: true, Fault: by, Values: []int64{value}}
}

func again(values ...int64) Answer { return Answer{Replay: true, Values: values} }

func add(id int, deltas ...Delta) Call { return Call{Verb: Add, Deltas: deltas, ID: id} }

func withKey(c Call) Call {
	c.Keyed = true

	return c
}

func read(at int) Call { return Call{Verb: Read, At: at} }

func subjectOf(m *Model, all ...told) *Subject {
	s := NewSubject(m, m.Name)
	for _, one := range all {
		s.tries = append(s.tries, try{one.Call, one.Answer, one.begin, one.end})
	}

	return s
}

// TestModels has histories that the checker must explain, and others that it must refuse.
func TestModels(t *testing.T) {
	plus := func(id int, by int64) Call { return add(id, Delta{By: by}) }
	set := Call{Verb: Set, Value: 7, ID: 9}
	join := func(id int, who uint8) Call { return Call{Verb: Edit, Join: who, ID: id} }
	leave := func(id int, who uint8) Call { return Call{Verb: Edit, Leave: who, ID: id} }
	look := func(at int) Call { return Call{Verb: Look, At: at} }
	cost := func(id int, n int64) Call { return Call{Verb: Take, Value: n, ID: id} }

	for name, tc := range map[string]struct {
		model   *Model
		history []told
		wrong   bool
	}{
		"one after the other": {Exact, []told{
			{0, 1, plus(1, 5), shows(5)}, {2, 3, set, shows(7)}, {4, 5, read(0), shows(7)}}, false},
		"a lost change": {Exact, []told{{0, 1, plus(1, 5), shows(5)}, {2, 3, read(0), shows(0)}}, true},
		"an old read": {Exact, []told{
			{0, 1, plus(1, 5), shows(5)}, {2, 3, plus(2, 1), shows(6)}, {4, 5, read(0), shows(5)}}, true},
		"at the same time": {Exact, []told{
			{0, 9, plus(1, 5), shows(6)}, {0, 9, plus(2, 1), shows(1)}, {0, 9, read(0), shows(1)}}, false},
		"one answer for two": {Exact, []told{{0, 9, plus(1, 5), shows(6)}, {0, 9, plus(2, 1), shows(6)}}, true},
		"reads that go back": {Exact, []told{
			{0, 9, plus(1, 5), shows(5)}, {1, 2, read(0), shows(5)}, {3, 4, read(0), shows(0)}}, true},
		"below the floor":     {Exact, []told{{0, 1, plus(1, -1), shows(-1)}}, true},
		"above the ceiling":   {Exact, []told{{0, 1, plus(1, 41), shows(41)}}, true},
		"refused":             {Exact, []told{{0, 1, plus(1, 3), shows(3)}, {2, 3, plus(2, -4), refused(0, 3)}}, false},
		"refused with enough": {Exact, []told{{0, 1, plus(1, 3), shows(3)}, {2, 3, plus(2, -3), refused(0, 3)}}, true},
		"refused by an old value": {Exact, []told{
			{0, 1, plus(1, 3), shows(3)}, {2, 3, plus(2, 1), shows(4)}, {4, 5, plus(3, -9), refused(0, 3)}}, true},
		"refused by another": {Exact, []told{{0, 1, add(1, Delta{1, -1}), refused(0, 0)}}, true},
		"a batch": {Exact, []told{
			{0, 1, add(1, Delta{0, 2}, Delta{1, 3}, Delta{0, 4}), shows(6, 3, 6)}, {2, 3, read(1), shows(3)}}, false},
		"half a batch": {Exact, []told{
			{0, 9, add(1, Delta{0, 2}, Delta{1, 3}), shows(2, 3)}, {1, 2, read(0), shows(2)},
			{3, 4, read(1), shows(0)}}, true},
		"a refused batch that was made in part": {Exact, []told{
			{0, 1, add(1, Delta{0, 2}, Delta{1, -3}), refused(1, 0)}, {2, 3, read(0), shows(2)}}, true},

		"unknown, and made late": {Exact, []told{
			unknown(0, plus(1, 5)), {2, 3, read(0), shows(0)}, {4, 5, read(0), shows(5)}}, false},
		"unknown, and never made": {Exact, []told{unknown(0, plus(1, 5)), {2, 3, read(0), shows(0)}}, false},
		"unknown, and refused":    {Exact, []told{unknown(0, plus(1, -5)), {2, 3, read(0), shows(0)}}, false},
		"unknown, and made twice": {Exact, []told{unknown(0, plus(1, 5)), {2, 3, read(0), shows(10)}}, true},
		"unknown, and taken back": {Exact, []told{
			unknown(0, plus(1, 5)), {2, 3, read(0), shows(5)}, {4, 5, read(0), shows(0)}}, true},
		"made before it was asked": {Exact, []told{{0, 1, read(0), shows(5)}, unknown(2, plus(1, 5))}, true},

		"a repetition of what was made": {Exact, []told{
			unknown(0, withKey(plus(1, 5))), {2, 3, withKey(plus(1, 5)), again(5)}}, false},
		"a repetition of what was not made": {Exact, []told{
			unknown(0, withKey(plus(1, 5))), {2, 3, withKey(plus(1, 5)), shows(5)}}, false},
		"a repetition that is made twice": {Exact, []told{
			unknown(0, withKey(plus(1, 5))), {2, 3, withKey(plus(1, 5)), shows(10)}}, true},
		"a replay that was forgotten": {Exact, []told{
			{0, 1, withKey(plus(1, 5)), shows(5)}, {2, 3, withKey(plus(1, 5)), shows(10)}}, true},
		"a replay that does not say so": {Exact, []told{
			{0, 1, withKey(plus(1, 5)), shows(5)}, {2, 3, withKey(plus(1, 5)), shows(5)}}, true},
		"a replay of nothing": {Exact, []told{{0, 1, withKey(plus(1, 5)), again(0)}}, true},
		"a key that is made later": {Exact, []told{
			unknown(0, withKey(plus(1, 5))), {2, 3, withKey(plus(1, 5)), again(5)},
			{4, 5, plus(2, 1), shows(6)}, {6, 7, read(0), shows(11)}}, true},
		"a refusal is not remembered": {Exact, []told{
			{0, 1, withKey(plus(1, -5)), refused(0, 0)}, {2, 3, plus(2, 9), shows(9)},
			{4, 5, withKey(plus(1, -5)), shows(4)}}, false},

		"a sum with another's change": {Sum, []told{{0, 9, plus(1, 5), shows(6)}, {0, 9, plus(2, 1), shows(6)}}, false},
		"a sum without its own change": {Sum, []told{
			{0, 1, plus(1, 5), shows(5)}, {2, 9, plus(2, 1), shows(5)}}, true},
		"a sum that lost a change": {Sum, []told{
			{0, 1, plus(1, -5), shows(-5)}, {2, 3, plus(2, 1), shows(-4)}, {4, 5, read(0), shows(1)}}, true},
		"a sum that forgot a replay": {Sum, []told{
			{0, 1, withKey(plus(1, 5)), shows(5)}, {2, 3, withKey(plus(1, 5)), shows(10)}}, true},

		"members": {Members, []told{
			{0, 1, join(1, 3), shows(2)}, {2, 3, leave(2, 6), shows(1)},
			{4, 5, look(0), shows(1, 1)}, {6, 7, look(1), shows(1, 0)}}, false},
		"a member that is lost":  {Members, []told{{0, 1, join(1, 3), shows(2)}, {2, 3, look(1), shows(2, 0)}}, true},
		"a member counted twice": {Members, []told{{0, 1, join(1, 1), shows(1)}, {2, 3, join(2, 1), shows(2)}}, true},
		"a member that comes back": {Members, []told{
			{0, 1, join(1, 1), shows(1)}, {2, 3, leave(2, 1), shows(0)}, {4, 5, look(0), shows(0, 1)}}, true},
		"a look in between":       {Members, []told{{0, 9, join(1, 1), shows(1)}, {0, 9, look(0), shows(0, 1)}}, false},
		"a set of the wrong size": {Members, []told{{0, 1, join(1, 3), shows(2)}, {2, 3, read(0), shows(1)}}, true},
		"an unknown edit of a set": {Members, []told{
			unknown(0, join(1, 3)), {2, 3, look(1), shows(2, 1)}, {4, 5, look(0), shows(2, 1)}}, false},
		"half an edit of a set": {Members, []told{
			unknown(0, join(1, 3)), {2, 3, look(1), shows(2, 1)}, {4, 5, look(0), shows(2, 0)}}, true},
		"a limit": {Limit, []told{
			{0, 1, cost(1, 10), shows(2)}, {2, 3, cost(2, 3), refused(0, 2)}, {4, 5, cost(3, 2), shows(0)}}, false},
		"more than a limit": {Limit, []told{{0, 1, cost(1, 10), shows(2)}, {2, 3, cost(2, 3), shows(0)}}, true},
		"a limit that refuses free": {Limit, []told{
			{0, 1, cost(1, 10), shows(2)}, {2, 3, cost(2, 2), refused(0, 2)}}, true},
		"a limit that forgot": {Limit, []told{{0, 1, cost(1, 10), shows(2)}, {2, 3, read(0), shows(12)}}, true},
		"given back": {Limit, []told{
			{0, 1, cost(1, 10), shows(2)}, {2, 3, cost(2, -20), shows(12)}, {4, 5, cost(3, 12), shows(0)}}, false},
		"a cost that comes late": {Limit, []told{
			unknown(0, cost(1, 10)), {2, 3, read(0), shows(12)}, {4, 5, read(0), shows(2)}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			wrong, undecided := subjectOf(tc.model, tc.history...).Check()
			if (wrong != "") != tc.wrong || undecided {
				t.Errorf("undecided: %v, wrong: %q; want wrong: %v", undecided, wrong, tc.wrong)
			}
		})
	}
}

// Reads at a time at which they may be old are not checked; changes are.
func TestOldReadsAreLeftOut(t *testing.T) {
	for name, tc := range map[string]struct {
		call  Call
		wrong bool
	}{
		"a read":   {read(0), false},
		"a change": {add(2, Delta{By: 1}), true},
	} {
		t.Run(name, func(t *testing.T) {
			s := subjectOf(Exact, told{0, 1, add(1, Delta{By: 5}), shows(5)}, told{2_000, 3_000, tc.call, shows(1)})
			old := Between{From: s.began.Add(time.Microsecond), To: s.began.Add(4 * time.Microsecond)}
			later := Between{From: s.began.Add(time.Hour), To: s.began.Add(2 * time.Hour)}
			if wrong, _ := s.Check(old); (wrong != "") != tc.wrong {
				t.Errorf("a read that may be old was judged wrong: %q", wrong)
			}
			if wrong, _ := s.Check(later); wrong == "" {
				t.Error("an old read was accepted at a time at which reads must not be old")
			}
		})
	}
}

// A wrong history is shown without the calls after the fault, and without answers that do not matter.
func TestWrongHistoriesAreShort(t *testing.T) {
	var all []told
	for i := range int64(10) {
		all = append(all, told{20 * i, 20*i + 9, add(int(i+1), Delta{1, 1}), shows(i + 1)})
		all = append(all, told{20 * i, 20*i + 9, read(0), shows(0)})
	}

	all[11] = told{100, 109, read(0), shows(3)}

	short := Exact.shorten(subjectOf(Exact, all...).history(nil))
	known := slices.DeleteFunc(slices.Clone(short), func(op porcupine.Operation) bool {
		return op.Output.(*Answer).Unknown
	})
	if len(known) != 1 || known[0].Call != 100 || len(short) > 7 {
		t.Errorf("the shortened history has %d calls, with the answers %+v", len(short), known)
	}
}
