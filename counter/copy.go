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

	"headcount/hyperloglog"
	"headcount/presence"
)

// Copy is one counter with everything that a store keeps of it: one line of an export.
type Copy struct {
	Key string
	State
	Members []string // of a set, in any order
	// Hashes has the members of a set whose names are unknown. Stores keep no names; exports of former releases have
	// some.
	Hashes []string
	// Registers has the registers of a unique.
	Registers hyperloglog.Registers
	Ledger    []Entry // oldest first
	// Reservations are those that are open.
	Reservations []Reservation
	Steps        []StepCopy
	// Dimensions has the dimensions of a sum, sorted by name.
	Dimensions []DimensionCopy
	// Elsewhere is what the region knows of others, as package share writes it, or empty. State.Value includes it. Only
	// a store that has other regions keeps it.
	Elsewhere string
}

// DimensionCopy has the counts of one dimension.
type DimensionCopy struct {
	Name string
	Counted
}

// Dimension returns the dimension with that name, and adds it if it is not the last one. The caller asks in the order
// of names.
func (c *Copy) Dimension(name string) *Counted {
	n := len(c.Dimensions)
	if n == 0 || c.Dimensions[n-1].Name != name {
		c.Dimensions = append(c.Dimensions, DimensionCopy{name, Counted{Values: map[string]int64{}}})
	}

	return &c.Dimensions[len(c.Dimensions)-1].Counted
}

// StepCopy is one time bucket of a history: for a sum a completed one, for a unique also a running one.
type StepCopy struct {
	Step   uint32 // length in seconds
	Number int64  // index since the Unix epoch
	Value  int64
	Seen   *hyperloglog.Registers // of a unique
}

// Dumper is a store that can be exported.
type Dumper interface {
	// Deleted returns the highest incarnation of all counters that were ever deleted.
	Deleted(ctx context.Context) (uint64, error)
	// Dump calls each with every counter whose key is greater than after, in the order of the keys' bytes. Each counter
	// is as it was at some moment of the call. Dump ends with the first error of each.
	Dump(ctx context.Context, after string, each func(Copy) error) error
}

// Restorer is a store that can be imported into.
type Restorer interface {
	// Restore puts counters with different keys into the store, all or none, and returns how many it put there. A
	// counter of the store with the same version or a greater one stays. A counter that may have been deleted from
	// this store gets a greater incarnation. Rules give the retention of ledgers and histories.
	Restore(ctx context.Context, copies []Copy, rules *Rules) (restored int, err error)
	// RestoreDeleted notes that counters with incarnations up to deleted have been deleted.
	RestoreDeleted(ctx context.Context, deleted uint64) error
}

// Replaces reports whether c replaces the state that a store has of the counter; the store has deleted counters with
// incarnations up to deleted. If the store has no such counter, c may get a greater incarnation, so that its versions
// were never used.
func (c *Copy) Replaces(is *State, deleted uint64) bool {
	if c.Version.Compare(is.Version) <= 0 {
		return false
	}

	if is.Version == (Version{}) && c.Version.Incarnation <= deleted {
		c.Version.Incarnation = deleted + 1
	}

	return true
}

// nameless precedes the hash of a member whose name is unknown. No name begins with this character.
const nameless = "\x01"

// Nameless returns the text that stands for the name of a member with that hash.
func Nameless(hash string) string { return nameless + hash }

// MemberHash returns what stores keep of a member: the first 84 bits of the SHA-256 of its name.
func MemberHash(member string) string {
	if hash, ok := strings.CutPrefix(member, nameless); ok {
		return hash
	}

	sum := sha256.Sum256([]byte(member))

	return base64.RawURLEncoding.EncodeToString(sum[:11])[:hashLength]
}

// The form of MemberHash.
const (
	hashLength = 14
	hashDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
)

// keptDefault is the retention of time buckets that no rule has.
const keptDefault = 24 * time.Hour

// Kept returns the retention of c's ledger, and of its time buckets by their length.
func (c *Copy) Kept(rules *Rules) (ledger time.Duration, step func(seconds uint32) time.Duration) {
	rule := rules.Find(c.Key)
	if rule == nil {
		// A counter outlives its rule, and its ledger goes on expiring.
		rule = &Rule{Kind: c.Kind, Ledger: DefaultLedger}
	}

	step = func(seconds uint32) time.Duration {
		b := rule.resolutionOf(seconds)
		if b == nil {
			return keptDefault
		}
		return b.Kept
	}

	return rule.ledgerKept(c.Kind), step
}

// The form of an export.
type (
	copyJSON struct {
		Site      string      `json:"site,omitempty"` // missing for the default site
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

		Reservations []reservationJSON `json:"reservations,omitempty"`

		Dimensions []dimensionJSON `json:"dimensions,omitempty"`
		Elsewhere  string          `json:"elsewhere,omitempty"`
	}
	dimensionJSON struct {
		Name   string           `json:"name"`
		Values map[string]int64 `json:"values"`
		Other  int64            `json:"other,omitempty"`
	}
	reservationJSON struct {
		ID     string `json:"id"`
		Amount int64  `json:"amount"`
		Until  int64  `json:"until"` // unix milliseconds
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

// MarshalJSON returns c as a line of an export.
func (c Copy) MarshalJSON() ([]byte, error) {
	site, key := presence.SplitName(c.Key)
	j := copyJSON{
		Site: site.String(), Key: key, Kind: c.Kind.String(), Value: c.Value, Updated: c.Updated,
		Version: c.Version.String(), Entries: c.Entries, Slots: string(c.Slots.Append(nil)),
		Members: c.Members, Hashes: c.Hashes, Registers: c.Registers.Bytes(), Elsewhere: c.Elsewhere,
	}

	for _, e := range c.Ledger {
		j.Ledger = append(j.Ledger, entryJSON{
			e.Seq, e.At.UnixMilli(), e.Op.String(), e.Delta, e.Before, e.Reason, e.By,
		})
	}
	for _, r := range c.Reservations {
		j.Reservations = append(j.Reservations, reservationJSON{r.ID, r.Amount, r.Until})
	}
	for _, s := range c.Steps {
		one := stepJSON{Step: s.Step, Number: s.Number, Value: s.Value}
		// The steps of a sum have a value only.
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

// elsewhere matches a Copy.Elsewhere.
var elsewhere = regexp.MustCompile(`^\d+ \d+( ~)?( [^/ ]+/\d+/\d+/-?\d+/\d+/-?\d+)*$`)

// ErrCopy is wrapped by every error about an invalid line of an export.
var ErrCopy = errors.New("bad counter")

// UnmarshalJSON parses and checks what MarshalJSON wrote.
func (c *Copy) UnmarshalJSON(b []byte) error {
	var j copyJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	if err := c.parse(&j); err != nil {
		return fmt.Errorf("%w: %q: %w", ErrCopy, presence.Excerpt(j.Key), err)
	}

	return nil
}

func (c *Copy) parse(j *copyJSON) error {
	// A file is trusted no more than a request.
	if err := CheckKey(j.Key); err != nil {
		return err
	}
	name, err := NameIn(j.Site, j.Key)
	if err != nil {
		return err
	}

	*c = Copy{Key: name, Members: j.Members, Hashes: j.Hashes, Elsewhere: j.Elsewhere}
	if j.Elsewhere != "" && !elsewhere.MatchString(j.Elsewhere) {
		return fmt.Errorf("%q is not the state of other regions", presence.Excerpt(j.Elsewhere))
	}

	err = c.parseState(j)
	if err == nil {
		// After the state, because the members have to fit its kind and value.
		err = c.checkMembers()
	}
	if err != nil {
		return err
	}

	c.Registers, err = hyperloglog.Parse(j.Registers)
	if err == nil {
		err = c.parseReservations(j.Reservations)
	}
	if err != nil {
		return err
	}

	return c.parsePast(j)
}

// parseState parses the record of the counter.
func (c *Copy) parseState(j *copyJSON) error {
	kind, ok := ParseKind(j.Kind)
	if !ok {
		return fmt.Errorf("%.40q is not a kind", j.Kind)
	}
	version, err := presence.ParseVersion(j.Version)
	// The zero version is that of a counter that does not exist.
	if err != nil || version == (Version{}) {
		return fmt.Errorf("%.40q is not a version of a counter", j.Version)
	}
	slots, err := ParseSlots(j.Slots)
	if err != nil {
		return err
	}

	c.State = State{
		Kind: kind, Value: j.Value, Updated: j.Updated, Version: version, Entries: j.Entries, Slots: slots,
	}

	return nil
}

// checkMembers checks the members of a set. Those of other regions are in its value alone.
func (c *Copy) checkMembers() error {
	n := int64(len(c.Members) + len(c.Hashes))
	isRight := n == c.Value || c.Elsewhere != "" && n < c.Value
	if c.Kind.KnowsMembers() && !isRight {
		return fmt.Errorf("it has %d members and the value %d", n, c.Value)
	}

	for _, h := range c.Hashes {
		if len(h) != hashLength || strings.Trim(h, hashDigits) != "" {
			return fmt.Errorf("%q is not the hash of a member", presence.Excerpt(h))
		}
	}
	for _, m := range c.Members {
		if err := CheckMember(m); err != nil {
			return err
		}
	}

	return nil
}

// parseReservations parses the open reservations, which the state of the counter has together.
func (c *Copy) parseReservations(all []reservationJSON) error {
	seen := map[string]bool{}
	for _, r := range all {
		fits := c.Kind.IsExact() && r.Amount > 0 && r.Amount <= MaxDelta && !seen[r.ID]
		if err := CheckMember(r.ID); err != nil || !fits {
			return fmt.Errorf("%q is not a reservation", presence.Excerpt(r.ID))
		}

		seen[r.ID] = true
		c.Reservations = append(c.Reservations, Reservation{ID: r.ID, Amount: r.Amount, Until: r.Until, Status: Open})
		// The sum is computed, so that a file cannot contradict itself.
		c.Reserved += r.Amount
		c.Open++
	}

	return nil
}

// parsePast parses the ledger, the history and the dimensions.
func (c *Copy) parsePast(j *copyJSON) error {
	for _, e := range j.Ledger {
		op := ParseLedgerOp(e.Op)
		if op == 0 {
			return fmt.Errorf("%.40q is not an op of a ledger", e.Op)
		}
		// After is computed, so that an entry of a file cannot contradict itself.
		c.Ledger = append(c.Ledger, Entry{
			Seq: e.Seq, At: time.UnixMilli(e.At).UTC(), Op: op, Delta: e.Delta, Before: e.Before,
			After: e.Before + e.Delta, Reason: e.Reason, By: e.By,
		})
	}

	for i := range j.Steps {
		one, err := j.Steps[i].parse()
		if err != nil {
			return err
		}
		c.Steps = append(c.Steps, one)
	}

	for _, d := range j.Dimensions {
		if !dimensionName(d.Name) || len(d.Values) > MaxValues {
			return fmt.Errorf("the dimension %.40q with %d values is not valid", d.Name, len(d.Values))
		}

		counted := c.Dimension(d.Name)
		maps.Copy(counted.Values, d.Values)
		counted.Other = d.Other
	}

	return nil
}

func (s *stepJSON) parse() (StepCopy, error) {
	is := StepCopy{Step: s.Step, Number: s.Number, Value: s.Value}
	if s.Step == 0 {
		return is, errors.New("a step of 0 seconds")
	}
	if s.Registers == nil {
		return is, nil
	}

	seen, err := hyperloglog.Parse(s.Registers)
	is.Seen = &seen

	return is, err
}

// NameIn returns the name of a counter with that key in a site; the empty site is the default one.
func NameIn(site, key string) (string, error) {
	if site == "" {
		return key, nil
	}

	of, err := presence.ParseSite(site)

	return of.Qualify(key), err
}
