// Package api serves the HTTP calls that are answered at once: counts of pages and their history, holds, follows and
// unread changes, badges and widgets, erasures, the dashboard and the files of the browser client. It knows nothing
// about connections: package gateway adds its long-lived calls to Engine. The calls of counters are in package
// counterapi.
//
// A handler returns an answer or an error, see package calls.
package api

import (
	"context"
	"errors"
	"io/fs"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/unread"
)

const storeTimeout = 3 * time.Second // how long a request waits for the store

// Config tunes an API. A field is required unless it says otherwise.
type Config struct {
	HoldTime time.Duration // how long a hold lasts if it is not renewed
	Regions  Regions

	// PageStats is how long the minutes of pages are kept; 0: they are not kept. Minutes reads them.
	PageStats time.Duration
	// PageDays is how many days of pages are kept, and Days has them. 0: none are.
	PageDays int
	Minutes  minutes.Store
	Days     minutes.DayStore

	LastSeen presence.LastSeen // erases the times of last departure

	App   pusher.App // for clients and back ends that use Pusher's libraries; without a key neither is served
	Pages Pages      // required if the app has secrets

	Arrivals  Arrivals
	Dashboard Dashboard
	Origins   *identity.Origins
	Assets    fs.FS  // index.html is served at /, the other files under /-/
	BasePath  string // prefix of all paths, such as /live; empty: none

	Tracer trace.Tracer // traces requests; nil: nothing is traced
}

// Parts are what an API needs of a gateway.
type Parts struct {
	Callers   *Callers
	Counts    Counts
	NewTopics []*bounds.Rates // of topics that the gateway does not have yet
	Cluster   Cluster
	Unread    unread.Store
	Follows   *unread.FollowService
	Counters  *counterapi.API
	Limits    *prometheus.CounterVec // counts refusals, by the limit that was reached

	Registerer prometheus.Registerer // for the metrics; nil: there are none
	Log        zerolog.Logger
}

// Counts reads the counts of pages.
type Counts interface {
	// Newest returns the newest update of each topic that this process knows or can read in a few
	// seconds. ok is false if one is not known.
	Newest(ctx context.Context, topics []presence.Topic) (updates []presence.Update, ok bool)
	// Known is Newest of one topic, if that needs no call of the store.
	Known(topic presence.Topic) (update presence.Update, known bool)
	// Read is Newest, but includes all that the store acknowledged before the call.
	Read(ctx context.Context, topics []presence.Topic) (updates []presence.Update, ok bool)
	// Uncached returns how many of the topics have no subscriber in this process and were not read lately.
	Uncached(topics []presence.Topic) int
}

// Cluster reaches the presence nodes.
type Cluster interface {
	// Hold takes (on) or ends a user's hold on a page. It returns when the store has
	// the change. After an error the store may or may not have it.
	Hold(ctx context.Context, u presence.User, page string, on bool) error
	// Users returns the states of up to presence.MaxAsked users, in the order of users.
	Users(ctx context.Context, users []presence.User) ([]presence.UserState, error)
	// Explain returns the parts of this region's count of a page, or of a site.
	Explain(ctx context.Context, page string) presence.Parts
	// Ready returns why the other roles are not available yet, or nil.
	Ready() error
}

// Arrivals is notified when the store has a user on a further page. Arrived gets the user's qualified name, and must
// not block.
type Arrivals interface {
	Arrived(u presence.User, name string)
}

// Regions reads a count with each region's share.
type Regions interface {
	Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error)
}

// Dashboard has the dashboard's data about sites, no older than a second. Errors are those of ctx.
type Dashboard interface {
	// JSON returns the data about a site; alone leaves out data that concerns all sites.
	JSON(ctx context.Context, site presence.Site, alone bool) ([]byte, error)
	// Top returns the pages of a site with the most users.
	Top(ctx context.Context, site presence.Site) (presence.TopList, error)
}

// API serves the calls that are answered at once. Its methods may be called from any goroutine.
type API struct {
	cfg        Config
	callers    *Callers
	parts      Parts
	identities *bounds.Identities
	erasures   erasures
	stats      *counterapi.Questions[statsQuestion, pageStats]
	explained  *counterapi.Questions[string, explanation] // cached by the names of pages
	channels   *counterapi.Questions[channelsOf, occupied]
	files      map[string]*asset
	// The descriptions are made when somebody asks for one; created by Engine.
	openAPI, asyncAPI func() *asset
	metrics           *httpMetrics
	foreign           rate.Sometimes // limits how often a refused origin is logged
	started           atomic.Bool    // the cluster was ready at least once, so there are counts to serve
}

// New returns the API of a gateway with these parts.
func New(cfg Config, parts Parts) *API {
	return &API{
		cfg:        cfg,
		callers:    parts.Callers,
		parts:      parts,
		identities: bounds.NewIdentities(bounds.IdentitiesOfWrites, cfg.HoldTime),
		erasures:   newErasures(),
		stats:      counterapi.NewQuestions[statsQuestion, pageStats](maxStats),
		explained:  counterapi.NewQuestions[string, explanation](maxExplained),
		channels:   counterapi.NewQuestions[channelsOf, occupied](maxChannelLists),
		files:      readFiles(cfg.Assets),
		metrics:    newHTTPMetrics(parts.Registerer),
		foreign:    rate.Sometimes{Interval: time.Minute},
	}
}

// Ready returns why the cluster is not available now, or nil.
func (a *API) Ready() error {
	err := a.parts.Cluster.Ready()
	if err == nil {
		a.started.Store(true)
	}

	return err
}

// Serving returns why nothing can be served yet, or nil. A gateway that was ready once always serves: while its store
// is unavailable, it serves the last known counts.
func (a *API) Serving() error {
	if a.started.Load() {
		return nil
	}

	return a.Ready()
}

// admitIdentity limits how many different anonymous identities one address uses for
// writes. New and old identities both count. An identity that the address used
// lately costs nothing, and a server with an API key has no limit.
func (a *API) admitIdentity(c *gin.Context, id identity.Identity) error {
	// Who comes with a token is limited by whoever issues tokens.
	if id.Signed == "" || a.callers.IsServer(c.Request) {
		return nil
	}

	return a.counted(LimitIdentities, a.identities.Admit(a.callers.Addr(c.Request), uint64(id.Hash)))
}

// admitPages limits how many new pages one address, and all addresses together, name in requests. Pages with a
// subscriber in this process, and pages that were read lately, are not counted. A server with an API key has no limit.
func (a *API) admitPages(c *gin.Context, pages ...string) error {
	fresh := a.parts.Counts.Uncached(presence.CountTopics(pages))
	if fresh == 0 || a.callers.IsServer(c.Request) {
		return nil
	}

	return a.AdmitTopics(c, fresh)
}

// AdmitTopics charges so many new topics to the address of a request, and to all addresses.
func (a *API) AdmitTopics(c *gin.Context, fresh int) error {
	refusal := bounds.Admit(bounds.Caller{Addr: a.callers.Addr(c.Request)}, fresh, a.parts.NewTopics...)
	if refusal != nil {
		return a.TooManyPages()
	}

	return nil
}

// TooManyPages refuses a request that names more new topics than Parts.NewTopics admits.
func (a *API) TooManyPages() error {
	return a.tooMany(bounds.NewTopicsOfAll.Says)
}

// tooMany refuses a request for now with 429.
func (a *API) tooMany(detail string) error {
	return a.counted(LimitRate, calls.Refuse(calls.ErrRate, detail, httppolicy.RetryAfter(calls.ComeBack)))
}

// counted counts the limit that a refusal is about, and returns the refusal, which may be nil.
func (a *API) counted(limit string, refusal error) error {
	if refusal != nil {
		a.parts.Limits.WithLabelValues(limit).Inc()
	}

	return refusal
}

// carryOut calls do with the time limit timeout, and converts its error for the client.
func (a *API) carryOut(c *gin.Context, timeout time.Duration, do func(context.Context) error) error {
	if err := a.Serving(); err != nil {
		return Unavailable(err)
	}

	ctx, cancel := context.WithTimeout(c.Request.Context(), timeout)
	defer cancel()

	// An error about a bound has a text for the client. All other errors are only logged.
	err := do(ctx)
	if err == nil || errors.Is(err, presence.ErrTooMany) {
		return err
	}

	return storeAway(err)
}
