package counter

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"time"

	"headcount/counter/hyperloglog"
	"headcount/presence"
)

// Copy is one counter with all that is kept of it, as an export has it and an import puts
// it into another store.
type Copy struct {
	Key string
	State
	Members []string // of a set, in any order
	// Hashes stand for members of a set in Redis alone, which does not know their names.
	Hashes []string
	// Registers are those of a unique.
	Registers hyperloglog.Registers
	Ledger    []Entry // oldest first
	Steps     []StepCopy
	// Dimensions are those of a sum, in the order of their names.
	Dimensions []DimensionCopy
	// Elsewhere is what the counter has of other regions, as Redis keeps it (counter_far.lua); empty: nothing. The
	// value has it already. Only Redis takes it.
	Elsewhere string
}

// DimensionCopy is what a sum counted under one dimension.
type DimensionCopy struct {
	Name string
	Counted
}

// Dimension is the dimension of that name, which it adds if need be. Names come in order.
func (c *Copy) Dimension(name string) *Counted {
	if n := len(c.Dimensions); n == 0 || c.Dimensions[n-1].Name != name {
		c.Dimensions = append(c.Dimensions, DimensionCopy{name, Counted{Values: map[string]int64{}}})
	}
	return &c.Dimensions[len(c.Dimensions)-1].Counted
}

// StepCopy is what a counter gained in a step of time: of a sum a step that is over, of a
// unique also a running one.
type StepCopy struct {
	Step   uint32 // seconds
	Number int64  // of the step since the Unix epoch
	Value  int64
	Seen   *hyperloglog.Registers // of a unique
}

// IdentityCopy is an identity that is remembered until some moment. An export has none; a Redis that gets a PostgreSQL
// gives its own to it.
type IdentityCopy struct {
	Identity
	Until time.Time
}

// Dumper is a store that can be exported.
type Dumper interface {
	// Deleted is the highest incarnation of any counter that was ever deleted.
	Deleted(ctx context.Context) (uint64, error)
	// Dump calls each with the counters whose key is greater than after, in the order of
	// the keys' bytes, as they are at some moment. It ends with the first error of each.
	Dump(ctx context.Context, after string, each func(Copy) error) error
}

// Restorer is a store that can be imported into.
type Restorer interface {
	// Restore puts counters of different keys into the store, all or none, in the place
	// of those that are there with a lesser version, and returns how many these were.
	// A counter that is there with the same version or a greater one stays. One whose key
	// may have been deleted here gets a greater incarnation than that. Rules say how long
	// ledgers and steps are kept.
	Restore(ctx context.Context, copies []Copy, rules *Rules) (restored int, err error)
	// RestoreDeleted notes that counters with incarnations up to deleted were deleted.
	RestoreDeleted(ctx context.Context, deleted uint64) error
}

// Replaces says whether c is to be put in the place of the counter that is there, in a
// store that has deleted counters with incarnations up to deleted. It may give c a greater
// incarnation.
func (c *Copy) Replaces(is Version, deleted uint64) bool {
	if c.Version.Compare(is) <= 0 {
		return false
	}
	if is == (Version{}) && c.Version.Incarnation <= deleted {
		c.Version.Incarnation = deleted + 1
	}
	return true
}

// ErrNames says that a store needs the names of members, and a copy has none.
var ErrNames = errors.New("only hashes of its members are known, since the set was in Redis alone; it can be imported into Redis, alone or with PostgreSQL")

// nameless begins what stands in PostgreSQL for a member whose name nobody has told since its set was
// in Redis alone. Its hash follows. No name begins with it.
const nameless = "\x01"

// Nameless is what stands for the member of that hash where a name is wanted.
func Nameless(hash string) string { return nameless + hash }

// MemberHash is how a member stands in a set in Redis: the first 84 bits of SHA-256 of its name.
func MemberHash(member string) string {
	if hash, ok := strings.CutPrefix(member, nameless); ok {
		return hash
	}
	sum := sha256.Sum256([]byte(member))
	return base64.RawURLEncoding.EncodeToString(sum[:11])[:hashLength]
}

// AddMember adds a member, or its hash when it has no name.
func (c *Copy) AddMember(member string) {
	if hash, ok := strings.CutPrefix(member, nameless); ok {
		c.Hashes = append(c.Hashes, hash)
	} else {
		c.Members = append(c.Members, member)
	}
}

// NameAll makes members of the hashes of c.
func (c *Copy) NameAll() {
	for _, hash := range c.Hashes {
		c.Members = append(c.Members, Nameless(hash))
	}
	c.Hashes = nil
}

// Named makes c one for a store that needs the names of members, and knows nothing of other regions: a set has the members
// that come with it, and not those whose number other regions have told. It is ErrNames if members have no names.
func (c *Copy) Named() error {
	if len(c.Hashes) > 0 {
		return fmt.Errorf("%q: %w", c.Key, ErrNames)
	}
	if c.Kind == Members {
		c.Value = int64(len(c.Members))
	}
	return nil
}

// What stands for a member in Redis.
const (
	hashLength = 14
	hashDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
)

// keptDefault is how long steps are kept that no rule names.
const keptDefault = 24 * time.Hour

// Kept is how long the ledger of c and its steps of one length are kept.
func (c *Copy) Kept(rules *Rules) (ledger time.Duration, step func(seconds uint32) time.Duration) {
	rule := rules.Find(c.Key)
	if rule == nil {
		rule = &Rule{Kind: c.Kind, Ledger: DefaultLedger}
	}
	return rule.ledgerKept(c.Kind), func(seconds uint32) time.Duration {
		if b := rule.bucketOf(seconds); b != nil {
			return b.Kept
		}
		return keptDefault
	}
}

// The outside form.
type (
	copyJSON struct {
		Site      string      `json:"site,omitempty"` // none: the default one
		Key       string      `json:"key"`
		Kind      string      `json:"kind"`
		Value     int64       `json:"value"`
		Updated   int64       `json:"updated"` // unix milliseconds
		Version   string      `json:"version"`
		Entries   uint64      `json:"entries,omitempty"`
		Slots     string      `json:"slots,omitempty"`
		Members   []string    `json:"members,omitempty"`
		Hashes    []string    `json:"hashes,omitempty"`
		Registers []byte      `json:"registers,omitempty"`
		Ledger    []entryJSON `json:"ledger,omitempty"`
		Steps     []stepJSON  `json:"steps,omitempty"`

		Dimensions []dimensionJSON `json:"dimensions,omitempty"`
		Elsewhere  string          `json:"elsewhere,omitempty"`
	}
	dimensionJSON struct {
		Name   string           `json:"name"`
		Values map[string]int64 `json:"values"`
		Other  int64            `json:"other,omitempty"`
	}
	entryJSON struct {
		Seq    uint64 `json:"seq"`
		At     int64  `json:"at"`
		Op     string `json:"op"`
		Delta  int64  `json:"delta"`
		Before int64  `json:"before"`
		Reason string `json:"reason,omitempty"`
		By     string `json:"by,omitempty"`
	}
	stepJSON struct {
		Step      uint32 `json:"step"`
		Number    int64  `json:"number"`
		Value     int64  `json:"value,omitempty"`
		Registers []byte `json:"registers,omitempty"`
	}
)

// MarshalJSON is the form of a line in an export.
func (c Copy) MarshalJSON() ([]byte, error) {
	site, key := presence.SplitName(c.Key)
	j := copyJSON{
		Site: site.String(), Key: key, Kind: c.Kind.String(), Value: c.Value, Updated: c.Updated, Version: c.Version.String(), Entries: c.Entries,
		Slots: string(c.Slots.Append(nil)), Members: c.Members, Hashes: c.Hashes, Registers: c.Registers.Bytes(),
		Elsewhere: c.Elsewhere,
	}
	for _, e := range c.Ledger {
		j.Ledger = append(j.Ledger, entryJSON{e.Seq, e.At.UnixMilli(), e.Op.String(), e.Delta, e.Before, e.Reason, e.By})
	}
	for _, s := range c.Steps {
		one := stepJSON{Step: s.Step, Number: s.Number, Value: s.Value}
		if s.Seen != nil {
			one.Registers = s.Seen.Bytes()
		}
		j.Steps = append(j.Steps, one)
	}
	for _, d := range c.Dimensions {
		j.Dimensions = append(j.Dimensions, dimensionJSON{d.Name, d.Values, d.Other})
	}
	return json.Marshal(j)
}

// elsewhere is the form of Copy.Elsewhere.
var elsewhere = regexp.MustCompile(`^\d+ \d+( ~)?( [^/ ]+/\d+/\d+/-?\d+/\d+/-?\d+)*$`)

// ErrCopy is in every error about a line that is no counter.
var ErrCopy = errors.New("bad counter")

// UnmarshalJSON reads what MarshalJSON wrote, and checks it.
func (c *Copy) UnmarshalJSON(b []byte) error {
	var j copyJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	fault := func(err error) error { return fmt.Errorf("%w: %q: %w", ErrCopy, presence.Excerpt(j.Key), err) }
	if err := CheckKey(j.Key); err != nil {
		return fault(err)
	}
	name, err := NameIn(j.Site, j.Key)
	if err != nil {
		return fault(err)
	}
	*c = Copy{Key: name, State: State{Value: j.Value, Updated: j.Updated, Entries: j.Entries}, Members: j.Members, Hashes: j.Hashes, Elsewhere: j.Elsewhere}
	if j.Elsewhere != "" && !elsewhere.MatchString(j.Elsewhere) {
		return fault(fmt.Errorf("%q is nothing of other regions", presence.Excerpt(j.Elsewhere)))
	}
	var ok bool
	if c.Kind, ok = ParseKind(j.Kind); !ok {
		return fault(fmt.Errorf("%.40q is no kind", j.Kind))
	}
	if c.Version, err = presence.ParseVersion(j.Version); err != nil || c.Version == (Version{}) {
		return fault(fmt.Errorf("%.40q is no version of a counter", j.Version))
	}
	if c.Slots, err = ParseSlots(j.Slots); err != nil {
		return fault(err)
	}
	if n := int64(len(j.Members) + len(j.Hashes)); c.Kind == Members && n != j.Value && (j.Elsewhere == "" || n > j.Value) {
		return fault(fmt.Errorf("it has %d members and the value %d", len(j.Members)+len(j.Hashes), j.Value))
	}
	for _, h := range j.Hashes {
		if len(h) != hashLength || strings.Trim(h, hashDigits) != "" {
			return fault(fmt.Errorf("%q stands for no member", presence.Excerpt(h)))
		}
	}
	for _, m := range j.Members {
		if err := CheckMember(m); err != nil {
			return fault(err)
		}
	}
	if c.Registers, err = hyperloglog.Parse(j.Registers); err != nil {
		return fault(err)
	}
	for _, e := range j.Ledger {
		entry := Entry{Seq: e.Seq, At: time.UnixMilli(e.At).UTC(), Delta: e.Delta, Before: e.Before, After: e.Before + e.Delta, Reason: e.Reason, By: e.By}
		if entry.Op = ledgerOp(e.Op); entry.Op == 0 {
			return fault(fmt.Errorf("%.40q is no op of a ledger", e.Op))
		}
		c.Ledger = append(c.Ledger, entry)
	}
	for _, s := range j.Steps {
		one := StepCopy{Step: s.Step, Number: s.Number, Value: s.Value}
		if s.Registers != nil {
			seen, err := hyperloglog.Parse(s.Registers)
			if err != nil {
				return fault(err)
			}
			one.Seen = &seen
		}
		if s.Step == 0 {
			return fault(errors.New("a step of no time"))
		}
		c.Steps = append(c.Steps, one)
	}
	for _, d := range j.Dimensions {
		if !dimensionName(d.Name) || len(d.Values) > MaxValues {
			return fault(fmt.Errorf("a dimension %.40q of %d values", d.Name, len(d.Values)))
		}
		counted := c.Dimension(d.Name)
		maps.Copy(counted.Values, d.Values)
		counted.Other = d.Other
	}
	return nil
}

// NameIn returns the name of a counter from its site, which is empty for the default one,
// and its key.
func NameIn(site, key string) (string, error) {
	if site == "" {
		return key, nil
	}
	of, err := presence.ParseSite(site)
	return of.Qualify(key), err
}

func ledgerOp(name string) LedgerOp {
	for op, is := range ledgerNames {
		if is != "" && is == name {
			return LedgerOp(op)
		}
	}
	return 0
}
