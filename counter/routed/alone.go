package routed

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/rows/rowspg"
)

// AloneConfig tunes an Alone. A zero field takes its default.
type AloneConfig struct {
	URL   string         // postgres://…; required
	Rules *counter.Rules // required
	// TendEvery is how often this process checks whether another one has taken over, default 1s.
	TendEvery time.Duration
	OnState   counter.States // called with up if changes can be made; optional
	Log       zerolog.Logger
}

// Alone is a counter.Store in PostgreSQL without Redis, for a single process. If a second process starts, it takes
// over, and the first one logs that and makes no further changes.
type Alone struct {
	*Store
	cfg   AloneConfig
	rows  *rowspg.Store
	owned *call.Store
	exact *exactpg.Store

	up      atomic.Bool   // PostgreSQL is available
	news    chan struct{} // has capacity 1: up has changed
	claimed atomic.Bool   // this process has claimed everything
	taken   atomic.Bool   // another process has claimed everything since

	stop   context.CancelFunc
	wg     sync.WaitGroup // waits for tend
	closed sync.Once
}

// verifyEvery is how often the owner checks that it still owns everything, and that PostgreSQL has lost nothing, as in
// a failover to a lagging replica. It checks a fifth at a time. Changes notice both at once.
const verifyEvery = 10 * time.Second

// claimWithin limits one claim.
const claimWithin = 3 * time.Second

var errTaken = errors.New("another process has taken over the counters in PostgreSQL; this process " +
	"makes no further changes")

// OpenAlone returns a store in the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or
// the database cannot be used. A database that does not answer is no error: calls then fail with
// counter.ErrUnavailable.
func OpenAlone(ctx context.Context, cfg AloneConfig) (*Alone, error) {
	cfg.TendEvery = cmp.Or(cfg.TendEvery, time.Second)

	s := &Alone{cfg: cfg, news: make(chan struct{}, 1)}
	var err error
	s.rows, err = UseAlone.open(ctx, cfg.URL, s.onPostgres, cfg.Log)
	if err != nil {
		return nil, err
	}

	s.exact = exactpg.New(exactpg.Config{DB: s.rows.DB(), Log: cfg.Log})
	s.owned = call.NewSole(Rows(s.rows, s.exact), cfg.Rules, owner.Config{
		Name:         rand.Text(),
		VerifyEvery:  verifyEvery,
		ExactOutside: true,
	}, s.Cause)
	s.Store = New(Config{Owned: s.owned, Exact: s.exact, Rules: cfg.Rules})

	// If PostgreSQL answers, changes can be made from the start.
	s.claim(ctx)
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.tend(run) })

	return s, nil
}

// Close implements counter.Store.
func (s *Alone) Close() error {
	s.closed.Do(func() {
		// First the goroutine that claims, then what it uses.
		s.stop()
		s.wg.Wait()

		_ = s.owned.Close() // always nil
		s.exact.Close()
		s.rows.Close()
	})

	return nil
}

// Cause returns why counters cannot be changed now, or nil.
func (s *Alone) Cause() error {
	if err := s.Ready(); err != nil {
		return err
	}

	return s.rows.Cause()
}

// Ready returns why this process does not serve counters, or nil. It stays nil while PostgreSQL is unavailable.
func (s *Alone) Ready() error {
	if s.taken.Load() {
		return errTaken
	}

	return nil
}

// Apply implements counter.Writer.
func (s *Alone) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	err := s.Ready()
	if err == nil {
		return s.Store.Apply(ctx, ops)
	}

	results := make([]counter.Result, len(ops))
	for i := range results {
		// The reason tells an operator more than an outage would.
		results[i].Err = fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}

	return results
}

// onPostgres records whether PostgreSQL is available.
func (s *Alone) onPostgres(up bool) {
	s.up.Store(up)
	select {
	case s.news <- struct{}{}:
	default: // tend checks anyway
	}
}

// tend claims everything once PostgreSQL answers, and then checks whether another process has claimed it, until ctx
// ends.
func (s *Alone) tend(ctx context.Context) {
	ticker := time.NewTicker(s.cfg.TendEvery)
	defer ticker.Stop()

	var before bool
	for first := true; ; first = false {
		// OpenAlone could not claim anything if PostgreSQL was unavailable.
		if s.up.Load() && !s.claimed.Load() {
			s.claim(ctx)
		}
		if s.owns() {
			s.lookForOthers(ctx)
		}

		now := s.up.Load() && s.owns()
		isNews := first || now != before
		if isNews && s.cfg.OnState != nil {
			s.cfg.OnState.StoreState(now)
		}
		before = now

		select {
		case <-ctx.Done():
			return
		case <-s.news:
		case <-ticker.C:
		}
	}
}

// owns reports whether this process owns everything, as far as it knows.
func (s *Alone) owns() bool { return s.claimed.Load() && !s.taken.Load() }

// claim claims everything from whichever process owns it. It succeeds only once: if this process claimed again, two
// processes would take the counters from each other in turns.
func (s *Alone) claim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, claimWithin)
	defer cancel()

	err := s.owned.Own(ctx)
	if err != nil {
		s.cfg.Log.Debug().Err(err).Msg("counters: claiming the partitions in PostgreSQL failed; retrying")
		return
	}

	s.claimed.Store(true)
}

// lookForOthers checks whether another process has claimed anything since.
func (s *Alone) lookForOthers(ctx context.Context) {
	// At its next change or verification, an owner finds out that it was replaced, and gives the partition up.
	if s.owned.Owns() {
		return
	}

	// Before the partitions are given up, so that calls which lose their owner are told why.
	s.taken.Store(true)
	s.cfg.Log.Warn().Err(errTaken).
		Str("mend", "end one of the two processes; several need --redis").Msg("counters: changes are refused")
	// PostgreSQL would refuse whatever this process still has to write.
	_ = s.owned.Disown(ctx)
}
