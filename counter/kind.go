package counter

import (
	"slices"
	"strings"
)

// Kind is the kind of a counter. A counter that does not exist has the zero Kind.
type Kind uint8

// The kinds. Stores keep their numbers, so these never change.
const (
	Sum     Kind = 1 // a number changed by deltas
	Exact   Kind = 2 // a number with bounds and a ledger of every change
	Members Kind = 3 // a set; its value is its size
	Unique  Kind = 4 // an estimate of the distinct members ever added
)

// traits are what a kind is like. Nothing else compares kinds to find that out.
type traits struct {
	name   string   // in rules and answers
	noun   string   // in sentences; empty: a counter of that kind
	fields []string // of a rule, which not every kind has
	verbs  []Verb   // that it takes. Delete is for every kind

	number bool // it is moved by numbers; otherwise it has members
	exact  bool // every change is in its ledger, and a batch of changes is one transaction
	gains  bool // what it gains is kept by time bucket and by dimension, and additions can be merged
	knows  bool // it knows its members: they can leave, and be asked for
}

var kinds = [...]traits{
	Sum: {
		name: "sum", noun: "a sum", number: true, gains: true,
		fields: []string{"buckets", "dimensions", "top"},
		verbs:  []Verb{Add, Adjust, Reset},
	},
	Exact: {
		name: "exact", noun: "an exact counter", number: true, exact: true,
		fields: []string{"floor", "ceiling", "ledger"},
		verbs:  []Verb{Add, Adjust, Reset, Set, Reserve, Commit, Cancel, Expire},
	},
	Members: {name: "members", verbs: []Verb{Edit, Reset}, knows: true},
	Unique:  {name: "unique", fields: []string{"buckets"}, verbs: []Verb{Edit, Reset}},
}

// of returns the traits of a kind, those of no kind if it is unknown.
func (k Kind) of() *traits {
	if int(k) < len(kinds) {
		return &kinds[k]
	}

	return &kinds[0]
}

// String returns the kind's name in rules and answers.
func (k Kind) String() string {
	if name := k.of().name; name != "" {
		return name
	}

	return "none"
}

// KindNames returns the names of all kinds.
func KindNames() []string { return namesOf(kindsThat(func(Kind) bool { return true })) }

func namesOf(some []Kind) (names []string) {
	for _, k := range some {
		names = append(names, k.String())
	}

	return names
}

// ParseKind returns the kind with that name.
func ParseKind(s string) (Kind, bool) {
	for k := range kinds {
		if s != "" && kinds[k].name == s {
			return Kind(k), true
		}
	}

	return 0, false
}

// Number reports whether counters of kind k are changed by deltas. All others have members.
func (k Kind) Number() bool { return k.of().number }

// IsExact reports whether every change of a counter is in its ledger, and a batch of changes is one transaction.
func (k Kind) IsExact() bool { return k.of().exact }

// Gains reports whether what a counter gains is kept by time bucket and by dimension.
func (k Kind) Gains() bool { return k.of().gains }

// KnowsMembers reports whether a counter knows its members: they can leave, and be asked for.
func (k Kind) KnowsMembers() bool { return k.of().knows }

// Estimates reports whether the value is an estimate of how many different members there were.
func (k Kind) Estimates() bool { return k != 0 && !k.Number() && !k.KnowsMembers() }

// Takes reports whether counters of kind k take changes with a verb.
func (k Kind) Takes(v Verb) bool { return v == Delete || slices.Contains(k.of().verbs, v) }

// withField returns the kinds whose rules have a field, none if all have it.
func withField(field string) []Kind {
	return kindsThat(func(k Kind) bool { return slices.Contains(k.of().fields, field) })
}

func kindsThat(are func(Kind) bool) (some []Kind) {
	for k := range kinds {
		if k != 0 && are(Kind(k)) {
			some = append(some, Kind(k))
		}
	}

	return some
}

// nounOf returns what a counter of one of some kinds is called.
func nounOf(some []Kind) string {
	var nouns []string
	for _, k := range some {
		if k.of().noun == "" {
			return "a counter of kind " + kindsText(some)
		}
		nouns = append(nouns, k.of().noun)
	}

	return orText(nouns)
}

func kindsText(some []Kind) string { return orText(namesOf(some)) }

func orText(names []string) string {
	last := len(names) - 1
	if last < 1 {
		return strings.Join(names, "")
	}

	return strings.Join(names[:last], ", ") + " or " + names[last]
}
