package counter

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"headcount/counter/limit"
)

// ErrBody is wrapped by every error about an invalid body. The error says what to send instead.
var ErrBody = errors.New("bad body")

// MaxDimensionLength is the maximum length of a value of a dimension, in code points.
const MaxDimensionLength = 128

func badBody(err error) error {
	if err == nil || errors.Is(err, ErrBody) {
		return err
	}

	return fmt.Errorf("%w: %w", ErrBody, err)
}

// parseObject parses body, an object. It calls field for each member; field returns errUnknown for a member that it
// does not know.
func parseObject(body []byte, known string, field func(r *reader, name string) error) error {
	r := reader{s: string(body)}
	err := r.object(func(name string) error {
		err := field(&r, name)
		switch {
		case errors.Is(err, errUnknown):
			return fmt.Errorf("%q is unknown; the body has %s", name, known)
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err == nil {
		// A second value after the first would otherwise be ignored without a word.
		err = r.end()
	}

	return badBody(err)
}

var errUnknown = errors.New("unknown member")

// ParseStep parses the body of an increment, or of a decrement if down: an object with optional members, or nothing.
func ParseStep(body []byte, key string, rule *Rule, down bool) (Change, error) {
	return parseStep(body, key, rule, down, rule)
}

// ParseOpenStep parses the body of an increment without an API key. Such callers may not send dimensions, so it does
// not check their names.
func ParseOpenStep(body []byte, key string, rule *Rule) (Change, error) {
	return parseStep(body, key, rule, false, nil)
}

func parseStep(body []byte, key string, rule *Rule, down bool, names *Rule) (Change, error) {
	c := Change{Key: key, Rule: rule, Verb: Add, Delta: 1}
	members := "delta and dimensions"
	if rule.Kind.IsExact() {
		members = "delta, reason and by"
	}
	field := func(r *reader, name string) (err error) {
		switch {
		case name == "delta":
			c.Delta, err = integerIn(r, 1, MaxDelta)
		// For kinds without dimensions as well: the error then names the rule that has none.
		case name == "dimensions":
			c.Dimensions, err = dimensions(r, names)
		case rule.Kind.IsExact():
			err = c.why(r, name)
		default:
			err = errUnknown
		}
		return err
	}

	// Without a body a step is 1.
	isGiven := len(bytes.TrimSpace(body)) > 0
	if isGiven {
		if err := parseObject(body, members, field); err != nil {
			return Change{}, err
		}
	}
	// The delta of a decrement is written without a sign, so no body turns a decrement into an increment.
	if down {
		c.Delta = -c.Delta
	}

	return c, nil
}

// ParseBatch parses the body of a batch: {"changes":[{"key":…,"delta":…,"dimensions":…},…]}.
func ParseBatch(body []byte, rules *Rules) ([]Change, error) {
	// The shortest change limits how many a body can have, so a short body takes little memory.
	const shortest = len(`{"key":"a"},`)
	changes := make([]Change, 0, min(MaxChanges, len(body)/shortest))
	err := parseObject(body, "changes", func(r *reader, name string) error {
		if name != "changes" {
			return errUnknown
		}

		return r.list(func(i int) error {
			// Before the next change is parsed, so that a body beyond the bound costs little.
			if i == MaxChanges {
				return fmt.Errorf("there are more than %d; send the rest in another batch", MaxChanges)
			}

			c, err := batched(r, rules)
			if err != nil {
				return fmt.Errorf("change %d: %w", i+1, err)
			}

			changes = append(changes, c)
			return nil
		})
	})
	if err == nil && len(changes) == 0 {
		err = fmt.Errorf("%w: there are no changes; send 1 to %d in \"changes\"", ErrBody, MaxChanges)
	}
	if err != nil {
		return nil, err
	}

	for i := range changes {
		// A batch of exact counters is one transaction, and any other is made in parts. A mixed one could be neither.
		if changes[i].Rule.Kind.IsExact() != changes[0].Rule.Kind.IsExact() {
			const what = "%w: only one of %q and %q is exact; send exact counters in a batch of their own"
			return nil, fmt.Errorf(what, ErrBody, changes[0].Key, changes[i].Key)
		}
	}

	return changes, nil
}

// batched parses one change of a batch.
func batched(r *reader, rules *Rules) (Change, error) {
	c := Change{Verb: Add, Delta: 1}
	dimensionsAt := -1 // where to parse them again, when the key, which may follow, has given the rule
	err := r.object(func(name string) (err error) {
		switch name {
		case "key":
			c.Key, err = keyOf(r)
		case "delta":
			c.Delta, err = integerIn(r, -MaxDelta, MaxDelta)
			if err == nil && c.Delta == 0 {
				err = errors.New("it is 0; omit the change")
			}
		case "dimensions":
			r.space()
			dimensionsAt = r.at
			// Parsed for its end only, since the names can be judged only by the rule.
			_, err = dimensions(r, nil)
		default:
			return fmt.Errorf("%q is unknown; a change has key, delta and dimensions", name)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return c, err
	}
	if c.Key == "" {
		return c, errors.New("key is missing")
	}

	c.Rule = rules.Find(c.Key)
	if c.Rule == nil {
		return c, fmt.Errorf("%w: no rule fits %q", ErrKey, c.Key)
	}
	if dimensionsAt < 0 {
		return c, nil
	}

	again := reader{s: r.s, at: dimensionsAt}
	c.Dimensions, err = dimensions(&again, c.Rule)
	if err != nil {
		return c, fmt.Errorf("dimensions: %w", err)
	}

	return c, nil
}

func keyOf(r *reader) (string, error) {
	key, err := r.string()
	if err != nil {
		return "", err
	}

	return key, CheckKey(key)
}

// ParseMembers parses the body of a call on members: {"add":[…],"remove":[…]}. A member may occur several times in
// one list.
func ParseMembers(body []byte, key string, rule *Rule) (Change, error) {
	c := Change{Key: key, Rule: rule, Verb: Edit}
	place := map[string]bool{} // true: in add, false: in remove
	err := parseObject(body, "add and remove", func(r *reader, name string) error {
		joins := name == "add"
		if !joins && name != "remove" {
			return errUnknown
		}

		return r.list(func(int) error {
			m, err := r.string()
			if err == nil {
				err = CheckMember(m)
			}
			if err != nil {
				return err
			}

			was, again := place[m]
			if again && was != joins {
				return fmt.Errorf("%q is in both add and remove; send it in one", m)
			}
			if again {
				return nil
			}
			// Repetitions are gone by now, so the bound is one of different members.
			if len(place) == MaxMembers {
				return fmt.Errorf("there are more than %d members; send the rest in another call", MaxMembers)
			}

			place[m] = joins
			if joins {
				c.Join = append(c.Join, m)
			} else {
				c.Leave = append(c.Leave, m)
			}
			return nil
		})
	})
	if err == nil && len(place) == 0 {
		err = fmt.Errorf("%w: there are no members; send 1 to %d in \"add\" and \"remove\"", ErrBody, MaxMembers)
	}
	if err == nil && !rule.Kind.KnowsMembers() && len(c.Leave) > 0 {
		err = fmt.Errorf("%w: remove: a counter of kind unique cannot forget a member; send only \"add\"", ErrBody)
	}
	if err != nil {
		return Change{}, err
	}

	return c, nil
}

// ParseNothing parses the body of a call whose path says all: none, or {}.
func ParseNothing(body []byte) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}

	return parseObject(body, "no members", func(*reader, string) error { return errUnknown })
}

// ParseReset parses the body of a reset: {"reason":…,"by":…}, both required.
func ParseReset(body []byte, key string, rule *Rule) (Change, error) {
	return parseCorrection(body, Change{Key: key, Rule: rule, Verb: Reset}, "reason and by", "")
}

// ParseAdjust parses the body of an adjustment: {"delta":…,"reason":…,"by":…}, all required.
func ParseAdjust(body []byte, key string, rule *Rule) (Change, error) {
	return parseCorrection(body, Change{Key: key, Rule: rule, Verb: Adjust}, "delta, reason and by", "delta")
}

// ParseSet parses the body of a set: {"value":…,"reason":…,"by":…}, all required.
func ParseSet(body []byte, key string, rule *Rule) (Change, error) {
	return parseCorrection(body, Change{Key: key, Rule: rule, Verb: Set}, "value, reason and by", "value")
}

// parseCorrection parses reason, by and, unless its name is empty, a number.
func parseCorrection(body []byte, c Change, members, number string) (Change, error) {
	given := false
	err := parseObject(body, members, func(r *reader, name string) (err error) {
		// An empty number means that there is none, and a member without a name must not be taken for it.
		if name == "" || name != number {
			return c.why(r, name)
		}

		given = true
		c.Delta, err = r.integer()
		return err
	})
	lacksDelta := c.Verb == Adjust && c.Delta == 0
	// Unlike an adjustment, a set may have the number 0, so only a missing one is wrong.
	lacksValue := c.Verb == Set && !given
	switch {
	case err != nil:
	case lacksDelta:
		err = fmt.Errorf("%w: delta: it is missing or 0; send any other whole number", ErrBody)
	case lacksValue:
		err = fmt.Errorf("%w: value: it is missing; send a whole number", ErrBody)
	case c.Reason == "":
		err = fmt.Errorf("%w: reason: it is missing; send 1 to %d characters", ErrBody, MaxText)
	case c.By == "":
		err = fmt.Errorf("%w: by: it is missing; send 1 to %d characters", ErrBody, MaxText)
	}
	if err != nil {
		return Change{}, err
	}

	return c, nil
}

// why parses reason or by.
func (c *Change) why(r *reader, name string) (err error) {
	switch name {
	case "reason":
		c.Reason, err = text(r, MaxText)
	case "by":
		c.By, err = text(r, MaxText)
	default:
		err = errUnknown
	}

	return err
}

// ParseLimit parses the request to a limit in the body of a call:
// {"limit":100,"window":"1m","cost":1,"algorithm":"sliding"}, of which cost and algorithm are optional.
func ParseLimit(body []byte, key string) (limit.Request, error) {
	c := limit.Request{Name: limit.Name{Key: key, Algorithm: limit.Sliding}, Cost: 1}
	err := parseObject(body, "limit, window, cost and algorithm", func(r *reader, name string) (err error) {
		switch name {
		case "limit":
			c.Limit, err = r.integer()
		case "cost":
			c.Cost, err = r.integer()
		case "window":
			c.Window, err = window(r)
		case "algorithm":
			var text string
			text, err = r.string()
			c.Algorithm, _ = limit.ParseAlgorithm(text) // Check refuses the zero Algorithm
		default:
			err = errUnknown
		}
		return err
	})
	if err == nil {
		err = badBody(c.Check())
	}

	return c, err
}

// window parses a duration of whole milliseconds.
func window(r *reader) (ms int64, err error) {
	text, err := r.string()
	if err != nil {
		return 0, err
	}

	d, err := ParseDuration(text)
	// The window belongs to the name of the limit, so it is refused and not rounded.
	if err == nil && d%time.Millisecond != 0 {
		err = fmt.Errorf("%q is not a number of whole milliseconds", text)
	}

	return d.Milliseconds(), err
}

func integerIn(r *reader, least, most int64) (int64, error) {
	n, err := r.integer()
	if err == nil && (n < least || n > most) {
		err = fmt.Errorf("%d is out of bounds; send a whole number from %d to %d", n, least, most)
	}

	return n, err
}

func text(r *reader, most int) (string, error) {
	s, err := r.string()
	if err != nil {
		return "", err
	}
	if s == "" || utf8.RuneCountInString(s) > most {
		return "", fmt.Errorf("want 1 to %d characters", most)
	}
	if strings.Contains(s, "\x00") { // PostgreSQL cannot store it
		return "", errors.New("it has the character U+0000; remove it")
	}

	return s, nil
}

// dimensions parses an object of names and values. If rule is not nil, the names must be dimensions of the rule.
func dimensions(r *reader, rule *Rule) ([]Dimension, error) {
	var list []Dimension
	err := r.object(func(name string) error {
		if rule != nil && !slices.Contains(rule.Dimensions, name) {
			return rule.lacksDimension(name)
		}

		value, err := text(r, MaxDimensionLength)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}

		list = append(list, Dimension{name, value})
		return nil
	})

	return list, err
}

func (rule *Rule) lacksDimension(name string) error {
	has := ""
	if len(rule.Dimensions) > 0 {
		has = ", only " + strings.Join(rule.Dimensions, ", ")
	}

	return fmt.Errorf("the rule %q has no dimension %q%s", rule.Written(), name, has)
}
