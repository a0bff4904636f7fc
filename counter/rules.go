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

// ErrRule is wrapped by every error about invalid rules. Such an error is one line that names the rule, the field and
// the correction.
var ErrRule = errors.New("bad counters")

// Defaults and bounds of rules.
const (
	DefaultLedger  = 90 * 24 * time.Hour // retention of ledger entries
	DefaultMaxAge  = 5 * time.Second     // maximum age of an approximate read
	DefaultMax     = 1_000_000           // counters of a rule that is open to the public
	MaxRules       = 1000
	MaxResolutions = 4 // of one rule
	MaxDimensions  = 8 // of one rule
	maxRetention   = 100 * 365 * 24 * time.Hour
)

// Public is a set of operations that a rule permits without an API key.
type Public uint8

// The operations.
const (
	PublicRead Public = 1 << iota
	PublicIncrement
	PublicMember
)

var publicNames = []string{"read", "increment", "member"}

// Resolution is how finely a history is kept, and for how long: increments per time bucket of length Step, for Kept.
type Resolution struct{ Step, Kept time.Duration }

// Rule configures the counters whose key matches Match. It is immutable.
type Rule struct {
	Match          string // with the site, like the names of counters: see Rules.For
	Kind           Kind
	Floor, Ceiling *int64 // for an Exact; nil means none; Floor <= 0 <= Ceiling
	Public         Public
	Resolutions    []Resolution  // finest first; for Sum and Unique
	Dimensions     []string      // names; for Sum
	Top            bool          // whether to keep top lists; for a Sum with resolutions
	Ledger         time.Duration // retention of an Exact's ledger; 0: for ever
	// Max is about how many counters of the match may exist before callers without an API key can create no more; 0: no
	// limit.
	Max    int64
	MaxAge time.Duration // maximum age of an approximate read; 0: always exact
}

// ledgerKept returns the retention of a new ledger entry. Kinds that have entries only for resets and adjustments keep
// them for the default time.
func (rule *Rule) ledgerKept(have Kind) time.Duration {
	if have.IsExact() && rule.Kind.IsExact() {
		return rule.Ledger
	}

	return DefaultLedger
}

// Allows reports whether the rule permits all of p.
func (rule *Rule) Allows(p Public) bool { return rule.Public&p == p }

// Written returns the match as the rules file has it, without the site.
func (rule *Rule) Written() string { return presence.KeyOf(rule.Match) }

// Rules has the rules of all sites in the order of the rules file. Every site has the same rules, but copies of its own
// with the site in Match, because top lists are kept per rule and must not mix sites.
type Rules struct {
	list []*Rule
	of   map[presence.Site]*Rules // for sites other than the default one
}

// For returns the rules for the given sites.
func (r *Rules) For(sites []presence.Site) *Rules {
	all := &Rules{list: r.list, of: map[presence.Site]*Rules{}}
	for _, site := range sites {
		if site == presence.DefaultSite {
			continue
		}

		own := &Rules{}
		// Copies, since much is kept by rule: lists, sizes, what was logged.
		for _, rule := range r.list {
			one := *rule
			one.Match = site.Qualify(rule.Match)
			own.list = append(own.list, &one)
		}
		all.of[site] = own
	}

	return all
}

// In returns the rules of a site.
func (r *Rules) In(site presence.Site) *Rules {
	if own := r.of[site]; own != nil {
		return own
	}

	return r
}

// Find returns the first rule that matches the name of a counter, or nil.
func (r *Rules) Find(name string) *Rule {
	site, key := presence.SplitName(name)
	for _, rule := range r.In(site).list {
		if Matches(rule.Written(), key) {
			return rule
		}
	}

	return nil
}

// AnyExact reports whether a counter whose name begins with prefix may be exact.
func (r *Rules) AnyExact(prefix string) bool {
	site, key := presence.SplitName(prefix)
	for _, rule := range r.In(site).list {
		begin, several := strings.CutSuffix(rule.Written(), "*")
		// The rule takes all counters with the prefix that no earlier rule took.
		hasAll := several && strings.HasPrefix(key, begin)
		hasSome := hasAll || strings.HasPrefix(begin, key)
		if hasSome && rule.Kind.IsExact() {
			return true
		}
		if hasAll { // so no later rule holds
			return false
		}
	}

	return false
}

// Of returns the rule whose match in the rules file is match, or nil.
func (r *Rules) Of(match string) *Rule {
	for _, rule := range r.list {
		if rule.Written() == match {
			return rule
		}
	}

	return nil
}

// All returns the rules of all sites.
func (r *Rules) All() []*Rule {
	all := r.list
	for _, own := range r.of {
		// The capacity is cut, so that append never writes into the list of the default site.
		all = append(all[:len(all):len(all)], own.list...)
	}

	return all
}

// builtin has the rules of a server without a rules file.
const builtin = `{"rules":[
{"match":"views:*","kind":"sum","public":["read"],"buckets":["1m:24h","1h:90d"],"top":true},
{"match":"votes:*","kind":"sum","public":["read","increment"]},
{"match":"likes:*","kind":"members","public":["read","member"]},
{"match":"visitors:*","kind":"unique","public":["read"],"buckets":["1h:90d"]},
{"match":"stock:*","kind":"exact","floor":0,"public":["read"]},
{"match":"*","kind":"sum"}]}`

// BuiltinRules returns the rules of a server without a rules file.
func BuiltinRules() *Rules {
	r, err := ParseRules([]byte(builtin))
	if err != nil { // a test parses them
		panic(err)
	}

	return r
}

// ParseRules parses a rules file, {"rules":[…]}.
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
			// Before the rule is parsed, so that a list without an end costs little.
			if i == MaxRules {
				return fmt.Errorf("there are more than %d rules; use a prefix and * for many keys", MaxRules)
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
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRule, err)
	}
	if !found {
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

// parseRule parses one rule. With an error it returns the fields before it, because the match names the rule in the
// message.
func parseRule(r *reader) (*Rule, error) {
	rule := &Rule{Ledger: DefaultLedger, MaxAge: DefaultMaxAge}
	var given []string
	err := r.object(func(name string) error {
		// The value does not tell what is written: it may be the default.
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
		err = rule.match(r)
	case "kind":
		err = rule.kind(r)
	case "floor":
		err = bound(r, &rule.Floor, "0 or less", func(n int64) bool { return n <= 0 })
	case "ceiling":
		err = bound(r, &rule.Ceiling, "0 or more", func(n int64) bool { return n >= 0 })
	case "public":
		err = texts(r, rule.public)
	case "buckets":
		err = texts(r, rule.parseResolution)
	case "dimensions":
		err = texts(r, rule.dimension)
	case "top":
		rule.Top, err = r.bool()
	case "ledger":
		rule.Ledger, err = durationOr0(r, time.Millisecond) // stores keep milliseconds, and 0 means for ever
	case "max":
		err = rule.max(r)
	case "stale":
		rule.MaxAge, err = durationOr0(r, 1)
	default:
		err = errors.New("unknown field; a rule has " +
			"match, kind, floor, ceiling, public, buckets, dimensions, top, ledger, max and stale")
	}

	return err
}

// match parses the match. The rule gets it if it is valid: only then can a message name the rule by it.
func (rule *Rule) match(r *reader) error {
	text, err := r.string()
	if err != nil {
		return err
	}
	if err := CheckMatch(text); err != nil {
		return err
	}
	rule.Match = text

	return nil
}

func (rule *Rule) max(r *reader) (err error) {
	rule.Max, err = r.integer()
	if err == nil && rule.Max < 1 {
		err = fmt.Errorf("%d is too small; write 1 or more", rule.Max)
	}

	return err
}

func (rule *Rule) kind(r *reader) error {
	text, err := r.string()
	if err != nil {
		return err
	}

	kind, ok := ParseKind(text)
	if !ok {
		return fmt.Errorf("%q is not a kind; write %s", text, orText(KindNames()))
	}
	rule.Kind = kind

	return nil
}

// texts parses a list of distinct strings and calls each with every one.
func texts(r *reader, each func(string) error) error {
	var seen []string

	return r.list(func(int) error {
		text, err := r.string()
		if err != nil {
			return err
		}
		if slices.Contains(seen, text) {
			return fmt.Errorf("%q appears twice; remove one", text)
		}
		seen = append(seen, text)
		return each(text)
	})
}

// public parses one element of public.
func (rule *Rule) public(text string) error {
	i := slices.Index(publicNames, text)
	if i < 0 {
		return fmt.Errorf("%q is not a public operation; write read, increment or member", text)
	}
	rule.Public |= 1 << i

	return nil
}

// dimension parses one element of dimensions.
func (rule *Rule) dimension(text string) error {
	switch {
	case !dimensionName(text):
		return fmt.Errorf("%q is not a valid name; write 1 to 32 of a-z, 0-9 and _", text)
	case len(rule.Dimensions) == MaxDimensions:
		return fmt.Errorf("there are more than %d; remove some", MaxDimensions)
	}
	rule.Dimensions = append(rule.Dimensions, text)

	return nil
}

// bound parses a floor or a ceiling.
func bound(r *reader, to **int64, want string, fits func(int64) bool) error {
	n, err := r.integer()
	if err != nil {
		return err
	}
	if !fits(n) {
		return fmt.Errorf("%d excludes 0, with which a counter begins; write %s", n, want)
	}
	*to = &n

	return nil
}

// ResolutionSteps are the permitted lengths of time buckets.
var ResolutionSteps = []time.Duration{
	time.Second, 10 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour, 24 * time.Hour,
}

// parseResolution parses one element of buckets, step:kept.
func (rule *Rule) parseResolution(text string) error {
	step, kept, ok := strings.Cut(text, ":")
	if !ok {
		return fmt.Errorf("%q is not step:kept, like 1m:24h", text)
	}

	var b Resolution
	var err error
	b.Step, err = ParseDuration(step)
	if err != nil || !slices.Contains(ResolutionSteps, b.Step) {
		return fmt.Errorf("%q: the step must be one of 1s, 10s, 1m, 5m, 15m, 1h, 1d", text)
	}
	b.Kept, err = ParseDuration(kept)
	if err != nil || b.Kept < b.Step || b.Kept > maxRetention {
		return fmt.Errorf("%q: kept must be a duration from the step to 36500d, like 24h or 90d", text)
	}

	if slices.ContainsFunc(rule.Resolutions, func(o Resolution) bool { return o.Step == b.Step }) {
		return fmt.Errorf("%q: its step appears twice; remove one", text)
	}
	if len(rule.Resolutions) == MaxResolutions {
		return fmt.Errorf("there are more than %d; remove some", MaxResolutions)
	}

	rule.Resolutions = append(rule.Resolutions, b)
	// The finest comes first, as questions want it.
	slices.SortFunc(rule.Resolutions, func(a, b Resolution) int { return cmp.Compare(a.Step, b.Step) })

	return nil
}

func dimensionName(s string) bool {
	const characters = "abcdefghijklmnopqrstuvwxyz0123456789_"

	return len(s) >= 1 && len(s) <= 32 && strings.Trim(s, characters) == ""
}

// durationOr0 parses the number 0, or a duration of at least shortest as a string.
func durationOr0(r *reader, shortest time.Duration) (time.Duration, error) {
	if r.peek() == '0' {
		// No other whole number begins with this digit.
		n, err := r.integer()
		return time.Duration(n), err
	}

	text, err := r.string()
	if err != nil {
		return 0, errors.New(`want a duration in quotes, like "5s" or "90d"`)
	}

	d, err := ParseDuration(text)
	isTooShort := d != 0 && d < shortest
	if err == nil && (isTooShort || d > maxRetention) {
		err = fmt.Errorf("%q is out of range; write 0, or a duration from %s to 36500d", text, shortest)
	}

	return d, err
}

// check checks the fields of a rule against each other. given has the names of the fields in the file.
func (rule *Rule) check(given []string) error {
	for _, name := range []string{"match", "kind"} {
		if !slices.Contains(given, name) {
			return fmt.Errorf("%s: it is missing; every rule has a match and a kind", name)
		}
	}
	for _, field := range given {
		of := withField(field)
		if len(of) > 0 && !slices.Contains(of, rule.Kind) {
			const what = "%s: a counter of kind %s has none; remove the field, or make the kind %s"
			return fmt.Errorf(what, field, rule.Kind, kindsText(of))
		}
	}

	isOpen := rule.Public&(PublicIncrement|PublicMember) != 0
	if !isOpen && rule.Max > 0 {
		return errors.New("max: it limits what the public creates, " +
			"and this rule opens neither increment nor member; remove the field")
	}
	// What everybody may create has a bound in any case.
	if isOpen && rule.Max == 0 {
		rule.Max = DefaultMax
	}

	if rule.Top && len(rule.Resolutions) == 0 {
		return errors.New("top: it needs buckets; add some, like [\"1m:24h\"]")
	}
	if rule.Allows(PublicIncrement) && !rule.Kind.Takes(Add) {
		return fmt.Errorf("public: a counter of kind %s has no increment; remove it", rule.Kind)
	}
	if rule.Allows(PublicMember) && !rule.Kind.Takes(Edit) {
		return fmt.Errorf("public: a counter of kind %s has no member; remove it", rule.Kind)
	}

	return nil
}

// ParseDuration parses a non-negative duration in Go's syntax, extended by d for 24 h: "90d", "1d12h".
func ParseDuration(s string) (time.Duration, error) {
	fault := fmt.Errorf("%q is not a duration; write one like 5s, 24h or 90d", s)
	days, rest, hasDays := strings.Cut(s, "d")
	if !hasDays {
		days = "0"
		rest = s
	}

	// So many days always fit a Duration.
	n, err := strconv.ParseUint(days, 10, 16)
	if err != nil {
		return 0, fault
	}
	d := time.Duration(n) * 24 * time.Hour
	if rest == "" && hasDays {
		return d, nil
	}

	more, err := time.ParseDuration(rest)
	if err != nil || more < 0 || d+more < d {
		return 0, fault
	}

	return d + more, nil
}
