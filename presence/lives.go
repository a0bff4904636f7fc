package presence

import (
	"iter"
	"slices"
	"strings"
	"unique"
)

// Lives is a set of lives of gateways, for instance of those with subscribers for a
// topic. Millions of topics share a few sets, so a set takes one word, and equal sets
// share their names. Lives are comparable; the zero value is empty.
type Lives struct {
	names unique.Handle[string] // joined by newlines, which no name has
}

// All returns the names of the lives.
func (l Lives) All() iter.Seq[string] {
	if l == (Lives{}) {
		return func(func(string) bool) {}
	}
	return strings.SplitSeq(l.names.Value(), "\n")
}

// Has reports whether the life is in the set.
func (l Lives) Has(life string) bool {
	if l == (Lives{}) {
		return false
	}
	for rest, more := l.names.Value(), true; more; {
		var one string
		if one, rest, more = strings.Cut(rest, "\n"); one == life {
			return true
		}
	}
	return false
}

// With returns the set with the life in it.
func (l Lives) With(life string) Lives {
	if l.Has(life) {
		return l
	}
	return livesOf(append(slices.Collect(l.All()), life))
}

// Without returns the set without the life.
func (l Lives) Without(life string) Lives {
	return livesOf(slices.DeleteFunc(slices.Collect(l.All()), func(one string) bool { return one == life }))
}

func livesOf(names []string) Lives {
	if len(names) == 0 {
		return Lives{}
	}
	slices.Sort(names)
	return Lives{unique.Make(strings.Join(names, "\n"))}
}
