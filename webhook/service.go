package webhook

import (
	"context"
	"errors"
	"iter"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/wake"
	"headcount/presence"
)

// Pages reads the counts of pages. A presence store implements it.
type Pages interface {
	presence.Counters
	presence.Lister
}

// Counters reads counters. A counter.Store implements it.
type Counters interface {
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error)
}

// Users knows who is present. A member of the cluster implements it.
type Users interface {
	// Present returns which of up to presence.MaxAsked users are on a page. It leaves out those whose owners do not
	// answer.
	Present(ctx context.Context, users []presence.User) map[presence.User]bool
	// Connected returns the users who are on a page by a connection to this process, with their qualified names. A user
	// with several connections may come several times.
	Connected() iter.Seq2[presence.User, string]
}

// Config tunes a Service. A zero field takes its default.
type Config struct {
	Hooks []*Hook  // required
	Keys  [][]byte // each signs every message; required
	Store Store    // required
	Pages Pages    // required with hooks of pages
	Users Users    // required with hooks of users
	// Counters are the counters that this process changes; nil: none, so hooks of counters are left to
	// other processes.
	Counters   Counters
	Settle     time.Duration         // how long a fall, an absence or a peak must last, see the package; required
	Transport  http.RoundTripper     // to receivers; default: like http.DefaultTransport
	Registerer prometheus.Registerer // of the metrics; nil: none
	Log        zerolog.Logger
}

// Service is the webhooks of one process. Its methods may be called from any goroutine.
type Service struct {
	cfg      Config
	metrics  metrics
	pages    *pages    // nil: no hook reports pages
	counters *counters // nil: no hook reports counters, or this process changes none
	users    *users    // nil: no hook reports users
	senders  []*sender // one for each hook
	client   *http.Client
}

// New returns a Service that does nothing until Run.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, metrics: newMetrics(cfg.Registerer), client: newClient(cfg.Transport)}

	var ofPages, ofCounters, ofUsers []*Hook
	for _, h := range cfg.Hooks {
		switch h.condition {
		case overCounter:
			ofCounters = append(ofCounters, h)
		case attendance:
			ofUsers = append(ofUsers, h)
		default:
			ofPages = append(ofPages, h)
		}
		s.senders = append(s.senders, &sender{service: s, hook: h, wake: make(chan struct{}, 1)})
	}

	if len(ofPages) > 0 {
		s.pages = newPages(s, ofPages)
	}
	// Counters are judged where they are changed, which not every role does.
	if len(ofCounters) > 0 && cfg.Counters != nil {
		s.counters = newCounters(s, ofCounters)
	}
	if len(ofUsers) > 0 {
		s.users = newUsers(s, ofUsers)
	}

	return s
}

// Run runs the goroutines of the service until ctx ends.
func (s *Service) Run(ctx context.Context) {
	var wg sync.WaitGroup
	if s.pages != nil {
		wg.Go(func() { s.pages.run(ctx) })
	}
	if s.counters != nil {
		wg.Go(func() { s.counters.run(ctx) })
	}
	if s.users != nil {
		wg.Go(func() { s.users.repeat(ctx, usersEvery, s.users.round) })
		// The first scan is late enough for clients to have come back after a restart, and scans are rare enough not to
		// put off a departure for ever.
		wg.Go(func() { s.users.repeat(ctx, max(scanEvery, 2*s.cfg.Settle), s.users.scan) })
	}
	for _, o := range s.senders {
		wg.Go(func() { o.run(ctx) })
	}

	wg.Wait()
	s.client.CloseIdleConnections()
}

// Serve sets the buckets whose counts are received from now on. The buckets also decide which outboxes this
// process sends.
func (s *Service) Serve(buckets []int) {
	for _, o := range s.senders {
		o.owned.Store(slices.Contains(buckets, o.hook.bucket))
		// A sender that owns nothing sleeps for long.
		wake.Signal(o.wake)
	}

	if s.pages != nil {
		s.pages.serve(buckets)
	}
}

// Received queues updates of the served buckets for the next round. It does not block.
func (s *Service) Received(updates []presence.Update) {
	if s.pages != nil {
		s.pages.receive(updates)
	}
}

// Lost makes the service compare all reported states with the present counts, because updates may have been
// missed.
func (s *Service) Lost() {
	if s.pages != nil {
		s.pages.lost()
	}
}

// Changed queues counters that this process has changed for the next round. The caller calls it before it
// answers the request. It does not block.
func (s *Service) Changed(results []counter.Result) {
	if s.counters != nil {
		s.counters.receive(results)
	}
}

// Arrived queues a user with this qualified name, whose arrival on a page this process has stored, for the next
// round. It does not block.
func (s *Service) Arrived(u presence.User, name string) {
	if s.users != nil {
		s.users.judgeLater(u, name, time.Time{})
	}
}

// Departed queues a user who is on no page any more, as this process decided. It does not block.
func (s *Service) Departed(u presence.User) {
	if s.users != nil {
		s.users.judgeLater(u, "", time.Now().Add(s.cfg.Settle))
	}
}

// errLate means that what changes were judged by is too old, see Service.isLate.
var errLate = errors.New("the process stood still, or the store is slow")

// leastLate is the least time after which something is late: twice that between two rounds that judge users.
const leastLate = 2 * usersEvery

// isLate reports whether something of the time at comes so late that it is judged anew: the process may have stood
// still meanwhile. Others need Settle to report a rise and a fall, after which the state is what it was at that time.
func (s *Service) isLate(at, now time.Time) bool {
	limit := max(s.cfg.Settle/2, leastLate)
	// The wall clock, too: the other one may stop while the machine sleeps.
	return now.Sub(at) > limit || now.Round(0).Sub(at.Round(0)) > limit
}

// report makes changes that were judged by what was known at the time seen, and returns the reported states after them.
// With an error it returns the states of the first changes only. Of changes that are late it makes none: the store
// would accept them even if others have reported a rise and a fall since.
func (s *Service) report(ctx context.Context, seen time.Time, changes []Change) ([]string, error) {
	if len(changes) == 0 {
		return nil, nil
	}
	if s.isLate(seen, time.Now()) {
		return nil, errLate
	}

	reported, dropped, err := report(ctx, s.cfg.Store, changes)

	for i, now := range reported {
		// Also one that was made before, by a call whose answer was lost.
		if now == changes[i].Is && changes[i].Event != "" {
			s.metrics.events.WithLabelValues(changes[i].kind).Inc()
		}
	}

	if dropped > 0 {
		s.metrics.dropped.WithLabelValues(dropFull).Add(float64(dropped))
		s.cfg.Log.Warn().Int("events", dropped).Msg("the outbox of a webhook is full; its oldest events were dropped")
	}

	// Also after an error: the store may have made some of the changes.
	for _, o := range s.senders {
		if slices.ContainsFunc(changes, func(c Change) bool { return c.Hook == o.hook.ID && c.Event != "" }) {
			wake.Signal(o.wake)
		}
	}

	return reported, err
}

// failing logs the first of several failures in a row.
type failing struct{ is bool }

func (f *failing) note(ctx context.Context, log zerolog.Logger, err error) {
	// The process itself was late.
	if errors.Is(err, errLate) {
		return
	}

	// The end of the process is no failure of the store.
	ends := ctx.Err() != nil || errors.Is(err, context.Canceled)
	if err != nil && !f.is && !ends {
		log.Warn().Err(err).Msg("the store of webhooks cannot be reached; retrying")
	}

	f.is = err != nil
}

// newClient returns a client that follows no redirects.
func newClient(transport http.RoundTripper) *http.Client {
	if transport == nil {
		own := http.DefaultTransport.(*http.Transport).Clone()
		// A sender sends one message at a time.
		own.MaxIdleConnsPerHost = 1
		transport = own
	}

	return &http.Client{
		Transport: transport,
		Timeout:   attemptTime,
		// A redirect would take events to an address that the operator has not chosen.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
