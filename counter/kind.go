package counter

import "slices"

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
	name   string           // in rules and answers
	fields []string         // of a rule, which not every kind has
	lacks  [Set + 1]Refusal // of the verbs that it refuses, why

	number  bool // it is moved by deltas; otherwise it has members
	exact   bool // every change is in its ledger, and a batch of changes is one step
	gains   bool // what it gains is kept by time bucket and by dimension, and additions can be merged
	forgets bool // it knows its members: they can leave, and be asked for
}

var kinds = [...]traits{
	Sum: {
		name: "sum", fields: []string{"buckets", "dimensions", "top"}, number: true, gains: true,
		lacks: [Set + 1]Refusal{Set: OnlyExactIsSet, Edit: OnlySetsHaveMembers},
	},
	Exact: {
		name: "exact", fields: []string{"floor", "ceiling", "ledger"}, number: true, exact: true,
		lacks: [Set + 1]Refusal{Edit: OnlySetsHaveMembers},
	},
	Members: {
		name: "members", forgets: true,
		lacks: [Set + 1]Refusal{Add: OnlyNumbersMove, Adjust: OnlyNumbersMove, Set: OnlyExactIsSet},
	},
	Unique: {
		name: "unique", fields: []string{"buckets"},
		lacks: [Set + 1]Refusal{Add: OnlyNumbersMove, Adjust: OnlyNumbersMove, Set: OnlyExactIsSet},
	},
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

// IsExact reports whether every change of a counter is in its ledger, and a batch of changes is one step.
func (k Kind) IsExact() bool { return k.of().exact }

// Gains reports whether what a counter gains is kept by time bucket and by dimension.
func (k Kind) Gains() bool { return k.of().gains }

// Forgets reports whether members of a counter can leave, and be asked for.
func (k Kind) Forgets() bool { return k.of().forgets }

// Estimates reports whether the value is an estimate of how many different members there were.
func (k Kind) Estimates() bool { return k != 0 && !k.Number() && !k.Forgets() }

// withField returns the kinds whose rules have a field, none if all have it.
func withField(field string) (some []Kind) {
	for k := range kinds {
		if slices.Contains(kinds[k].fields, field) {
			some = append(some, Kind(k))
		}
	}

	return some
}
