package presence

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrFenced says that a newer owner has claimed the partition. Who reads it
	// has lost the partition and writes nothing more for it.
	ErrFenced = errors.New("partition has a newer owner")
	// ErrLost says that the store has lost data since the claim was made: it was
	// emptied, or fell back to an older copy. Who reads it claims the partition
	// again and writes all of it.
	ErrLost = errors.New("store has lost data")
	// ErrUnavailable says that the store cannot be reached now. The call may or
	// may not have taken effect; all of them are safe to repeat.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrTooMany says that a bound was met; the text says which.
	ErrTooMany = errors.New("too many")
)

// Claim is the right to write one partition. A later claim of the same
// partition has a higher epoch and fences all earlier ones.
type Claim struct {
	Partition  int
	Epoch      uint64
	Generation uint64 // the store's when the claim was made
	Former     uint64 // the epoch before this one, as far as the store knows; 0: none
}

// Member is the recoverable copy of one user's presence on one page.
type Member struct {
	User User
	Page string
	Hold time.Time // end of the hold taken by PUT; zero when there is none
}

// MemberChange sets a member or, when Gone, removes it.
type MemberChange struct {
	Member
	Gone bool
}

// PageUsers is the number of a partition's users on one page: absolute, not a
// difference, so that writing it twice is writing it once.
type PageUsers struct {
	Page  string
	Users int64
}

// Change is what one partition has to write: its members first, then, per
// page, its number of users. Sequence grows with every change of one claim; a
// store ignores what is not newer than what it has.
type Change struct {
	Claim
	Sequence uint64
	Members  []MemberChange
	Counts   []PageUsers
	// Reset says that Members are all there are: what the store has beside is
	// dropped first.
	Reset bool
	// Complete says that with this change everything of the partition has been
	// written under its claim. Until all partitions are complete, counts are
	// marked stale.
	Complete bool
}

// Outcome is what became of one Change: the counts of its pages after it, in
// the order of Change.Counts, or why it was not written.
type Outcome struct {
	Counts []Count
	Err    error // nil, ErrFenced, ErrLost or ErrUnavailable
}

// Snapshot is what a new owner finds of a partition.
type Snapshot struct {
	Members []Member
	Pages   []string // pages whose number the last owner may have left wrong, beside those of Members
}

// Partitions is a store as a presence node sees it. All methods may be called
// from any goroutine; for one partition Write is called by one at a time.
type Partitions interface {
	// Generation changes whenever the store may have lost data. A claim of
	// another generation is worth nothing any more: its writes are ErrLost.
	Generation(ctx context.Context) (uint64, error)
	// Claim takes partitions for owner: the epochs it returns, in their order,
	// are higher than all before, and writes under earlier ones are fenced from
	// now on. again says that the claims make good a loss: counts that owners
	// do not write anew are 0 from now on, under versions that replace any older.
	Claim(ctx context.Context, owner string, partitions []int, again bool) ([]Claim, error)
	// Load returns what the claims' partitions held when they were claimed.
	Load(ctx context.Context, claims []Claim) ([]Snapshot, error)
	// Write applies changes, of different partitions each, and publishes the
	// counts that changed by them. The outcomes are in the order of changes.
	Write(ctx context.Context, changes []Change) []Outcome
}

// Counters reads counts. Here and below, what is called a page may also be a
// topic that is none (see IsPage): its numbers are those of whoever publishes
// them, they are never stale, and the zero Version says that there are none.
type Counters interface {
	// Counts returns the counts of pages, in their order. A page nobody ever
	// joined has 0 users and the zero Version. While not all partitions are
	// complete a count may lack users, and is marked stale: it must not take the
	// place of one that is known.
	Counts(ctx context.Context, pages []string) ([]Count, error)
}

// Endpoint says that a gateway has subscribers for a page.
type Endpoint struct {
	Page    string
	Gateway string
	Gone    bool
}

// Endpoints is the endpoint store: which gateways have subscribers for a page.
type Endpoints interface {
	// Attach adds gateway to the pages' endpoints and returns their counts: a
	// change after those counts is published to somebody who knows the endpoint.
	Attach(ctx context.Context, gateway string, pages []string) ([]Count, error)
	// Detach takes gateway out again. What is not there is no error.
	Detach(ctx context.Context, gateway string, pages []string) error
	// Attached returns all endpoints of a bucket.
	Attached(ctx context.Context, bucket int) ([]Endpoint, error)
}

// Publication is one message of a bucket: counts that changed, endpoints that
// came or went, or the word that messages may have been missed.
type Publication struct {
	Bucket    int
	Counts    []Count
	Endpoints []Endpoint
	Lost      bool // read the bucket again: a gap, an overflow or a new subscription
}

// Feed delivers publications.
type Feed interface {
	// Watch calls fn with the publications of buckets, one at a time, until ctx
	// ends, and first with Lost for each bucket. A slow fn costs publications,
	// never memory: what was dropped is made good by a Lost.
	Watch(ctx context.Context, buckets []int, fn func(Publication)) error
}

// Store is all of a store. Callers take the smallest part they need.
type Store interface {
	Partitions
	Counters
	Endpoints
	Feed
}
