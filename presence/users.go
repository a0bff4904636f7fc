package presence

import (
	"context"
	"time"
)

// MaxAsked is how many users one question may be about.
const MaxAsked = 1000

// MaxLastSeen is the maximum number of users whose departure a store remembers. Beyond it the earliest departures are
// forgotten.
const MaxLastSeen = 1_000_000

// UserState says whether a user is present in this region, as the owner of the user's partition knows.
type UserState struct {
	// Since is when the user came, in whole seconds. After the partition has changed its owner it is when the new owner
	// began. Zero: the user is not present.
	Since time.Time
	Pages int // joined or held
	// LastSeen is when a user who is not present departed, in whole seconds. Zero: not known.
	LastSeen time.Time
}

// Departure says that a user is no longer present on any page, and since when.
type Departure struct {
	User User
	At   time.Time
}

// LastSeen reads the departures that a store remembers, see Change.Departures.
type LastSeen interface {
	// LastSeen returns when users last departed, in whole seconds and in the order of users. Zero: not known.
	LastSeen(ctx context.Context, users []User) ([]time.Time, error)
	// ForgetSeen forgets when the user departed. A later departure is remembered again.
	ForgetSeen(ctx context.Context, user User) error
}
