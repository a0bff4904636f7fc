// Package counterapi serves counters that last: their HTTP calls, and their updates for
// clients that look at them live. It knows neither connections nor pages.
//
// # A call
//
// Every call is checked in the same order: the path and the method (by the router), a wrong
// API key (401), the key (400), whether the caller may make it (403, or 401 without the token
// that the settings require), the body (413, 415, 400), and then the change itself (409, 429).
// A change becomes a counter.Op and goes through the one Combiner of the process. The answer
// is written when the change is durable.
//
// # Permissions
//
// A request with an API key may do everything. All others may do what the rule of the counter
// permits. The changes of each user and each address are limited, and so are the counters they
// create, see publicBounds. A change that the counter refuses is 409 even for a caller over the
// limit; to know that, the counter is read as it may lag.
//
// # Reads
//
// A read that may lag is answered from memory if a client here looks at the counter live, the
// store is a server of its own, and it has confirmed the value lately enough. Otherwise it is
// one call to the store. While the store is away, such reads are answered with the last known
// value, as stale, and exact reads with 503.
//
// A range, a window and a top list are expensive questions. Equal ones are computed once, and
// public ones one at a time, see Questions.
//
// # Limits
//
// A call on a limit asks whether so much may pass now. A limit is not a counter: its key needs
// no rule, and a counter with the same key has nothing to do with it. Limits are not public. The
// call itself has limit, window, cost and algorithm, and each key, algorithm and window has a
// state of its own in the store (package counter/limit has the arithmetic). A call has no
// Idempotency-Key: a repeated call costs again. Regions do not share limits.
//
// The limits of public changes are not among these. They are token buckets in the memory of each
// gateway: "10 a second, 20 at once" gives one change back every 100 ms, which no window does,
// and a call that everybody may make must not cost a call to the store. Both answer alike: 429
// with Retry-After.
package counterapi

import (
	"context"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/bounds"
	"headcount/gateway/fanout"
	"headcount/gateway/identity"
	"headcount/presence"
)

const (
	// Root is the path of all counters.
	Root = "/api/v1/counters"

	MaxBody = 256 << 10 // bytes of a request

	smallBody     = 4 << 10          // bytes of a request; enough for every public call
	patience      = 12 * time.Second // how long a request waits for the store: longer than the store's own time limit
	defaultLedger = 100              // entries of one page
	defaultValues = 20               // values of a dimension
	defaultTop    = 10               // length of a top list
)

// Callers identifies the caller of a request.
type Callers interface {
	// Site returns the site that a request is for.
	Site(c *gin.Context) presence.Site
	// IsServer reports whether the request has a valid API key. A request with a wrong one does not get here.
	IsServer(r *http.Request) bool
	// Crawler reports whether the client is a crawler that is not to be counted.
	Crawler(r *http.Request) bool
	// Cacheable allows proxies to cache the answer to a public GET.
	Cacheable(c *gin.Context, pages ...string)
	// Public returns an error if the request has a bad token.
	Public(c *gin.Context) error
	// Identify returns the caller's identity, a new one if the caller has none.
	Identify(c *gin.Context) (identity.Identity, error)
	// Issue sends the caller its identity to keep.
	Issue(c *gin.Context, id identity.Identity)
	// Addr returns the address of the caller.
	Addr(r *http.Request) netip.Addr
}

// Counters are the counters and limits of a process: pipeline.Counters.
type Counters interface {
	counter.Reader
	counter.Feed
	counter.Reserver
	// Change makes op, as counter.Combiner.Do says.
	Change(ctx context.Context, op counter.Op) counter.Result
	// Limit judges a call on a limit, as counter.Limits.Do says.
	Limit(ctx context.Context, request limit.Request) (limit.Answer, error)
	// ForgetLimit deletes the states of a limit.
	ForgetLimit(ctx context.Context, key string) error
	// Top returns what gained most, as counter.TopTracker.Top says.
	Top(ctx context.Context, rule *counter.Rule, last time.Duration, n int) ([]counter.Gained, error)
	// Remote reports whether the store is a separate server, and Up whether it is available. After a change of Up,
	// Live.StateChanged must be called.
	Remote() bool
	Up() bool
}

// Config tunes the counters of a process. A field is required unless it says otherwise.
type Config struct {
	Rules      *counter.Rules
	Counters   Counters
	Elapsed    func() time.Duration  // a clock that does not stop while the machine sleeps, see machine.NewStandstill
	Registerer prometheus.Registerer // nil: metrics are not registered
	Log        zerolog.Logger
}

// API serves the HTTP calls. Its methods may be called from any goroutine.
type API struct {
	cfg       Config
	callers   Callers
	live      *Live
	bounds    *publicBounds
	metrics   *metrics
	archive   *counter.Archive
	questions *Questions[question, outcome]
	reads     fanout.SharedReads[counter.Reading] // one read of a counter at a time
	// large has an element for each large body of a caller without API key in progress. When it is full, further ones
	// are refused with 503.
	large chan struct{}

	mu      sync.Mutex
	differs map[*counter.Rule]bool // rules that logKind has logged; guarded by mu
}

// New returns the API. Live must follow the same counters.
func New(cfg Config, callers Callers, live *Live) *API {
	return &API{
		cfg:       cfg,
		callers:   callers,
		live:      live,
		bounds:    newPublicBounds(),
		metrics:   newMetrics(cfg.Registerer, live),
		archive:   counter.NewArchive(cfg.Counters),
		questions: NewQuestions[question, outcome](maxAnswers),
		large:     make(chan struct{}, bounds.LargeBodies.Max),
		differs:   map[*counter.Rule]bool{},
	}
}
