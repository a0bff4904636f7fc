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
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/internal/tracing"
	"headcount/presence"
)

const (
	// Root is the path of all counters.
	Root = "/api/v1/counters"

	MaxBody = 256 << 10 // bytes of a request

	me = "me" // the member that is the caller

	smallBody     = 4 << 10          // bytes of a request; enough for every public call
	largeBodies   = 64               // larger bodies of callers without API key that are read at a time
	patience      = 12 * time.Second // how long a request waits for the store: more than the store itself
	comeBack      = time.Second      // Retry-After of a 503
	defaultLedger = 100              // entries of one page
	defaultValues = 20               // values of a dimension
	defaultTop    = 10               // counters that gained most
)

// Callers identifies the caller of a request.
type Callers interface {
	// Site returns the site that a request is for.
	Site(c *gin.Context) presence.Site
	// IsServer reports whether the request has a valid API key. A request with a wrong one does not get here.
	IsServer(r *http.Request) bool
	// Crawler reports whether the client is a crawler that is not to be counted.
	Crawler(r *http.Request) bool
	// Cacheable lets proxies keep the answer to a public GET.
	Cacheable(c *gin.Context, pages ...string)
	// Public refuses a request that carries a bad token. If it returns false, it has
	// written the error answer.
	Public(c *gin.Context) bool
	// Identify returns the caller's identity, a new one if the caller has none. If ok is false, it has
	// written the error answer.
	Identify(c *gin.Context) (id identity.Identity, ok bool)
	// Issue sends the caller its identity to keep.
	Issue(c *gin.Context, id identity.Identity)
	// Addr returns the address of the caller.
	Addr(r *http.Request) netip.Addr
}

// Counters are the counters and limits of a process: pipeline.Counters.
type Counters interface {
	counter.Reader
	counter.Feed
	// Change makes op, as counter.Combiner.Do says.
	Change(ctx context.Context, op counter.Op) counter.Result
	// Limit judges a call on a limit, as counter.Limits.Do says.
	Limit(ctx context.Context, call limit.Call) (limit.Answer, error)
	// Top returns what gained most, as counter.TopTracker.Top says.
	Top(ctx context.Context, rule *counter.Rule, last time.Duration, n int) ([]counter.Gained, error)
	// Remote reports whether the store is a server of its own, and Up whether it can be reached. When that
	// changes, somebody calls Live.StateChanged.
	Remote() bool
	Up() bool
}

// Config tunes the counters of a process. A field is required unless it says otherwise.
type Config struct {
	Rules      *counter.Rules
	Counters   Counters
	Elapsed    func() time.Duration  // goes on while the machine sleeps, see machine.NewStandstill
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
	reads     fanout.SharedReads[counter.Reading] // of one counter each
	large     chan struct{}                       // holds one for each large body of a caller without API key; beyond its size a body is 503

	mu      sync.Mutex
	differs map[*counter.Rule]bool // rules for which logKind has logged; guarded by mu
}

// New returns the API of the counters that live follows.
func New(cfg Config, callers Callers, live *Live) *API {
	return &API{
		cfg: cfg, callers: callers, live: live, bounds: newPublicBounds(),
		archive: counter.NewArchive(cfg.Counters), questions: NewQuestions[question, outcome](maxAnswers),
		large:   make(chan struct{}, largeBodies),
		differs: map[*counter.Rule]bool{}, metrics: newMetrics(cfg.Registerer, live),
	}
}

// Routes adds the routes.
func (a *API) Routes(e *gin.Engine) {
	const one = Root + "/:key"
	httppolicy.Get(e, Root, a.getSeveral)
	e.POST(Root, a.postBatch)
	httppolicy.Get(e, one, func(c *gin.Context) { a.getOne(c, false) })
	e.DELETE(one, a.delete)
	httppolicy.Get(e, one+"/exact", func(c *gin.Context) { a.getOne(c, true) })
	e.POST(one+"/increment", func(c *gin.Context) { a.postStep(c, false) })
	e.POST(one+"/decrement", func(c *gin.Context) { a.postStep(c, true) })
	e.POST(one+"/reset", func(c *gin.Context) { a.postReasoned(c, counter.ParseReset) })
	e.POST(one+"/adjust", func(c *gin.Context) { a.postReasoned(c, counter.ParseAdjust) })
	e.POST(one+"/set", func(c *gin.Context) { a.postReasoned(c, counter.ParseSet) })
	e.POST(one+"/members", func(c *gin.Context) { a.postReasoned(c, counter.ParseMembers) })
	e.PUT(one+"/members/:member", func(c *gin.Context) { a.changeMember(c, true) })
	e.DELETE(one+"/members/:member", func(c *gin.Context) { a.changeMember(c, false) })
	httppolicy.Get(e, one+"/members/:member", a.getMember)
	httppolicy.Get(e, one+"/ledger", a.getLedger)
	httppolicy.Get(e, one+"/aggregate", a.getAggregate)
	httppolicy.Get(e, one+"/range", a.getRange)
	httppolicy.Get(e, one+"/window", a.getWindow)
	httppolicy.Get(e, one+"/dimensions/:name", a.getDimension)
	httppolicy.Get(e, TopRoot, a.getTop)
	e.POST(limitsRoot+"/:key", a.postLimit)
}

// nobody is the permission of a call that no rule makes public: it needs an API key.
const nobody counter.Public = 0

// call is a request on one counter.
type call struct {
	key    string // with the site: see presence.Site.Qualify
	rule   *counter.Rule
	server bool              // it has an API key
	id     identity.Identity // of a caller without API key who changes something
}

// Find returns the name of a site's counter and its rule, or why there is none.
func (a *API) Find(site presence.Site, key string) (name string, rule *counter.Rule, err error) {
	if err := counter.CheckKey(key); err != nil {
		return "", nil, err
	}
	if rule = a.cfg.Rules.In(site).Find(key); rule == nil {
		return "", nil, fmt.Errorf("%w: no rule of --counters fits it", counter.ErrKey)
	}
	return site.Qualify(key), rule, nil
}

// param returns a parameter of the path, which the router matches as it was sent.
func param(c *gin.Context, name string) (string, error) { return url.PathUnescape(c.Param(name)) }

// begin returns the call on the counter that the path names, if the caller has permission p.
// If ok is false, it has written the error answer.
func (a *API) begin(c *gin.Context, p counter.Public) (one call, ok bool) {
	if one, ok = a.named(c); !ok || !a.allowed(c, one.server, one.rule, p) {
		return one, false
	}
	if one.server {
		return one, true
	}
	if p == counter.PublicRead {
		return one, a.callers.Public(c)
	}
	one.id, ok = a.callers.Identify(c)
	return one, ok
}

// named returns the call on the counter that the path names. If ok is false, it has written the
// error answer.
func (a *API) named(c *gin.Context) (one call, ok bool) {
	one.server = a.callers.IsServer(c.Request)
	key, err := param(c, "key")
	if err == nil {
		one.key, one.rule, err = a.Find(a.callers.Site(c), key)
	}
	if err != nil {
		problem(c, http.StatusBadRequest, badKey(err))
	}
	return one, err == nil
}

// badKey returns the detail of the refusal of a key.
func badKey(err error) string {
	return "This cannot be the key of a counter: " + strings.TrimPrefix(err.Error(), counter.ErrKey.Error()+": ") + ". Send 1 to 128 characters without control characters and *, percent-encoded, that fit a rule."
}

// allowed reports whether a caller has permission p. If not, it has written the error answer.
func (a *API) allowed(c *gin.Context, server bool, rule *counter.Rule, p counter.Public) bool {
	if server || p != nobody && rule.Allows(p) {
		return true
	}
	forbidden(c, "")
	return false
}

func forbidden(c *gin.Context, why string) {
	problem(c, http.StatusForbidden, "This call on this counter is not public"+why+"; send an API key in the header "+httppolicy.APIKeyHeader+", or open it in the rule of the counter.")
}

func problem(c *gin.Context, status int, detail string) { httppolicy.Problem(c.Writer, status, detail) }

// body reads the body. If it returns false, it has written the error answer.
func (a *API) body(c *gin.Context, server bool) ([]byte, bool) {
	for _, given := range c.Request.Header["Content-Type"] {
		if given == "application/json" {
			continue
		}
		if media, _, err := mime.ParseMediaType(given); given != "" && (err != nil || media != "application/json") {
			problem(c, http.StatusUnsupportedMediaType, "The body must be JSON; send the header Content-Type: application/json, or none.")
			return nil, false
		}
	}
	if coding := c.GetHeader("Content-Encoding"); coding != "" && coding != "identity" {
		problem(c, http.StatusUnsupportedMediaType, "The body may not be compressed; send it without Content-Encoding.")
		return nil, false
	}
	const tooLong = "A body has at most 262144 bytes; send the rest in another call."
	if c.Request.ContentLength > MaxBody { // a client that waits for 100 Continue gets this before it sends the body
		httppolicy.TooLarge(c.Writer, tooLong)
		return nil, false
	}
	text, err := a.readBody(c, server)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		httppolicy.TooLarge(c.Writer, tooLong)
	case errors.Is(err, errLargeBodies):
		httppolicy.RefuseBody(c.Writer, http.StatusServiceUnavailable, "Too many large bodies of callers without API key are being read; send less than 4096 bytes, or try again.", httppolicy.RetryAfter(comeBack))
	case err != nil:
		problem(c, http.StatusBadRequest, "The body could not be read.")
	}
	return text, err == nil
}

var errLargeBodies = errors.New("too many large bodies")

// readBody reads a body of at most MaxBody. A client may send it slowly, and it takes memory
// meanwhile, so only largeBodies of callers without API key may be large at a time.
func (a *API) readBody(c *gin.Context, server bool) ([]byte, error) {
	n, r := c.Request.ContentLength, c.Request.Body
	if r == nil || n == 0 {
		return nil, nil
	}
	if n < 0 {
		r = http.MaxBytesReader(c.Writer, r, MaxBody)
	}
	if server || n >= 0 && n <= smallBody {
		return readAll(nil, r, n)
	}
	begin, err := readAll(nil, io.LimitReader(r, smallBody), -1)
	if err != nil || len(begin) < smallBody {
		return begin, err
	}
	select {
	case a.large <- struct{}{}:
		defer func() { <-a.large }()
		return readAll(begin, r, n)
	default:
		return nil, errLargeBodies
	}
}

// readAll returns the n bytes of a body that starts with begin, and reads the rest of them from
// r. If n is negative, the body ends with r.
func readAll(begin []byte, r io.Reader, n int64) ([]byte, error) {
	if n < 0 {
		rest, err := io.ReadAll(r)
		return append(begin, rest...), err
	}
	b := append(make([]byte, 0, n), begin...)[:n]
	_, err := io.ReadFull(r, b[len(begin):])
	return b, err
}

// change reads the body and the Idempotency-Key of a change of one counter. If it returns false,
// it has written the error answer.
func (a *API) change(c *gin.Context, one call, parse func([]byte, string, *counter.Rule) (counter.Change, error)) (counter.Op, bool) {
	text, ok := a.body(c, one.server)
	if !ok {
		return counter.Op{}, false
	}
	change, err := parse(text, one.key, one.rule)
	if err != nil {
		badBody(c, err)
		return counter.Op{}, false
	}
	op := counter.Op{Changes: []counter.Change{change}}
	op.IdempotencyKey, ok = remembered(c, one.key, one.id.User)
	return op, ok
}

func badBody(c *gin.Context, err error) {
	problem(c, http.StatusBadRequest, "The body cannot be used: "+strings.TrimPrefix(err.Error(), counter.ErrBody.Error()+": ")+".")
}

// remembered returns the hash of the request's Idempotency-Key, if it has one. If ok is false,
// it has written the error answer.
func remembered(c *gin.Context, space, caller string) (id counter.IdempotencyKey, ok bool) {
	key, why := httppolicy.IdempotencyKey(c.Request)
	if why != "" {
		problem(c, http.StatusBadRequest, why)
		return id, false
	}
	if key != "" {
		id = counter.NewIdempotencyKey(space, caller, key)
	}
	return id, true
}

// within bounds the time of a request. A store within the process needs no bound.
func (a *API) within(c *gin.Context) (context.Context, context.CancelFunc) {
	if !a.cfg.Counters.Remote() {
		return c.Request.Context(), func() {}
	}
	return context.WithTimeout(c.Request.Context(), patience)
}

// make carries out op. If ok is false, it has written the error answer.
func (a *API) make(c *gin.Context, op counter.Op) (counters []counter.Counter, ok bool) {
	ctx, cancel := a.within(c)
	defer cancel()
	began := time.Now()
	ctx, span := tracing.Start(ctx, "change of counters")
	result := a.cfg.Counters.Change(ctx, op)
	span.End()
	a.metrics.acknowledged.Observe(time.Since(began).Seconds())
	if result.Err != nil {
		a.refused(c, op.Changes, result.Err)
		return nil, false
	}
	if result.Replay {
		a.metrics.replayed.Inc()
		c.Header("Idempotent-Replay", "true")
	} else {
		a.metrics.made.Inc()
	}
	for i := range result.Counters {
		a.live.remember(result.Counters[i])
		a.reads.Forget(result.Counters[i].Key) // whoever reads from now on sees the change
	}
	return result.Counters, true
}

// refused answers a change that failed.
func (a *API) refused(c *gin.Context, changes []counter.Change, err error) {
	var conflict *counter.Conflict
	switch {
	case errors.As(err, &conflict):
		for i := range changes {
			if ch := &changes[i]; ch.Key == conflict.Key && errors.Is(conflict.Is, counter.ErrKind) && ch.Refusal(counter.Counter{}) == nil {
				a.logKind(ch.Rule)
			}
		}
		a.metrics.refused.Inc()
		writeConflict(c, conflict)
	case errors.Is(err, counter.ErrUnavailable):
		a.unavailable(c, err)
	default: // a defect: the Op was checked before
		a.defect(c, err)
	}
}

// defect answers 500.
func (a *API) defect(c *gin.Context, err error) {
	a.cfg.Log.Error().Err(err).Str("route", c.FullPath()).Str("request_id", httppolicy.RequestID(c.Writer.Header())).Msg("counters: a call could not be carried out")
	problem(c, http.StatusInternalServerError, "The server has a defect; it has been logged.")
}

func writeConflict(c *gin.Context, conflict *counter.Conflict) {
	said, mend := "Nothing was changed: ", "use the calls of its kind, or another key"
	read := c.Request.Method == http.MethodGet || c.Request.Method == http.MethodHead
	if read {
		said = "There is no answer: "
	}
	switch {
	case errors.Is(conflict.Is, counter.ErrBound):
		mend = "send a change that stays within its bounds"
	case errors.Is(conflict.Is, counter.ErrOverflow) && read:
		mend = "ask for the aggregate of fewer counters, by a longer prefix"
	case errors.Is(conflict.Is, counter.ErrOverflow):
		mend = "a value has 64 bits; send a smaller change, or reset the counter before"
	}
	httppolicy.Conflict(c.Writer, said+conflict.Is.Error()+": "+conflict.Text+"; "+mend+".", presence.KeyOf(conflict.Key), conflict.Value)
}

// unavailable answers 503.
func (a *API) unavailable(c *gin.Context, err error) {
	detail := "The store of counters cannot be reached now; try again."
	switch {
	case errors.Is(err, counter.ErrBusy):
		detail = "Too many changes are waiting, and this one was not made; send it again."
	case c.Request.Method != http.MethodGet && c.Request.Method != http.MethodHead:
		detail = "The store of counters cannot be reached now. The change was not made, or it is unknown whether it was; send it again with the same Idempotency-Key."
	}
	a.away(c, err, detail)
}

// away answers 503 with a detail.
func (a *API) away(c *gin.Context, err error, detail string) {
	var other *counter.FormatError
	if errors.As(err, &other) {
		detail = "No counters are served: " + other.Error() + "."
	}
	a.metrics.unavailable.Inc()
	a.cfg.Log.Debug().Err(err).Str("route", c.FullPath()).Str("request_id", httppolicy.RequestID(c.Writer.Header())).Msg("counters: the store did not carry out a request")
	httppolicy.Problem(c.Writer, http.StatusServiceUnavailable, detail, httppolicy.RetryAfter(comeBack))
}

// logKind logs, once for each rule, that a counter is of another kind than its rule.
func (a *API) logKind(rule *counter.Rule) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.differs[rule] {
		a.differs[rule] = true
		a.cfg.Log.Warn().Str("match", rule.Written()).Stringer("kind", rule.Kind).
			Msg("counters: a counter of this rule was made as another kind and keeps that; calls that only the rule's kind has are refused. Delete such counters, or give the rule its former kind. This is logged once for each rule")
	}
}

// read reads counters, distinct and each with a rule. With a lag it may answer with what
// this process knows.
func (a *API) read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	if lag > 0 && member == "" && a.cfg.Counters.Remote() {
		if current := a.live.current(keys, lag); current != nil {
			for _, key := range keys {
				a.live.hub.Touch(Topic(key))
			}
			return current, nil
		}
	}
	var readings []counter.Reading
	var err error
	if lag > 0 && member == "" && a.cfg.Counters.Remote() && len(keys) == 1 {
		readings, err = a.readShared(ctx, keys, lag)
	} else {
		readings, err = a.readStore(ctx, keys, member, lag)
	}
	if err != nil {
		if lag == 0 || member != "" {
			return nil, err
		}
		readings = counter.Away(keys)
	}
	for i := range readings {
		r := &readings[i]
		if r.Stale {
			known := false
			if r.Counter, known = a.live.stale(*r); !known {
				return nil, fmt.Errorf("counterapi: nothing is known of %q: %w", r.Key, cmp.Or(err, counter.ErrUnavailable))
			}
		} else {
			a.live.remember(r.Counter)
		}
		if r.Touched() && lag > 0 && member == "" && a.cfg.Counters.Remote() {
			a.live.hub.Touch(Topic(r.Key))
		}
		rule := a.cfg.Rules.Find(r.Key)
		if r.Kind != 0 && r.Kind != rule.Kind {
			a.logKind(rule)
		}
		r.Counter = r.Or(rule.Kind)
		if lag > 0 && !a.live.up() { // a reader should see what subscribers see
			r.Stale, r.Approx = true, true
		}
	}
	return readings, nil
}

// readShared reads one counter. Of each there is one call of the store at a time.
func (a *API) readShared(ctx context.Context, keys []string, lag time.Duration) ([]counter.Reading, error) {
	shared, err := a.reads.Read(ctx, keys[0], lag, patience, func(ctx context.Context) ([]counter.Reading, error) {
		return a.readStore(ctx, keys, "", lag)
	})
	return slices.Clone(shared), err
}

// readStore reads counters from the store. What may lag here may not lag there too, so with a lag the store only knows
// that it may answer with what it has while a part of it is away.
func (a *API) readStore(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	began := time.Now()
	readings, err := a.cfg.Counters.Read(ctx, keys, member, min(lag, noLag))
	if err == nil {
		a.live.confirm(readings, began)
	}

	return readings, err
}
