package presence

import (
	"iter"
	"slices"
	"strings"
	"unique"
)

// Incarnations is a set of names of incarnations (see IncarnationName), for instance of
// the gateways with subscribers for a topic. Millions of topics share a few sets, so a set
// takes one word of memory, and equal sets share their names. Sets are comparable; the
// zero value is empty.
type Incarnations struct {
	names unique.Handle[string] // joined by newlines, which no name has
}

// All returns the names in the set.
func (l Incarnations) All() iter.Seq[string] {
	if l == (Incarnations{}) {
		return func(func(string) bool) {}
	}

	return strings.SplitSeq(l.names.Value(), "\n")
}

// Has reports whether name is in the set.
func (l Incarnations) Has(name string) bool {
	if l == (Incarnations{}) {
		return false
	}
	// Cut by hand, so that nothing is allocated.
	rest := l.names.Value()
	for more := true; more; {
		var one string
		one, rest, more = strings.Cut(rest, "\n")
		if one == name {
			return true
		}
	}

	return false
}

// With returns the set with name added.
func (l Incarnations) With(name string) Incarnations {
	if l.Has(name) {
		return l
	}
	// The common case: a topic has one gateway.
	if l == (Incarnations{}) {
		return Incarnations{unique.Make(name)}
	}

	return incarnationsOf(append(slices.Collect(l.All()), name))
}

// Without returns the set with name removed.
func (l Incarnations) Without(name string) Incarnations {
	return incarnationsOf(slices.DeleteFunc(slices.Collect(l.All()), func(one string) bool { return one == name }))
}

func incarnationsOf(names []string) Incarnations {
	if len(names) == 0 {
		return Incarnations{}
	}

	// In order, so that equal sets are one text, and take memory once.
	slices.Sort(names)
	return Incarnations{unique.Make(strings.Join(names, "\n"))}
}
