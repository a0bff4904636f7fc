// Package bounds limits what clients may cost. Its table has a row for each bound: what it bounds, who has it, the
// number, and what a client is told beyond it. Three shapes hold them: Rates for how often, Slots for how many at a
// time of an address, and Turn for who waits for whom.
//
// Beside the table are the bounds that are settings, the pages of a user (package roster), and those of connections
// before a request is known (httppolicy.ConnLimiter). A test compares docs/bounds.md, which says what else is bounded,
// with the table.
package bounds

import (
	"time"

	"headcount/counter/limit"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Key says who has a bound for itself.
type Key string

// The keys.
const (
	Connection Key = "connection"
	User       Key = "user"    // a caller without a user is one by its address
	Address    Key = "address" // a /64 of IPv6 is one address
	Everybody  Key = "gateway" // all clients of this process have one bound together
)

// Bound is a row of the table: a rate, or how many there may be at a time.
type Bound struct {
	Of   string // what is bounded; the row of docs/bounds.md has the same name
	Each Key

	limit.Rate
	PerSecond int // of the rate; 0: there is none
	Max       int // at a time

	Is   error  // what it is to go beyond, in the words of package calls; nil: nothing is refused, it is slowed down
	Says string // what the client is told; empty: each call has a sentence of its own
}

// Table has all bounds.
var Table []*Bound

// What a client may do with its connection: far more than a page needs, and little enough to cost other clients little.
var (
	// Pings and fragments count too, since each costs as much as a message.
	Messages = rate("messages of a client", Connection, 500, 2_000, calls.ErrRate,
		"too many messages; at most 500 frames a second, pings and fragments among them")
	Errors = most("messages of a client", Connection, 20, calls.ErrTooManyErrors, "too many errors on one connection")

	// Long lists are much work: as many names as in 25 of the longest subscribe messages.
	Names = rate("names in the lists of a client's messages", Connection, 2_500, 2_500, nil, "")

	Pages = most("subscriptions of a connection", Connection, presence.MaxPages, presence.ErrTooMany,
		"a connection may join and subscribe to at most 100 pages and counters; leave some or open another connection")
)

// What is new to the gateway costs a call to the store, and is kept for a while. Many people may share an address, and
// all of them connect again after a restart.
var (
	// As many at once as a client may have, and a few more.
	NewTopics = rate("new pages and counters of a connection", Connection, 20, 120, calls.ErrRate,
		"too many new pages and counters; at most 20 a second that nobody else here has, and 120 at once")
	NewTopicsOfAddress = rate("new pages of an address, and of all clients", Address, 1_000, 20_000, calls.ErrRate,
		"This address, or all clients together, have asked for too many pages that nobody else here has.")
	NewTopicsOfAll = rate(NewTopicsOfAddress.Of, Everybody, 5_000, 100_000, calls.ErrRate, NewTopicsOfAddress.Says)
	FollowedUsers  = most("users that event streams follow", Everybody, 10_000, calls.ErrRate, NewTopicsOfAddress.Says)
)

// What visitors do over HTTP. Identities are free, so bounds of a user alone would bound nobody: addresses have some,
// too.
var (
	IdentitiesOfWrites = rate("new anonymous identities of an address, in PUTs", Address, 10, 100, calls.ErrRate,
		"This address has brought too many identities; send the id you were given, or wait.")

	Erasures = rate("erasures of visitors", Address, 1, 5, calls.ErrRate,
		"This address has erased too often lately; erase again later.")
	// As many as begin while one may last. The rate alone would let an address queue them faster than they end.
	ErasuresOfAddress = most(Erasures.Of, Address, 30, calls.ErrRate, Erasures.Says)
	// One erasure can keep the store busy for all of its time.
	ErasuresAtOnce = most(Erasures.Of, Everybody, 2, nil, "")
)

// What callers without API key do with counters.
var (
	Changes = rate("changes of counters by one user, or one address without identity", User, 10, 20, calls.ErrRate,
		"Counters may be changed 10 times a second by one user, and by one address that brings no identity, "+
			"20 at once; send the change again later.")
	ChangesOfAddress = rate("changes of counters by one address (one /64 of IPv6) without API key, whoever makes them",
		Address, 100, 1_000, calls.ErrRate,
		"All users of one address together may change counters 100 times a second, 1000 at once; "+
			"send the change again later.")
	IdentitiesOfChanges = rate(ChangesOfAddress.Of, Address, 10, 300, calls.ErrRate, IdentitiesOfWrites.Says)

	NewCounters = rate("new counters without API key", Address, 10, 500, calls.ErrRate,
		"Too many new counters have been made lately, by this address or by all; send the change again later.")
	NewCountersOfAll = rate(NewCounters.Of, Everybody, 100, 10_000, calls.ErrRate, NewCounters.Says)

	LargeBodies = most("a call on counters", Everybody, 64, calls.ErrBodies, "")
)

// Questions about the past are expensive. Those of visitors are computed one after the other.
var (
	Questions = most("public questions about history (range, window, top)", Everybody, 1, nil, "")

	QuestionsWaiting   = most(Questions.Of, Everybody, 64, calls.ErrRate, "")
	QuestionsOfAddress = most(Questions.Of, Address, 16, calls.ErrRate, "")
	AnswersOfAddress   = most(Questions.Of, Address, 128, calls.ErrRate, "")

	// Servers may follow as many lists again; those are not counted by address.
	TopLists          = most("top lists that event streams follow", Everybody, 128, calls.ErrRate, "")
	TopListsOfAddress = most(TopLists.Of, Address, 8, calls.ErrRate, "")
)

// rate adds the row of a rate: so many a second, and a burst of so many at once after a pause.
func rate(of string, each Key, perSecond, burst int, is error, says string) *Bound {
	return row(&Bound{
		Of: of, Each: each, Rate: limit.PerSecond(perSecond, burst), PerSecond: perSecond, Is: is, Says: says,
	})
}

// most adds the row of what there is at most at a time.
func most(of string, each Key, max int, is error, says string) *Bound {
	return row(&Bound{Of: of, Each: each, Max: max, Is: is, Says: says})
}

func row(b *Bound) *Bound {
	Table = append(Table, b)
	return b
}

// Refusal returns the refusal of a call beyond a rate that may be made after wait.
func (b *Bound) Refusal(wait time.Duration) error {
	return calls.Refuse(b.Is, b.Says, httppolicy.Limited(b.Rate, wait))
}
