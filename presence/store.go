package presence

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrFenced says that a newer owner has claimed the partition. A caller that gets
	// ErrFenced has lost the partition and writes nothing more for it.
	ErrFenced = errors.New("partition has a newer owner")
	// ErrLost says that the store has lost data since the claim was made: it was
	// emptied, or fell back to an older copy. A caller that gets ErrLost claims the
	// partition again and writes all of it.
	ErrLost = errors.New("store has lost data")
	// ErrUnavailable says that the store cannot be reached now. The call may or
	// may not have taken effect; all calls are safe to repeat.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrTooMany says that a bound has been reached; the text names the bound.
	ErrTooMany = errors.New("too many")
)

// Claim is the right to write one partition. A later claim of the same
// partition has a higher epoch and fences all earlier ones.
type Claim struct {
	Partition  int
	Epoch      uint64
	Generation uint64 // the store's generation when the claim was made
	Former     uint64 // the epoch before this one, as far as the store knows; 0: none
	// Held is how long before this claim the former one was made, by the store's clock; 0: not known.
	Held time.Duration
	// Whole says that the store has all of the partition: an owner has completed
	// it, and the store has lost nothing since. Otherwise Load may lack users.
	Whole bool
}

// Member is the recoverable copy of one user's presence on one page. To a store, pages
// are Names.
type Member struct {
	User User
	Page string
	Hold time.Time // end of the hold taken by PUT, by the clock of this process; zero when there is none
	// Alone says that only the hold keeps the user there, no connection.
	Alone bool
}

// MemberChange sets a member or, when Gone, removes it.
type MemberChange struct {
	Member
	Gone bool
}

// Arrival is a user who came to a page, or to a site: the page is then TotalOf it. Who was
// there already, from another connection or within a grace, does not arrive.
type Arrival struct {
	User User
	Page string
}

// PageUsers is the number of a partition's users on one page. The number is
// absolute, not a difference, so writing it twice has the effect of writing it once.
type PageUsers struct {
	Page  string
	Users int64
}

// Change is what one partition has to write: its members first, then its number
// of users for each page. Sequence grows with every change of one claim; a store
// ignores a change that is not newer than the last one it has.
type Change struct {
	Claim
	Sequence uint64
	Members  []MemberChange
	Counts   []PageUsers
	// Arrivals are for stores that remember them, see package minutes. Unlike counts,
	// they are not absolute: they are in one change that is written without an error.
	Arrivals []Arrival
	// Reset says that Members has all members of the partition: the store first
	// drops the members that it has.
	Reset bool
	// Complete says that the partition is complete with this change: everything has
	// been written under its claim. Until all partitions are complete, counts are
	// marked stale.
	Complete bool
}

// Outcome is the result of one Change: the counts of its pages after the change,
// in the order of Change.Counts, or the reason why the change was not written.
type Outcome struct {
	Counts []Count
	Err    error // nil, ErrFenced, ErrLost or ErrUnavailable
}

// Snapshot is what the store holds of a partition when a new owner claims it.
type Snapshot struct {
	Members []Member
	Pages   []string // further pages, not in Members, whose number the last owner may have left wrong
}

// Partitions is a store as a presence node sees it. Any goroutine may call all
// methods; only one goroutine at a time calls Write for one partition.
type Partitions interface {
	// Generation changes whenever the store may have lost data. A claim of another
	// generation is no longer valid: writes under it fail with ErrLost.
	Generation(ctx context.Context) (uint64, error)
	// Claim takes partitions for owner and returns the claims in the order of
	// partitions. Their epochs are higher than all earlier ones, and writes under
	// earlier epochs are fenced from now on. again says that the store has lost data
	// and the owners will write it again: counts that they do not write are 0 from
	// now on, under versions that replace all older ones. A partition that another
	// owner has claimed since then stays with that one: its claim here has the epoch 0.
	Claim(ctx context.Context, owner string, partitions []int, again bool) ([]Claim, error)
	// Load returns what the claims' partitions held when they were claimed.
	Load(ctx context.Context, claims []Claim) ([]Snapshot, error)
	// Write applies changes, each of another partition, and publishes the counts that
	// they changed. The outcomes are in the order of changes.
	Write(ctx context.Context, changes []Change) []Outcome
	// Incomplete returns which of the partitions are not complete. With everywhere
	// set it looks through the whole store, otherwise through a small share of the
	// store, a different one at each call.
	Incomplete(ctx context.Context, partitions []int, everywhere bool) ([]int, error)
}

// Counters reads counts.
type Counters interface {
	// Counts returns the counts of pages, in the order of pages. A page nobody ever
	// joined has 0 users and the zero Version. While a partition is not complete, a
	// count may lack users and is marked stale: a stale count must not replace a
	// count that the caller has.
	Counts(ctx context.Context, pages []string) ([]Count, error)
}

// Lister lists pages. Every store has it beside what Store says.
type Lister interface {
	// Pages calls fn with the names of all pages that have users, and perhaps of others, some at
	// a time, from one goroutine at a time. A page may be there twice; one that comes or goes
	// meanwhile may be there or not.
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
	// Attach adds gateway to the topics' endpoints and returns the topics' updates.
	// Whoever gets a later update from the feed knows the endpoint already.
	Attach(ctx context.Context, gateway string, topics []Topic) ([]Update, error)
	// Detach removes gateway from the topics' endpoints. An endpoint that does not
	// exist is no error.
	Detach(ctx context.Context, gateway string, topics []Topic) error
	// Missing returns those of the topics that gateway is not attached to.
	Missing(ctx context.Context, gateway string, topics []Topic) ([]Topic, error)
	// Attached returns all endpoints of a bucket.
	Attached(ctx context.Context, bucket int) ([]Endpoint, error)
}

// Publication is one message of a bucket. It carries updates, or endpoints that
// came or went, or says that messages may have been lost.
type Publication struct {
	Bucket    int
	Updates   []Update
	Endpoints []Endpoint
	Lost      bool // the bucket must be read again, after a gap, an overflow or a new subscription
}

// Feed delivers publications.
type Feed interface {
	// Watch calls fn with the publications of buckets, one at a time, until ctx
	// ends. The first publication of each bucket has Lost. When fn is slow, Watch
	// drops publications instead of queueing more, and then sends a Lost.
	Watch(ctx context.Context, buckets []int, fn func(Publication)) error
}

// Store has all parts of a store. Callers take the smallest part that they need.
type Store interface {
	Partitions
	Counters
	Updates
	Endpoints
	Feed
}
