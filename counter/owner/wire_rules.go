package owner

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"headcount/counter"
)

// maxKnownRules bounds Rules. Beyond it all are dropped, which loses nothing: each call brings its rules along.
const maxKnownRules = 10_000

// Rules caches the rules that arrive with other processes' calls, so that each is parsed only once. Its methods may be
// called from any goroutine.
type Rules struct {
	mu    sync.Mutex // guards known
	known map[string]*counter.Rule
}

// parse returns the rule of an encoding, nil if it is malformed. A change without a rule is refused later.
func (k *Rules) parse(b []byte) *counter.Rule {
	k.mu.Lock()
	defer k.mu.Unlock()

	rule, ok := k.known[string(b)]
	if ok {
		return rule
	}

	rule = parseRule(b)
	if k.known == nil || len(k.known) == maxKnownRules {
		k.known = map[string]*counter.Rule{}
	}
	// The key is a copy, so that it does not keep the whole frame in memory.
	k.known[string(b)] = rule

	return rule
}

// rules returns the rules of the changes of a call, each once.
func (c *Call) rules() []*counter.Rule {
	var rules []*counter.Rule
	for i := range c.Ops {
		for j := range c.Ops[i].Changes {
			rule := c.Ops[i].Changes[j].Rule
			// Compared by address, because all changes share the rules of one file.
			if !slices.Contains(rules, rule) {
				rules = append(rules, rule)
			}
		}
	}

	return rules
}

// appendRule appends the fields of a rule that Judge needs, and nothing for nil.
func appendRule(b []byte, rule *counter.Rule) []byte {
	if rule == nil {
		return b
	}

	b = append(b, byte(rule.Kind))
	b = appendBound(b, rule.Floor)
	b = appendBound(b, rule.Ceiling)
	b = binary.AppendVarint(b, int64(rule.Ledger))
	b = binary.AppendUvarint(b, uint64(len(rule.Resolutions)))
	for _, resolution := range rule.Resolutions {
		b = binary.AppendVarint(b, int64(resolution.Step))
		b = binary.AppendVarint(b, int64(resolution.Kept))
	}

	return appendStrings(b, rule.Dimensions)
}

func appendBound(b []byte, bound *int64) []byte {
	b = append(b, flag(bound != nil))
	if bound == nil {
		return b
	}

	return binary.AppendVarint(b, *bound)
}

func parseRule(b []byte) *counter.Rule {
	r := reader{rest: b}
	rule := &counter.Rule{Kind: counter.Kind(r.byte()), Floor: r.bound(), Ceiling: r.bound()}
	rule.Ledger = time.Duration(r.int())
	for range r.count() {
		is := counter.Resolution{Step: time.Duration(r.int()), Kept: time.Duration(r.int())}
		rule.Resolutions = append(rule.Resolutions, is)
	}
	rule.Dimensions = r.strings()
	if r.end("a rule") != nil {
		return nil
	}

	return rule
}

func (r *reader) bound() *int64 {
	if r.byte() == 0 {
		return nil
	}
	bound := r.int()

	return &bound
}
