package presence

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrFenced means that a newer owner has claimed the partition. A caller that gets
	// ErrFenced has lost the partition and writes nothing more for it.
	ErrFenced = errors.New("partition has a newer owner")
	// ErrLost means that the store has lost data since the claim was made: it was emptied,
	// or it has an older copy of its data. A caller that gets ErrLost claims the partition
	// again and writes all of it.
	ErrLost = errors.New("store has lost data")
	// ErrUnavailable means that the store cannot be reached now. The call may have taken
	// effect or not; all calls are safe to repeat.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrMalformed means that the store has data that none of our programs can have written. It is an ErrUnavailable
	// with another text: whatever depends on the data becomes usable once the data is deleted.
	ErrMalformed error = malformed{}
	// ErrTooMany means that a bound has been reached; the text names the bound.
	ErrTooMany = errors.New("too many")
)

type malformed struct{}

func (malformed) Error() string        { return "the store has malformed data" }
func (malformed) Is(target error) bool { return target == ErrUnavailable }

// Claim is the right to write one partition. A later claim of the same
// partition has a higher epoch and fences all earlier ones.
type Claim struct {
	Partition  int
	Epoch      uint64
	Generation uint64 // the store's generation when the claim was made
	// Held is how long the former claim was in force, by the store's clock; 0: not known.
	Held time.Duration
	// Whole says that the store has all of the partition: an owner has completed it, and
	// the store has lost nothing since. Otherwise Load may lack users.
	Whole bool
}

// Member is one user's presence on one page, as a store keeps it for the next owner of
// the partition. Stores know pages by their qualified names.
type Member struct {
	User  User
	Page  string
	Hold  time.Time // end of the hold taken by PUT, by this process's clock; zero: no hold
	Alone bool      // the user is present by the hold alone, without a connection
}

// MemberChange sets a member or, when Gone, removes it.
type MemberChange struct {
	Member
	Gone bool
}

// Arrival says that a user came to a page, or to a site if Page is a TotalOf. A user who is
// present already, by another connection or within a grace, does not arrive.
type Arrival struct {
	User User
	Page string
}

// PageUsers is a number of users on one page: of one partition in a Change, otherwise of
// all. The number is absolute, so writing it twice has the effect of writing it once.
type PageUsers struct {
	Page  string `json:"page"`
	Users int64  `json:"users"`
}

// Change is one write of a partition: first members, then numbers of users.
// Sequence grows with every change under one claim; a store ignores a change that is not
// newer than the last one it has.
type Change struct {
	Claim
	Sequence uint64
	Members  []MemberChange
	Counts   []PageUsers
	// Arrivals are for stores that keep minutes, see package minutes. They are not
	// absolute: each one is in exactly one change that is written without an error.
	Arrivals []Arrival
	// Departures are for stores that remember when users were last present. The store keeps
	// the latest departure of each user. A user may have returned since.
	Departures []Departure
	// Reset says that Members has all members of the partition, and replaces those in the
	// store.
	Reset bool
	// Complete says that with this change everything has been written under the claim.
	// Counts are stale until all partitions are complete.
	Complete bool
}

// Outcome is the result of one Change: the counts of its pages after the change,
// in the order of Change.Counts, or the reason why the change was not written.
type Outcome struct {
	Counts []Count
	Err    error // nil, ErrFenced, ErrLost or ErrUnavailable
}

// Snapshot is the data that the store has of a partition when a new owner claims it.
type Snapshot struct {
	Members []Member
	Pages   []string // further pages whose number of users may be wrong, because the last owner did not finish writing
}

// Partitions is the store of a presence node. Any goroutine may call its methods; only one
// goroutine at a time calls Write for one partition.
type Partitions interface {
	// Generation changes whenever the store may have lost data. A claim of another
	// generation is no longer valid: writes under it fail with ErrLost.
	Generation(ctx context.Context) (uint64, error)
	// Claim claims partitions for owner and returns the claims in the order of partitions.
	// Their epochs are higher than all earlier ones, and fence writes under earlier claims.
	// again says that the store has lost data and that the owners will write it again: counts
	// that they do not write are 0 from now on, under versions that replace all older ones. A
	// partition that another owner has claimed since stays with that owner, and its claim in
	// the result has the epoch 0.
	Claim(ctx context.Context, owner string, partitions []int, again bool) ([]Claim, error)
	// Load returns what the claims' partitions held when they were claimed.
	Load(ctx context.Context, claims []Claim) ([]Snapshot, error)
	// Write applies changes, each of another partition, and publishes the counts that
	// they changed. The outcomes are in the order of changes.
	Write(ctx context.Context, changes []Change) []Outcome
	// Incomplete returns which of the partitions are not complete. With everywhere it looks
	// through the whole store, otherwise through a small part of it, another one at each
	// call.
	Incomplete(ctx context.Context, partitions []int, everywhere bool) ([]int, error)
}

// Counters reads counts.
type Counters interface {
	// Counts returns the counts of pages, in the order of pages. A page that nobody ever
	// joined has 0 users and the zero Version. While a partition is not complete, counts may
	// lack users and are stale: a stale count must not replace a count that the caller has.
	Counts(ctx context.Context, pages []string) ([]Count, error)
}

// Lister lists pages. Every store implements it in addition to Store.
type Lister interface {
	// Pages calls fn, from one goroutine at a time, with the names of all pages that have
	// users, and perhaps of others, some at a time. A page may be listed twice; one that
	// gets its first user or loses its last one meanwhile may be listed or not.
	Pages(ctx context.Context, fn func(pages []string)) error
}

// Updates reads published updates of all kinds.
type Updates interface {
	// Updates returns the newest updates of topics, in the order of topics. The
	// update of a topic that was never published has the zero Version.
	Updates(ctx context.Context, topics []Topic) ([]Update, error)
}

// Endpoint says that a gateway has subscribers for a topic. Gateway is the
// IncarnationName of the gateway; the endpoint ends with that run. Gone says that the
// gateway has no subscribers any more.
type Endpoint struct {
	Topic
	Gateway string
	Gone    bool
}

// Endpoints is the endpoint store. It knows which gateways have subscribers for a
// topic.
type Endpoints interface {
	// Attach adds gateway to the topics' endpoints and returns the topics' updates. A
	// watcher of the feed learns of the endpoint before any later update.
	Attach(ctx context.Context, gateway string, topics []Topic) ([]Update, error)
	// Detach removes gateway from the topics' endpoints. A missing endpoint is not an error.
	Detach(ctx context.Context, gateway string, topics []Topic) error
	// Missing returns the topics to which gateway is not attached.
	Missing(ctx context.Context, gateway string, topics []Topic) ([]Topic, error)
	// Attached returns all endpoints of a bucket.
	Attached(ctx context.Context, bucket int) ([]Endpoint, error)
}

// Publication is one message of a bucket: updates, endpoints that were attached or detached,
// or a notice that messages may have been lost.
type Publication struct {
	Bucket    int
	Updates   []Update
	Endpoints []Endpoint
	Lost      bool // the bucket must be read again, after a gap, an overflow or a new subscription
}

// Feed delivers publications.
type Feed interface {
	// Watch calls fn with the publications of buckets, one at a time, until ctx ends. The
	// first publication of each bucket is a Lost. When fn is slow, Watch drops publications
	// instead of queueing more, and then sends a Lost.
	Watch(ctx context.Context, buckets []int, fn func(Publication))
}

// Store is a complete store. Callers accept the smallest part that they need.
type Store interface {
	Partitions
	Counters
	Updates
	Endpoints
	Feed
}
