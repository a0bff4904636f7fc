package webhook

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/presence"
)

// Pages reads the counts of pages; a presence store does.
type Pages interface {
	presence.Counters
	presence.Lister
}

// Counters reads counters; a counter.Store does.
type Counters interface {
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error)
}

// Config tunes a Service. A zero field takes its default.
type Config struct {
	Hooks []*Hook  // required
	Keys  [][]byte // each signs every message; required
	Store Store    // required
	Pages Pages    // required with hooks of pages
	// Counters are those of this process; nil: it has none, and leaves hooks of counters to others.
	Counters   Counters
	Settle     time.Duration         // see the package; required
	Transport  http.RoundTripper     // to receivers; default one like http.DefaultTransport
	Registerer prometheus.Registerer // of the metrics; nil: none
	Log        zerolog.Logger
}

// Service is the webhooks of one process. Its methods may be called from any goroutine.
type Service struct {
	cfg     Config
	metrics metrics
	pages   *pages    // nil: no hook is told of pages
	changed *counters // nil: none is told of counters, or they are not here
	senders []*sender // one for each hook
	client  *http.Client
}

// New returns a Service that does nothing until Run.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, metrics: newMetrics(cfg.Registerer), client: newClient(cfg.Transport)}
	ofPages, ofCounters := []*Hook{}, []*Hook{}
	for _, h := range cfg.Hooks {
		if h.what == overCounter {
			ofCounters = append(ofCounters, h)
		} else {
			ofPages = append(ofPages, h)
		}
		s.senders = append(s.senders, &sender{service: s, hook: h, wake: make(chan struct{}, 1)})
	}
	if len(ofPages) > 0 {
		s.pages = newPages(s, ofPages)
	}
	if len(ofCounters) > 0 && cfg.Counters != nil {
		s.changed = newCounters(s, ofCounters)
	}
	return s
}

// Run owns the goroutines of the service until ctx ends.
func (s *Service) Run(ctx context.Context) {
	var wg sync.WaitGroup
	if s.pages != nil {
		wg.Go(func() { s.pages.run(ctx) })
	}
	if s.changed != nil {
		wg.Go(func() { s.changed.run(ctx) })
	}
	for _, o := range s.senders {
		wg.Go(func() { o.run(ctx) })
	}
	wg.Wait()
	s.client.CloseIdleConnections()
}

// Serve sets the buckets whose counts are heard from now on, and the outboxes that are sent.
func (s *Service) Serve(buckets []int) {
	for _, o := range s.senders {
		o.owned.Store(slices.Contains(buckets, o.hook.bucket))
		o.signal()
	}
	if s.pages != nil {
		s.pages.serve(buckets)
	}
}

// Received takes updates of the buckets that are served. It does not block.
func (s *Service) Received(updates []presence.Update) {
	if s.pages != nil {
		s.pages.heard(updates)
	}
}

// Lost has what was told compared with what is: updates may have been missed.
func (s *Service) Lost() {
	if s.pages != nil {
		s.pages.lost()
	}
}

// Changed takes what this process has made of counters, before it answers. It does not block.
func (s *Service) Changed(results []counter.Result) {
	if s.changed != nil {
		s.changed.note(results)
	}
}

// tell makes changes, and returns what is told then; only of the first ones with an error.
func (s *Service) tell(ctx context.Context, changes []Change) ([]string, error) {
	told, dropped, err := tell(ctx, s.cfg.Store, changes)
	for i, now := range told {
		if now == changes[i].Is && changes[i].Event != "" {
			s.metrics.events.WithLabelValues(changes[i].kind).Inc()
		}
	}
	if dropped > 0 {
		s.metrics.dropped.WithLabelValues(dropFull).Add(float64(dropped))
		s.cfg.Log.Warn().Int("events", dropped).Msg("an outbox of webhooks is full, and its oldest events were dropped")
	}
	for _, o := range s.senders {
		if slices.ContainsFunc(changes, func(c Change) bool { return c.Hook == o.hook.ID && c.Event != "" }) {
			o.signal()
		}
	}
	return told, err
}

// failing logs the first of failures in a row.
type failing struct{ is bool }

func (f *failing) note(ctx context.Context, log zerolog.Logger, err error) {
	if err != nil && !f.is && ctx.Err() == nil && !errors.Is(err, context.Canceled) {
		log.Warn().Err(err).Msg("webhooks wait for a store that cannot be reached")
	}
	f.is = err != nil
}

// sleep waits for d, until ctx ends or wake has something. It reports whether ctx goes on.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	case <-wake:
	}
	return ctx.Err() == nil
}

// newClient returns a client that follows no redirects.
func newClient(transport http.RoundTripper) *http.Client {
	if transport == nil {
		own := http.DefaultTransport.(*http.Transport).Clone()
		own.MaxIdleConnsPerHost = 1
		transport = own
	}
	return &http.Client{
		Transport:     transport,
		Timeout:       attemptTime,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
