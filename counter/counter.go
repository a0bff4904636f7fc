// Package counter holds the words, the rules and the contracts of counters:
// numbers with a key that are kept until they are deleted. (A count is
// presence: who is here now.) It knows no HTTP, and no store but by contract.
//
// # From a call to what is safe
//
// A call becomes an [Op]: one or more changes that are made all or not at all.
// The [Combiner] gathers operations while a write is under way and hands them
// to a [Store] together; the store makes them in one durable step and answers
// each by itself. A lone operation waits for nothing.
//
// # Who judges
//
// What a change does to a counter is arithmetic, and stands once, in [Judge]:
// kinds, bounds, overflows, versions, ledger entries and replays. A store that
// can hold a counter still while Go looks at it (memory, a file, a row that is
// locked) gives Judge a [Step] and keeps what Judge did. A store that cannot
// (Redis) says the same in its own language; package countertest is the measure
// of both.
//
// # Versions
//
// A counter's version is (incarnation, sequence). Its sequence grows with each
// change, by 1 or, when changes were combined, by 1 for all of them. What
// changes nothing moves neither version nor time. A deleted counter reads as
// never touched; a store remembers the highest incarnation it ever deleted, and
// a counter that is made gets a greater one, so no version is ever used twice.
//
// # Identities
//
// An operation with an [Identity] is made once: for a day a repetition changes
// nothing and is answered with the counters as they are. An identity is kept in
// the same step as the change, and outlives the counter. What was refused is
// not remembered.
//
// # Limits
//
// A limit says whether so much may pass in so long. It is no counter, but it is kept where counters
// are, and with the same promises ([Limiter]). Its arithmetic is in package limit; [Limits] stand in
// front of the store, as the Combiner does.
//
// # Unique
//
// A counter of kind unique is 2^14 registers (package hyperloglog), beside its state in
// every store, and its value is the estimate that they give. An add that changes no
// register changes nothing. Registers know no member: so nobody can be asked about
// or taken out, and the feed names nobody.
//
// # History
//
// A sum whose rule has buckets keeps what it gained in each step of time. The steps that
// are running are [Slots] of its state: a change writes nothing else. When a step is over
// [State.Gain] hands it to the store, which keeps it under its number beside the counter,
// as long as the rule says. [Rule.Range] and [Rule.Window] make of a question which steps
// to read; [Reader.History] reads them. Adjustments and resets are in no step, so the
// gains of all time are the value without them. Only the store's clock counts, and when it
// goes back the step stays.
//
// A unique whose rule has buckets keeps registers for each step of time, beside the counter
// under the step's number ([Step.See]), and changes those of the running steps at once: a
// member who is in the counter already may be new in the step. That moves no version, for the
// value is the same. A point of a range, a window and a total are unions of steps ([Tally]),
// so nobody is counted twice; they are read and united a part at a time. A reset leaves
// all steps, a delete takes them away.
//
// # Sharded sums
//
// A store in Redis may split a sum into shards. Its record says so ([Sharding]), and has the master
// value; a change that needs the value whole is refused with [ErrSharded]. Package hot splits and
// merges; nobody else has to know.
//
// # Dimensions
//
// An addition to a sum may say under which values it counts, such as country=de. It is counted
// there in the same durable step ([Step.Count]), beside the counter: its state knows nothing of
// it, so other changes do not carry dimensions around. The first 1,000 values of a dimension are kept with their counts,
// those of all others are one number ([Counted]): what is listed is exact, and all together is what was
// counted. Changes with dimensions are not merged, but they gather and go in one step like any
// others. Behind Redis, what was counted since the last checkpoint is added to what PostgreSQL has.
//
// # Top
//
// What gained most under a rule with top is found among candidates, and answered with what its history says. For each rule and
// each step of its finest bucket a process has a pruned map of what counters gained by its own changes, whose size and
// error are bounded ([TopTracker]). A counter that may have gained more than a thousandth of all in the step is
// marked in the store before the change is acknowledged ([TopStore]): so a process may die at any time, and several processes
// need not know each other's maps, for what has more than a thousandth of all has more than a thousandth in one of them.
// When a step is over, any process closes it: it reads what those that are marked have gained, keeps the first 1,000 as a
// list, and forgets the marks; a longer step has a list made of those of its parts. Each counter with more than a
// thousandth of what was gained in a time has more than that in one of its steps, so it is in a list.
// An answer adds up the lists of the steps within the time, and what those that are marked gained in
// the steps that are not closed, and reads what the first of them have gained.
package counter

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"headcount/presence"
)

// MaxKeyLength is the longest key or member, in code points.
const MaxKeyLength = presence.MaxPageLength

var (
	// ErrKey is in every error about a key that cannot be.
	ErrKey = errors.New("bad key")
	// ErrMember is in every error about a member that cannot be.
	ErrMember = errors.New("bad member")
	// ErrMatch is in every error about a match that cannot be.
	ErrMatch = errors.New("bad match")
)

// CheckKey says why key cannot be a counter's, or nil: the rules of a page id,
// and no * in it.
func CheckKey(key string) error {
	if strings.Contains(key, "*") {
		return fmt.Errorf("%w: it has a *, which only a match has", ErrKey)
	}
	return checkID(ErrKey, key)
}

// CheckMember says why member cannot be one, or nil: the rules of a page id.
func CheckMember(member string) error { return checkID(ErrMember, member) }

func checkID(kind error, id string) error {
	if err := presence.CheckPage(id); err != nil {
		return fmt.Errorf("%w: %s", kind, strings.TrimPrefix(err.Error(), presence.ErrPage.Error()+": "))
	}
	return nil
}

// CheckMatch says why match cannot be one, or nil: a key, or a prefix (also an
// empty one) and * at its end.
func CheckMatch(match string) error {
	prefix, open := strings.CutSuffix(match, "*")
	if strings.Contains(prefix, "*") {
		return fmt.Errorf("%w: a * stands only at the end", ErrMatch)
	}
	switch {
	case open && prefix == "":
		return nil
	case open && utf8.RuneCountInString(prefix) >= MaxKeyLength:
		return fmt.Errorf("%w: its prefix is longer than %d characters", ErrMatch, MaxKeyLength-1)
	case open: // what comes after may save a prefix that is reserved, or ends in a joiner
		prefix += "a"
	}
	return checkID(ErrMatch, prefix)
}

// Matches reports whether key fits match.
func Matches(match, key string) bool {
	prefix, open := strings.CutSuffix(match, "*")
	return key == match || open && strings.HasPrefix(key, prefix)
}

// Kind is what a counter is. The zero Kind is that of a counter never touched.
type Kind uint8

// The kinds. Their numbers are kept by stores: they never change.
const (
	Sum     Kind = 1 // a number moved by deltas
	Exact   Kind = 2 // a number with bounds, every change of which is in its ledger
	Members Kind = 3 // a set; its value is its size
	Unique  Kind = 4 // an estimate of the distinct members ever added
)

var kindNames = [...]string{Sum: "sum", Exact: "exact", Members: "members", Unique: "unique"}

// String is the kind's outside name.
func (k Kind) String() string {
	if int(k) < len(kindNames) && k != 0 {
		return kindNames[k]
	}
	return "none"
}

// ParseKind reads what String wrote.
func ParseKind(s string) (Kind, bool) {
	for k, name := range kindNames {
		if name != "" && name == s {
			return Kind(k), true
		}
	}
	return 0, false
}

// Number reports whether deltas move a counter of kind k.
func (k Kind) Number() bool { return k == Sum || k == Exact }

// UniqueError is the standard error of a value of kind Unique.
const UniqueError = 0.0081

// Counter is the value of one counter at one moment. Of two of one key the one
// with the greater Version holds, but for a deleted counter, which reads as one
// never touched: value 0, the zero Version.
type Counter struct {
	Key     string
	Kind    Kind // zero only from a store that never saw the key: see Or
	Value   int64
	Updated time.Time // last change; zero when never touched
	Version presence.Version
	Approx  bool // it may lag behind what was acknowledged; never set for an exact read
	Stale   bool // the last known value, served while the store is away
	// Sharding is what the record of a sharded sum says of its shards, see ParseSharding. Approx is set
	// while they may have what Value has not.
	Sharding string
}

// Touched reports whether the counter exists.
func (c Counter) Touched() bool { return c.Version != presence.Version{} }

// IsSharded reports whether shards may have what Value has not.
func (c Counter) IsSharded() bool { return sharded(c.Sharding) }

// Or is c, with kind when c is a counter never touched.
func (c Counter) Or(kind Kind) Counter {
	if c.Kind == 0 {
		c.Kind = kind
	}
	return c
}

// AppendJSON appends the outside form:
// {"key":"likes:42","kind":"members","value":12,"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-42","exact":true}.
func (c Counter) AppendJSON(b []byte) []byte {
	b = append(b, '{')
	b = c.AppendMembers(b)
	return append(b, '}')
}

// AppendMembers appends the members of the outside form without the braces,
// for answers and frames that carry more than the counter.
func (c Counter) AppendMembers(b []byte) []byte {
	b = append(b, `"key":`...)
	b = presence.AppendString(b, presence.KeyOf(c.Key))
	b = append(b, `,"kind":"`...)
	b = append(b, c.Kind.String()...)
	b = append(b, `","value":`...)
	b = strconv.AppendInt(b, c.Value, 10)
	b = append(b, `,"updated_at":`...)
	b = presence.AppendTime(b, c.Updated)
	b = append(b, `,"version":"`...)
	b = strconv.AppendUint(b, c.Version.Incarnation, 10)
	b = append(b, '-')
	b = strconv.AppendUint(b, c.Version.Sequence, 10)
	b = append(b, `","exact":`...)
	switch {
	case c.Kind == Unique:
		b = append(b, `false,"error":0.0081`...)
	default:
		b = strconv.AppendBool(b, !c.Approx)
	}
	if c.Stale {
		b = append(b, `,"stale":true`...)
	}
	return b
}

// MarshalJSON is AppendJSON for encoding/json.
func (c Counter) MarshalJSON() ([]byte, error) { return c.AppendJSON(nil), nil }

// appendText appends s, any valid UTF-8, as a JSON string.
func appendText(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // a string always marshals
		panic(err)
	}
	return append(b, quoted...)
}
