// Package counter defines durable counters: their words, rules and contracts. A counter is a number with a key that
// is kept until it is deleted. (A count is presence: who is here now.) The package knows no HTTP, and stores only by
// contract.
//
// # From a call to a durable change
//
// A call becomes an [Op]: one or more changes that are made together or not at all. A [Combiner] gathers operations
// while a write is under way and passes them together to a [Store], which makes them in one transaction and answers
// each separately. A lone operation waits for nothing.
//
// # Judge
//
// [Judge] has the arithmetic of a change once: kinds, bounds, overflows, versions, ledger entries and replays. Whoever
// can keep others from changing a counter meanwhile gives Judge a [Tx] and keeps what Judge wrote to it: the owner of
// the counter (package owner), or a transaction that has locked its row (package exactpg). Only for applications that
// change exact counters in SQL, exactpg/change.sql repeats the rules.
//
// # Versions
//
// A version is (incarnation, sequence). The sequence grows by 1 with each change, or with several changes that were
// combined into one. A call that changes nothing moves neither the version nor the time. A deleted counter reads like
// one that never existed. A store remembers the highest incarnation that it deleted and gives a greater one to each new
// counter, so no version is used twice.
//
// # Idempotency keys
//
// An operation with an [IdempotencyKey] is made once: for a day a repetition changes nothing and returns the present
// counters. The idempotency key is stored in the same transaction as the change, and it outlives the counter. Refused
// operations are not remembered.
//
// # Limits
//
// A limit permits so much in so long. It is not a counter, but stores keep it with the same durability ([Limiter]).
// Package limit has the arithmetic, and [Limits] gathers requests as the Combiner gathers operations.
//
// # Unique
//
// A counter of kind unique is a HyperLogLog of 2^14 registers (package hyperloglog), stored beside its state; its
// value is the estimate. An addition that changes no register changes nothing. Registers do not contain members, so a
// member cannot be queried or removed, and updates name none.
//
// # History
//
// A sum whose rule has resolutions keeps its increments per time bucket of each. The running time buckets are [Slots]
// of its state, so an increment writes nothing else. When a time bucket is complete, [State.Gain] passes it to the
// store, which keeps it beside the counter under its index for as long as the rule says. [Rule.Range] and [Rule.Window]
// turn a question into the indexes to read, and [Reader.History] reads them. Adjustments and resets belong to no time
// bucket, so the increments of all time add up to the value without them. Only the store's clock counts; when it goes
// back, the running one stays.
//
// A unique whose rule has resolutions keeps registers for each time bucket ([Tx.See]), including the running ones,
// because a member that the counter knows may be new in one. That does not move the version, for the value stays the
// same. A point of a range, a window and a total are unions of time buckets ([Tally]), so no member counts twice. A
// reset keeps the buckets, a delete removes them.
//
// # Dimensions
//
// An addition to a sum may name values of dimensions, such as country=de. They are counted in the same transaction
// ([Tx.Count]) beside the counter, so that other changes do not carry them. The first 1,000 values of a dimension have
// a count each, all later ones share one ([Counted]): listed counts are exact, and together they are everything that
// was counted. Additions with dimensions are not merged, but share writes like any others.
//
// # Top lists
//
// A rule with top answers which counters gained most in a time. Candidates are found with bounded memory, and the
// answer is read from their history.
//
// For each rule and each time bucket of its finest step a process keeps a pruned map of the increments that it made
// itself ([TopTracker]). A counter that may have more than a thousandth of all increments in the time bucket is marked
// in the store before its change is acknowledged ([TopStore]). So any process may die, and processes need not merge
// their maps: a counter with more than a thousandth of all increments has more than a thousandth of those of some
// process.
//
// When a time bucket is complete, any process closes it: it reads what the marked counters gained, stores the first
// 1,000 as a list, and deletes the marks. The list of a longer time bucket is made from those of its parts. A counter
// with more than a thousandth of the increments of a time has more than that in some time bucket of it, so it is in a
// list. An answer adds up the lists within the time and the marked counters of time buckets that are not closed, then
// reads the history of the first of them.
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
	// ErrKey is wrapped by every error about an invalid key.
	ErrKey = errors.New("bad key")
	// ErrMember is wrapped by every error about an invalid member.
	ErrMember = errors.New("bad member")
	// ErrMatch is wrapped by every error about an invalid match.
	ErrMatch = errors.New("bad match")
)

// CheckKey returns why key is not valid for a counter, or nil. The rules are those of a page id, without *.
func CheckKey(key string) error {
	if strings.Contains(key, "*") {
		return fmt.Errorf("%w: it has a *, which only a match has", ErrKey)
	}

	return checkID(ErrKey, key)
}

// CheckMember returns why member is not valid, or nil. The rules are those of a page id.
func CheckMember(member string) error { return checkID(ErrMember, member) }

func checkID(kind error, id string) error {
	if err := presence.CheckPage(id); err != nil {
		// The error speaks of a page. Only its reason holds for keys and members.
		return fmt.Errorf("%w: %s", kind, strings.TrimPrefix(err.Error(), presence.ErrPage.Error()+": "))
	}

	return nil
}

// CheckMatch returns why match is not valid, or nil. A match is a key, or a prefix, which may be empty, followed by *.
func CheckMatch(match string) error {
	if match == "*" {
		return nil
	}

	prefix, isOpen := strings.CutSuffix(match, "*")
	if strings.Contains(prefix, "*") {
		return fmt.Errorf("%w: a * stands only at the end", ErrMatch)
	}
	if !isOpen {
		return checkID(ErrMatch, match)
	}

	if utf8.RuneCountInString(prefix) >= MaxKeyLength {
		return fmt.Errorf("%w: its prefix is longer than %d characters", ErrMatch, MaxKeyLength-1)
	}

	// A prefix that is no valid key by itself may begin valid ones: check one of those.
	return checkID(ErrMatch, prefix+"a")
}

// Matches reports whether key fits match.
func Matches(match, key string) bool {
	prefix, open := strings.CutSuffix(match, "*")

	return key == match || open && strings.HasPrefix(key, prefix)
}

// Counter is the value of one counter at one moment. Of two values of one key, the one with the greater Version is
// newer. A deleted counter has the value 0 and the zero Version, like one that never existed.
type Counter struct {
	Key     string
	Kind    Kind // zero only if the counter does not exist: see Or
	Value   int64
	Updated time.Time // last change; zero if the counter does not exist
	Version presence.Version
	// Reserved is what open reservations have taken out of the value.
	Reserved int64
	Approx   bool // the value may lack acknowledged changes; never set by an exact read
	Stale    bool // the last known value, because the store is unavailable
}

// Touched reports whether the counter exists.
func (c Counter) Touched() bool { return c.Version != presence.Version{} }

// Or returns c, with that kind if c does not exist.
func (c Counter) Or(kind Kind) Counter {
	if c.Kind == 0 {
		c.Kind = kind
	}

	return c
}

// AppendJSON appends the form that clients see:
//
//	{"key":"likes:42","kind":"members","value":12,
//	"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-42","exact":true}
func (c Counter) AppendJSON(b []byte) []byte {
	b = append(b, '{')
	b = c.AppendMembers(b)

	return append(b, '}')
}

// AppendMembers appends the members of that object without the braces, for answers and frames that have further
// members.
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
	if c.Kind.Estimates() {
		// This is the standard error of 2^14 registers.
		b = append(b, `false,"error":0.0081`...)
	} else {
		b = strconv.AppendBool(b, !c.Approx)
	}
	if c.Stale {
		b = append(b, `,"stale":true`...)
	}
	// Most counters never have a reservation, so the member is left out.
	if c.Reserved != 0 {
		b = append(b, `,"reserved":`...)
		b = strconv.AppendInt(b, c.Reserved, 10)
	}

	return b
}

// MarshalJSON implements json.Marshaler with AppendJSON.
func (c Counter) MarshalJSON() ([]byte, error) { return c.AppendJSON(nil), nil }

// appendText appends s, any valid UTF-8, as a JSON string.
func appendText(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // impossible: every string can be marshalled
		panic(err)
	}

	return append(b, quoted...)
}
