package histories

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// Subject is what one history is about: a few counters, a set or a limit. Its methods may be called from any goroutine.
type Subject struct {
	Model *Model
	Name  string

	began time.Time // the times of tries count from here

	users sync.WaitGroup // clients that have a call under way

	mu        sync.Mutex // guards the fields below
	tries     []try
	ids       int // the newest ID
	uncertain int // how many changes without a key had no answer
}

// NewSubject returns a subject that nobody has used.
func NewSubject(model *Model, name string) *Subject {
	return &Subject{Model: model, Name: name, began: time.Now()}
}

// try is one attempt of a call, with its answer if there is one.
type try struct {
	Call
	Answer
	begin, end int64
}

// never is the end of a try without an answer.
const never = math.MaxInt64

// NewID returns the ID of a change.
func (s *Subject) NewID() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.ids++

	return s.ids
}

// earlier returns a change with a key that the server has made, if it finds one.
func (s *Subject) earlier(random *rand.Rand) (Call, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	const looks = 4
	// A few looks are enough: otherwise the client makes a new change instead.
	for range min(looks, len(s.tries)) {
		t := &s.tries[random.IntN(len(s.tries))]
		if t.Keyed && !t.Unknown && !t.Refused {
			return t.Call, true
		}
	}

	return Call{}, false
}

// Begin records a call that is about to be sent.
func (s *Subject) Begin(c Call) (index int) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.tries = append(s.tries, try{Call: c, Answer: Answer{Unknown: true}, begin: s.now(), end: never})

	return len(s.tries) - 1
}

// End records the answer to a call.
func (s *Subject) End(index int, a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()

	t := &s.tries[index]
	t.Answer = a
	t.end = s.now()
}

// Lose records that there is no answer.
func (s *Subject) Lose(c *Call) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// A call with a key is repeated until there is an answer.
	if c.ID > 0 && !c.Keyed {
		s.uncertain++
	}
}

// Forget removes a call that was certainly not sent.
func (s *Subject) Forget(index int) { s.End(index, Answer{Unknown: true}) }

// A subject is retired after maxCalls calls, or maxUncertain changes that may take effect at any time: each of these
// doubles the number of cases that the checker may have to consider.
const (
	maxCalls     = 300
	maxUncertain = 6
)

// join reports whether a client may begin a call. After the call it calls leave.
func (s *Subject) join() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	if len(s.tries) >= maxCalls || s.ids >= changes-1 || s.uncertain >= maxUncertain {
		return false
	}
	s.users.Add(1)

	return true
}

func (s *Subject) leave() { s.users.Done() }

func (s *Subject) now() int64 { return int64(time.Since(s.began)) }

// Between is a period.
type Between struct{ From, To time.Time }

// within reports whether a try overlaps a period.
func (s *Subject) within(t *try, old Between) bool {
	return t.begin <= int64(old.To.Sub(s.began)) && t.end >= int64(old.From.Sub(s.began))
}

// history returns the operations that the checker has to explain. Reads within the periods in which they may be old are
// left out.
func (s *Subject) history(old []Between) (history []porcupine.Operation) {
	s.mu.Lock()
	defer s.mu.Unlock()

	made := s.settled()
	included := map[int]bool{} // keys of which one try without an answer is in the history
	for i := range s.tries {
		t := s.tries[i]
		unsent := t.Unknown && t.end != never
		isOld := slices.ContainsFunc(old, func(b Between) bool { return s.within(&t, b) })
		if unsent || t.reads() && (t.Unknown || isOld) {
			continue
		}
		if isOld && t.Replay {
			t.Values = nil // these are read, and so may be old
		}

		if t.Unknown && t.Keyed {
			// At most one try of a key has made the change, so the first try, which had the most time for it, stands
			// for all. It did so before the first answer that says that the change was made before.
			answer, answered := made[t.ID]
			if included[t.ID] || answered && !answer.Replay {
				continue
			}
			included[t.ID] = true
			if answered {
				t.end = max(t.begin, answer.end)
			}
		}

		history = append(history, s.operations(&t)...)
	}

	return history
}

func (t *try) reads() bool { return t.Verb == Read || t.Verb == Look }

// settled returns the first answer for each key that says that its change was made.
func (s *Subject) settled() map[int]*try {
	made := map[int]*try{}
	for i := range s.tries {
		t := &s.tries[i]
		if !t.Keyed || t.Unknown || t.Refused {
			continue
		}
		// The earliest one bounds when the change must have been made.
		if first := made[t.ID]; first == nil || t.end < first.end {
			made[t.ID] = t
		}
	}

	return made
}

// operations returns a try in the checker's form. An answer about two things is two operations, because each may be
// true at a moment of its own within the call: a change of a sum, and a read of the sum with the changes that were
// written together with it; a look at a member, and a read of the set's size.
func (s *Subject) operations(t *try) []porcupine.Operation {
	one := porcupine.Operation{Input: &t.Call, Output: &t.Answer, Call: t.begin, Return: t.end}
	isTwo := t.Verb == Look || s.Model == Sum && t.Verb == Add
	if !isTwo || t.Unknown {
		return []porcupine.Operation{one}
	}

	first := Answer{Replay: t.Replay}
	if t.Verb == Look {
		first.Values = t.Values[1:]
	}
	one.Output = &first
	if t.Values == nil {
		return []porcupine.Operation{one}
	}

	read := one
	read.Input = &Call{Verb: Read, After: t.ID}
	read.Output = &Answer{Values: t.Values[:1]}

	return []porcupine.Operation{one, read}
}
