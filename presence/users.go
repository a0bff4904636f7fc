package presence

import "time"

// MaxAsked is how many users one question may be about.
const MaxAsked = 1000

// UserState says whether a user is present in this region, as the owner of the user's partition knows.
type UserState struct {
	// Since is when the user came, in whole seconds. After the partition has changed its owner it is when the new owner
	// began. Zero: the user is not present.
	Since time.Time
	Pages int // joined or held
}
