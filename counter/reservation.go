package counter

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// Bounds of reservations.
const (
	MaxOpen         = 10_000 // open reservations of one counter
	MaxReservations = 1000   // of one page, and of one answer of Due
	MinFor          = time.Second
	MaxFor          = 31 * 24 * time.Hour
	EndedKept       = 24 * time.Hour // how long it is remembered how a reservation ended
)

// Reservation is an amount that was taken out of an exact counter, and comes back unless it is committed.
type Reservation struct {
	ID     string
	Amount int64
	Until  int64 // when it expires, unix milliseconds
	Status Status
	Ended  int64 // when it ended, unix milliseconds; 0: it is open
}

// Status says whether a reservation is open, and how it has ended.
type Status uint8

// The statuses. Stores keep their numbers, so these never change. A reservation that is unknown has the zero Status.
const (
	Open      Status = 1
	Committed Status = 2
	Cancelled Status = 3
	Expired   Status = 4
)

// Statuses has the name of each status, for tables that people read.
var Statuses = [...]string{Open: "open", Committed: "committed", Cancelled: "cancelled", Expired: "expired"}

// Hold is what a change of a reservation has besides the amount, which is its Delta.
type Hold struct {
	ID    string
	For   time.Duration // of Reserve: how long, from MinFor to MaxFor
	Until int64         // of Expire: when it expires, as Due says
}

// Due is a reservation whose time has come.
type Due struct {
	Key   string
	ID    string
	Until int64
}

// Reservations is a page of the open reservations of a counter.
type Reservations struct {
	Open []Reservation
	More bool // there are others with greater IDs
}

// Reserver is the part of a store that finds reservations. Changes of them are operations. Its errors are
// ErrUnavailable.
type Reserver interface {
	// Reservations returns at most limit open reservations of a counter, in the order of their IDs, which are greater
	// than after.
	Reservations(ctx context.Context, key, after string, limit int) (Reservations, error)
	// Due returns at most MaxReservations of those whose time has come, earliest first, and perhaps some that have
	// ended. They stay due until an Expire ends them. One goroutine calls it.
	Due(ctx context.Context) ([]Due, error)
}

// Expiring returns the operation that ends a reservation which is due. By then its counter may have a rule of another
// kind, which says nothing of a counter that exists.
func (d *Due) Expiring(rules *Rules) Op {
	rule := &Rule{Kind: Exact, Ledger: DefaultLedger}
	if is := rules.Find(d.Key); is != nil && is.Kind.IsExact() {
		rule = is
	}

	return Op{Changes: []Change{{Key: d.Key, Rule: rule, Verb: Expire, Hold: &Hold{ID: d.ID, Until: d.Until}}}}
}

// Holds reports whether a verb is about a reservation.
func (v Verb) Holds() bool { return v >= Reserve && v <= Expire }

// checkHold returns why a change of a reservation is not valid, or nil.
func (c *Change) checkHold() error {
	isNamed := c.Hold != nil && c.Hold.ID != ""
	if !isNamed {
		return fmt.Errorf("%w: a reservation of %q without an ID", ErrOp, c.Key)
	}
	// The other verbs only name it.
	if c.Verb != Reserve {
		return nil
	}

	if c.Delta < 1 || c.Delta > MaxDelta {
		return fmt.Errorf("%w: a reservation of %d of %q", ErrOp, c.Delta, c.Key)
	}
	if c.Hold.For < MinFor || c.Hold.For > MaxFor {
		return fmt.Errorf("%w: a reservation of %q for %s", ErrOp, c.Key, c.Hold.For)
	}

	return nil
}

// hold makes a change of a reservation. If the reservation already is as the change wants it, nothing changes.
func hold(tx Tx, s *State, c *Change, now time.Time) error {
	if !kindFor(s, c).Takes(c.Verb) {
		return Refused(NoSuchVerb, c, s.Counter(c.Key).Or(c.Rule.Kind))
	}

	r := tx.Reservation(c.Key, c.Hold.ID)
	switch c.Verb {
	case Reserve:
		return reserve(tx, s, c, r, now)
	case Commit:
		return end(tx, s, c, r, Committed, now)
	case Cancel:
		// The amount came back when the reservation expired, and the caller wants nothing else.
		if r.Status == Expired {
			return nil
		}
		return end(tx, s, c, r, Cancelled, now)
	}

	// The clock of the store decides, not that of the process which asks for the expiry.
	isDue := r.Status == Open && r.Until <= now.UnixMilli()
	if !isDue {
		return nil
	}

	return end(tx, s, c, r, Expired, now)
}

// reserve takes an amount out of a counter.
func reserve(tx Tx, s *State, c *Change, r Reservation, now time.Time) error {
	isOpen := r.Status == Open
	isRepeated := isOpen && r.Amount == c.Delta
	why := Refusal("")
	switch {
	case isRepeated:
		return nil
	case isOpen:
		why = OtherAmount
	case r.Status == Committed: // a late repetition, which must not take the amount twice
		why = HasEnded
	case s.Open >= MaxOpen:
		why = TooManyOpen
	}
	if why != "" {
		return refusedHold(why, c, s, r)
	}

	// A reservation is judged as a decrement, so that the floor refuses an amount that is not there.
	taken := *c
	taken.Delta = -c.Delta
	before := s.Value
	if err := add(s, &taken, tx.Deleted(), now); err != nil {
		return err
	}
	s.Reserved += c.Delta
	s.Open++

	// Rounded up to the next millisecond: PostgreSQL's clock is read in whole milliseconds, rounded down, and no
	// reservation may expire too early.
	until := now.Add(c.Hold.For).UnixMilli() + 1
	tx.Keep(c.Key, Reservation{ID: c.Hold.ID, Amount: c.Delta, Until: until, Status: Open})
	enter(tx, s, &taken, before, now)
	tx.Changed(c.Key, nil, nil, false)

	return nil
}

// end ends an open reservation. The room for what comes back was kept, so no bound refuses that.
func end(tx Tx, s *State, c *Change, r Reservation, as Status, now time.Time) error {
	switch r.Status {
	case as:
		// The call is a repetition.
		return nil
	case Open:
	case Status(0):
		return refusedHold(NoReservation, c, s, r)
	default:
		return refusedHold(HasEnded, c, s, r)
	}

	// What is committed left the value when it was reserved.
	returned := *c
	returned.Delta = 0
	if as != Committed {
		returned.Delta = r.Amount
	}
	before := s.Value
	s.Value += returned.Delta
	s.Reserved -= r.Amount
	s.Open--
	moved(s, now)

	r.Status = as
	r.Ended = now.UnixMilli()
	tx.Keep(c.Key, r)
	enter(tx, s, &returned, before, now)
	tx.Changed(c.Key, nil, nil, false)

	return nil
}

// refusedHold returns the conflict of a change of a reservation.
func refusedHold(why Refusal, c *Change, s *State, r Reservation) *Conflict {
	refused := Refused(why, c, s.Counter(c.Key).Or(c.Rule.Kind))
	if why == HasEnded {
		refused.Text = "it is " + Statuses[r.Status] + " already"
	}

	return refused
}

// ParseReservation parses the body of a reservation: {"id":…,"amount":…,"for":…}, and optionally reason and by.
func ParseReservation(body []byte, key string, rule *Rule) (Change, error) {
	c := Change{Key: key, Rule: rule, Verb: Reserve, Hold: &Hold{}}
	err := parseObject(body, "id, amount, for, reason and by", func(r *reader, name string) (err error) {
		switch name {
		case "id":
			c.Hold.ID, err = r.string()
			if err == nil {
				err = CheckMember(c.Hold.ID)
			}
		case "amount":
			c.Delta, err = integerIn(r, 1, MaxDelta)
		case "for":
			c.Hold.For, err = holdFor(r)
		default:
			err = c.why(r, name)
		}
		return err
	})
	switch {
	case err != nil:
	case c.Hold.ID == "":
		err = fmt.Errorf("%w: id: it is missing; send 1 to %d characters", ErrBody, MaxKeyLength)
	case c.Delta == 0:
		err = fmt.Errorf("%w: amount: it is missing; send a whole number from 1 to %d", ErrBody, MaxDelta)
	case c.Hold.For == 0:
		err = fmt.Errorf("%w: for: it is missing; send a duration from 1s to 31d", ErrBody)
	}
	if err != nil {
		return Change{}, err
	}

	return c, nil
}

func holdFor(r *reader) (time.Duration, error) {
	text, err := r.string()
	if err != nil {
		return 0, err
	}

	d, err := ParseDuration(text)
	if err == nil && (d < MinFor || d > MaxFor) {
		err = fmt.Errorf("%q is out of bounds; send a duration from 1s to 31d", text)
	}

	return d, err
}

// MarshalJSON returns the form that clients see, {"id":"cart-7","amount":2,"expires_at":"…"}, to the millisecond.
func (r Reservation) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		ID        string    `json:"id"`
		Amount    int64     `json:"amount"`
		ExpiresAt time.Time `json:"expires_at"`
	}{r.ID, r.Amount, time.UnixMilli(r.Until).UTC()})
}

// MarshalJSON returns the form of a page that clients see, {"reservations":[…],"next":"cart-7"}. next is the last ID of
// the page, and missing on the last page.
func (p Reservations) MarshalJSON() ([]byte, error) {
	// A page without reservations is [], and not null as a nil slice would be.
	page := struct {
		Open []Reservation `json:"reservations"`
		Next string        `json:"next,omitempty"`
	}{Open: append([]Reservation{}, p.Open...)}
	if p.More {
		page.Next = p.Open[len(p.Open)-1].ID
	}

	return json.Marshal(page)
}
