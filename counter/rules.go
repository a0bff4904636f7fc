package counter

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

// ErrRule is in every error about rules that cannot be. Its text is one line
// that names the rule, the field and the mend.
var ErrRule = errors.New("bad counters")

// Defaults and bounds of rules.
const (
	DefaultLedger = 90 * 24 * time.Hour // how long entries of a ledger are kept
	DefaultStale  = 5 * time.Second     // most age of an approximate read
	DefaultMax    = 1_000_000           // counters of a rule that everybody may change
	MaxRules      = 1000
	MaxBuckets    = 4 // of one rule
	MaxDimensions = 8 // of one rule
	maxKept       = 100 * 365 * 24 * time.Hour
)

// Public is what a rule opens for everyone.
type Public uint8

// What may be open.
const (
	PublicRead Public = 1 << iota
	PublicIncrement
	PublicMember
)

var publicNames = []string{"read", "increment", "member"}

// Bucket is one history of a rule: what counters gained in each Step, kept for Kept.
type Bucket struct{ Step, Kept time.Duration }

// Rule is what the counters of a match are. Nobody changes it.
type Rule struct {
	Match          string // with the site, as the names of the counters: see Rules.For
	Kind           Kind
	Floor, Ceiling *int64 // of an Exact; nil: none; Floor <= 0 <= Ceiling
	Public         Public
	Buckets        []Bucket      // finest first; of Sum and Unique
	Dimensions     []string      // names; of Sum
	Top            bool          // of a Sum with buckets
	Ledger         time.Duration // how long entries of an Exact's ledger are kept; 0: for ever
	// Max is about how many counters with the match may exist when a caller without API key makes another; 0: any number.
	Max   int64
	Stale time.Duration // most age of an approximate read; 0: always exact
}

// ledgerKept is how long a new entry is kept. What only has resets and
// adjustments keeps them as long as an Exact does by default.
func (rule *Rule) ledgerKept(have Kind) time.Duration {
	if have == Exact && rule.Kind == Exact {
		return rule.Ledger
	}
	return DefaultLedger
}

// Allows reports whether all of p is open.
func (rule *Rule) Allows(p Public) bool { return rule.Public&p == p }

// Written is the match as it was written.
func (rule *Rule) Written() string { return presence.KeyOf(rule.Match) }

// Rules are in the order in which they were written. They hold for all sites. What gains
// most is told for each site, so of those that For named each has rules of its own.
type Rules struct {
	list []*Rule
	of   map[presence.Site]*Rules // of other sites than the default one
}

// For returns the rules for these sites.
func (r *Rules) For(sites []presence.Site) *Rules {
	all := &Rules{list: r.list, of: map[presence.Site]*Rules{}}
	for _, site := range sites {
		if site == presence.DefaultSite {
			continue
		}
		own := &Rules{}
		for _, rule := range r.list {
			one := *rule
			one.Match = site.Qualify(rule.Match)
			own.list = append(own.list, &one)
		}
		all.of[site] = own
	}
	return all
}

// In returns the rules of a site, which are asked about keys.
func (r *Rules) In(site presence.Site) *Rules {
	if own := r.of[site]; own != nil {
		return own
	}
	return r
}

// Find is the first rule that fits the name of a counter, or nil.
func (r *Rules) Find(name string) *Rule {
	site, key := presence.SplitName(name)
	for _, rule := range r.In(site).list {
		if Matches(rule.Written(), key) {
			return rule
		}
	}
	return nil
}

// Of is the rule that was written with match, or nil.
func (r *Rules) Of(match string) *Rule {
	for _, rule := range r.list {
		if rule.Written() == match {
			return rule
		}
	}
	return nil
}

// All are the rules of all sites, those of each in their order, not to be changed.
func (r *Rules) All() []*Rule {
	all := r.list
	for _, own := range r.of {
		all = append(all[:len(all):len(all)], own.list...)
	}
	return all
}

// builtin are the rules when no file is given.
const builtin = `{"rules":[
{"match":"views:*","kind":"sum","public":["read"],"buckets":["1m:24h","1h:90d"],"top":true},
{"match":"votes:*","kind":"sum","public":["read","increment"]},
{"match":"likes:*","kind":"members","public":["read","member"]},
{"match":"visitors:*","kind":"unique","public":["read"],"buckets":["1h:90d"]},
{"match":"stock:*","kind":"exact","floor":0,"public":["read"]},
{"match":"*","kind":"sum"}]}`

// BuiltinRules are those that hold when no file is given.
func BuiltinRules() *Rules {
	r, err := ParseRules([]byte(builtin))
	if err != nil { // a test parses them
		panic(err)
	}
	return r
}

// ParseRules reads the JSON of a file of rules, {"rules":[…]}.
func ParseRules(data []byte) (*Rules, error) {
	r := reader{s: string(data)}
	var rules Rules
	found := false
	err := r.object(func(name string) error {
		if name != "rules" {
			return fmt.Errorf("%q is unknown; the object has only \"rules\"", name)
		}
		found = true
		return r.list(func(i int) error {
			if i == MaxRules {
				return fmt.Errorf("there are more than %d rules; a prefix and * covers many keys", MaxRules)
			}
			rule, err := parseRule(&r)
			if err != nil {
				return fmt.Errorf("rule %d%s: %w", i+1, named(rule.Match), err)
			}
			rules.list = append(rules.list, rule)
			return nil
		})
	})
	if err == nil {
		err = r.end()
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrRule, err)
	case !found:
		return nil, fmt.Errorf(`%w: there is no "rules"; write {"rules":[…]}`, ErrRule)
	}
	return &rules, nil
}

func named(match string) string {
	if match == "" {
		return ""
	}
	return " (" + strconv.Quote(match) + ")"
}

// parseRule reads one rule. With an error the rule has what was read before.
func parseRule(r *reader) (*Rule, error) {
	rule := &Rule{Ledger: DefaultLedger, Stale: DefaultStale}
	var given []string
	err := r.object(func(name string) error {
		given = append(given, name)
		if err := rule.field(r, name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err == nil {
		err = rule.check(given)
	}
	return rule, err
}

func (rule *Rule) field(r *reader, name string) (err error) {
	switch name {
	case "match":
		match, err := r.string()
		if err == nil {
			err = CheckMatch(match)
		}
		if err == nil {
			rule.Match = match
		}
		return err
	case "kind":
		text, err := r.string()
		if err != nil {
			return err
		}
		var ok bool
		if rule.Kind, ok = ParseKind(text); !ok {
			return fmt.Errorf("%q is no kind; write sum, exact, members or unique", text)
		}
	case "floor":
		return bound(r, &rule.Floor, "0 or less", func(n int64) bool { return n <= 0 })
	case "ceiling":
		return bound(r, &rule.Ceiling, "0 or more", func(n int64) bool { return n >= 0 })
	case "public":
		return texts(r, func(text string) error {
			i := slices.Index(publicNames, text)
			if i < 0 {
				return fmt.Errorf("%q cannot be open; write read, increment or member", text)
			}
			rule.Public |= 1 << i
			return nil
		})
	case "buckets":
		return texts(r, rule.bucket)
	case "dimensions":
		return texts(r, func(text string) error {
			switch {
			case !dimensionName(text):
				return fmt.Errorf("%q is no name; write 1 to 32 of a-z, 0-9 and _", text)
			case len(rule.Dimensions) == MaxDimensions:
				return fmt.Errorf("there are more than %d; take some away", MaxDimensions)
			}
			rule.Dimensions = append(rule.Dimensions, text)
			return nil
		})
	case "top":
		rule.Top, err = r.bool()
		return err
	case "ledger":
		rule.Ledger, err = keptTime(r, time.Millisecond) // stores keep milliseconds, of which 0 is for ever
		return err
	case "max":
		rule.Max, err = r.integer()
		if err == nil && rule.Max < 1 {
			err = fmt.Errorf("%d cannot be; write 1 or more", rule.Max)
		}
		return err
	case "stale":
		rule.Stale, err = keptTime(r, 1)
		return err
	default:
		return errors.New("it is unknown; a rule has match, kind, floor, ceiling, public, buckets, dimensions, top, ledger, max and stale")
	}
	return nil
}

// texts reads a list of distinct strings.
func texts(r *reader, each func(string) error) error {
	var seen []string
	return r.list(func(int) error {
		text, err := r.string()
		if err != nil {
			return err
		}
		if slices.Contains(seen, text) {
			return fmt.Errorf("%q stands twice; name it once", text)
		}
		seen = append(seen, text)
		return each(text)
	})
}

func bound(r *reader, to **int64, want string, fits func(int64) bool) error {
	n, err := r.integer()
	if err != nil {
		return err
	}
	if !fits(n) {
		return fmt.Errorf("%d cannot be, for a counter begins with 0; write %s", n, want)
	}
	*to = &n
	return nil
}

// BucketSteps are the steps that a bucket may have.
var BucketSteps = []time.Duration{time.Second, 10 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour, 24 * time.Hour}

func (rule *Rule) bucket(text string) error {
	step, kept, ok := strings.Cut(text, ":")
	if !ok {
		return fmt.Errorf("%q is none; write step:kept, like 1m:24h", text)
	}
	var b Bucket
	var err error
	if b.Step, err = ParseDuration(step); err != nil || !slices.Contains(BucketSteps, b.Step) {
		return fmt.Errorf("%q: the step is none of 1s, 10s, 1m, 5m, 15m, 1h, 1d", text)
	}
	if b.Kept, err = ParseDuration(kept); err != nil || b.Kept < b.Step || b.Kept > maxKept {
		return fmt.Errorf("%q: what is kept is a duration from the step to 36500d, like 24h or 90d", text)
	}
	if slices.ContainsFunc(rule.Buckets, func(o Bucket) bool { return o.Step == b.Step }) {
		return fmt.Errorf("%q: the step stands twice; name it once", text)
	}
	if len(rule.Buckets) == MaxBuckets {
		return fmt.Errorf("there are more than %d; take some away", MaxBuckets)
	}
	rule.Buckets = append(rule.Buckets, b)
	slices.SortFunc(rule.Buckets, func(a, b Bucket) int { return cmp.Compare(a.Step, b.Step) })
	return nil
}

func dimensionName(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= 32
}

// keptTime reads a duration as a string, or the number 0. Any other is at least that long.
func keptTime(r *reader, least time.Duration) (time.Duration, error) {
	if r.peek() == '0' {
		n, err := r.integer()
		return time.Duration(n), err
	}
	text, err := r.string()
	if err != nil {
		return 0, errors.New(`want a duration in quotes, like "5s" or "90d"`)
	}
	d, err := ParseDuration(text)
	if err == nil && (d != 0 && d < least || d > maxKept) {
		err = fmt.Errorf("%q is neither 0 nor from %s to 36500d", text, least)
	}
	return d, err
}

// check looks at the fields beside each other. given are those that were written.
func (rule *Rule) check(given []string) error {
	for _, name := range []string{"match", "kind"} {
		if !slices.Contains(given, name) {
			return fmt.Errorf("%s: it is missing; every rule has a match and a kind", name)
		}
	}
	for _, f := range []struct {
		name string
		of   []Kind
	}{
		{"floor", []Kind{Exact}}, {"ceiling", []Kind{Exact}}, {"ledger", []Kind{Exact}},
		{"buckets", []Kind{Sum, Unique}}, {"dimensions", []Kind{Sum}}, {"top", []Kind{Sum}},
	} {
		if slices.Contains(given, f.name) && !slices.Contains(f.of, rule.Kind) {
			return fmt.Errorf("%s: a counter of kind %s has none; take it away, or make the kind %s", f.name, rule.Kind, kindsText(f.of))
		}
	}
	if open := rule.Public&(PublicIncrement|PublicMember) != 0; open && rule.Max == 0 {
		rule.Max = DefaultMax
	} else if !open && rule.Max > 0 {
		return errors.New("max: it bounds what everybody may make, and this rule opens neither increment nor member; take it away")
	}
	switch {
	case rule.Top && len(rule.Buckets) == 0:
		return errors.New("top: it needs buckets; add some, like [\"1m:24h\"]")
	case rule.Allows(PublicIncrement) && !rule.Kind.Number():
		return fmt.Errorf("public: a counter of kind %s has no increment; take it away", rule.Kind)
	case rule.Allows(PublicMember) && rule.Kind.Number():
		return fmt.Errorf("public: a counter of kind %s has no member; take it away", rule.Kind)
	}
	return nil
}

func kindsText(kinds []Kind) string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.String())
	}
	return strings.Join(names, " or ")
}

// ParseDuration reads a duration as Go writes it, in which d stands for 24 h:
// "90d", "1d12h". It is not negative.
func ParseDuration(s string) (time.Duration, error) {
	fault := fmt.Errorf("%q is no duration; write one like 5s, 24h or 90d", s)
	days, rest, ok := strings.Cut(s, "d")
	if !ok {
		days, rest = "0", s
	}
	n, err := strconv.ParseUint(days, 10, 16)
	if err != nil {
		return 0, fault
	}
	d := time.Duration(n) * 24 * time.Hour
	if rest != "" || !ok {
		more, err := time.ParseDuration(rest)
		if err != nil || more < 0 || d+more < d {
			return 0, fault
		}
		d += more
	}
	return d, nil
}
