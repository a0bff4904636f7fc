package regions

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/counterredis"
	"headcount/internal/outage"
)

const (
	looksAfter  = 10                     // times Config.Every, 2 s: between two looks at all buckets, and at how far the peer has them
	retryAfter  = 500 * time.Millisecond // at most, until a peer that did not answer is tried again
	unreadyFor  = 200 * time.Millisecond // until a bucket that is held still is tried again
	atOnce      = 16384                  // counters under way in one round, about
	linesAtOnce = 256                    // of one bucket; a page of a bucket that is told whole
	saysAfter   = time.Minute            // until the log says the same again
	tellers     = 4                      // large buckets that are told whole at once
	smallMost   = 64 << 10               // bytes of a bucket that is told together with others
)

var (
	errName   = errors.New("the peer has another name")
	errNobody = errors.New("no process of the peer has been there yet")
	errBusy   = errors.New("the peer holds a bucket still")
	errLarge  = errors.New("the bucket is large")
)

// link tells one peer what changes here. Its goroutines are run and tellAll, which Store owns.
type link struct {
	Peer
	s       *Store
	log     zerolog.Logger
	wake    chan struct{} // holds one: dirty has some
	asked   chan struct{} // holds one: whole has some
	said    string        // why the peer takes nothing, as the log has it; guarded by mu, as the next three are
	oddSaid bool          // the log has said that counters cannot be taken
	lost    time.Time     // when the log has said that memory is lost
	failing [2]bool       // the log has said that run, or tellAll, fails

	news, odd, all, failures prometheus.Counter
	lag                      prometheus.Gauge

	mu    sync.Mutex // guards all below
	dirty map[int]bool
	since time.Time                     // since when dirty or whole have something; zero: they have not
	at    map[int]counterredis.Position // how far the peer is; none: it has to be asked
	whole map[int]bool                  // buckets of which all is to be told, or is being told
}

func newLink(s *Store, p Peer, m *metrics) *link {
	return &link{
		Peer: p, s: s, log: s.cfg.Log.With().Str("peer", p.Name).Logger(), wake: make(chan struct{}, 1), asked: make(chan struct{}, 1),
		news: m.news.WithLabelValues(p.Name), odd: m.odd.WithLabelValues(p.Name), all: m.all.WithLabelValues(p.Name),
		failures: m.failures.WithLabelValues(p.Name), lag: m.lag.WithLabelValues(p.Name),
		dirty: map[int]bool{}, at: map[int]counterredis.Position{}, whole: map[int]bool{},
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (l *link) changed(bucket int) {
	l.mu.Lock()
	l.dirty[bucket] = true
	l.waits(time.Now())
	l.mu.Unlock()
	signal(l.wake)
}

// waits notes that something has been there to tell since then; zero: nobody knows since when. It is called with mu.
func (l *link) waits(since time.Time) {
	if since.IsZero() {
		since = time.Now()
	}
	if l.since.IsZero() || since.Before(l.since) {
		l.since = since
	}
}

const (
	failingRounds = iota
	failingWhole
)

// ended has the log say, once, that telling fails, and that it does not any more.
func (l *link) ended(what int, err error) {
	l.mu.Lock()
	was := l.failing[what]
	l.failing[what] = err != nil
	l.mu.Unlock()
	switch {
	case err != nil && !was:
		l.log.Warn().Err(err).Msg("changes of counters cannot be told to the peer; trying again until they can")
	case err != nil:
		l.log.Debug().Err(err).Msg("changes of counters could not be told to the peer; trying again")
	case was:
		l.log.Info().Msg("changes of counters are told to the peer again")
	}
}

// run tells the peer what changes until ctx ends. The first change after a pause goes at once.
func (l *link) run(ctx context.Context) {
	look := time.NewTicker(looksAfter * l.s.cfg.Every)
	defer look.Stop()
	for all := true; ; all = false {
		if !all {
			select {
			case <-ctx.Done():
				return
			case <-l.wake:
			case <-look.C:
				all = true
			}
		}
		start := time.Now()
		more, later, err := l.round(ctx, all)
		if ctx.Err() != nil {
			return
		}
		l.ended(failingRounds, err)
		rest := l.s.cfg.Every - time.Since(start)
		switch {
		case err != nil:
			l.failures.Inc()
			rest = outage.Jitter(retryAfter)
		case later:
			rest = unreadyFor
		case more:
			rest = 0
		}
		if rest > 0 && !outage.Sleep(ctx, rest) {
			return
		}
		if more || later || err != nil {
			signal(l.wake)
		}
	}
}

// take returns the buckets to look at in a round. With all that is every bucket of this process, and the peer is
// asked how far it has them. since is when the oldest change in them was made; zero: none is known.
func (l *link) take(all bool) (buckets []int, since time.Time) {
	owned := l.s.owned()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range owned {
		if (all || l.dirty[b]) && !l.whole[b] {
			buckets = append(buckets, b)
		}
		if all {
			delete(l.at, b)
		}
	}
	clear(l.dirty) // the rest is another process's, or is told whole and looked at after that
	since = l.since
	if len(l.whole) == 0 {
		l.since = time.Time{}
	}
	return buckets, since
}

// again has buckets looked at in the next round. They have been waiting since then.
func (l *link) again(buckets []int, since time.Time) {
	if len(buckets) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waits(since)
	for _, b := range buckets {
		l.dirty[b] = true
	}
}

// round tells the peer what has changed. more: another round has to follow at once. later: the peer could not take
// some of it now.
func (l *link) round(ctx context.Context, all bool) (more, later bool, err error) {
	buckets, since := l.take(all)
	defer l.gauge()
	if len(buckets) == 0 {
		return false, false, nil
	}
	left := buckets // what is not told in the end
	defer func() { l.again(left, since) }()
	at, err := l.positions(ctx, buckets)
	if err != nil {
		return false, false, err
	}
	batches, err := l.s.cfg.Local.Outgoing(ctx, buckets, at, linesAtOnce)
	if err != nil {
		return false, false, err
	}
	var tellings []counterredis.Telling
	var rest []int
	lines := 0
	for i, b := range batches {
		switch {
		case b.All:
			l.needsAll(b.Bucket, since)
		case b.To == b.From && len(b.Lines) == 0:
		case lines >= atOnce:
			rest, more = append(rest, b.Bucket), true
		default:
			lines += len(b.Lines)
			tellings = append(tellings, counterredis.Telling{Batch: batches[i], Mode: counterredis.TellLog})
		}
	}
	left = append([]int(nil), rest...)
	for i := range tellings {
		left = append(left, tellings[i].Bucket)
	}
	if len(tellings) == 0 {
		return more, false, nil
	}
	told, err := l.Remote.Tell(ctx, l.s.cfg.Region, l.Name, tellings)
	if err != nil {
		l.forget(left)
		return false, false, err
	}
	left = rest
	for i := range told {
		b := tellings[i].Bucket
		l.took(&told[i])
		switch {
		case told[i].Other != "" && told[i].Other != counterredis.NoRegion: // until the next look
			continue
		case !told[i].Merged:
			left, later = append(left, b), true
			continue
		case told[i].At != tellings[i].To:
			left, more = append(left, b), true // it is elsewhere: by another process, or its memory is another one
		case tellings[i].More:
			left, more = append(left, b), true
		}
		l.mu.Lock()
		l.at[b] = told[i].At
		l.mu.Unlock()
	}
	return more, later, nil
}

// positions is how far the peer has buckets. It is asked about those of which that is not known.
func (l *link) positions(ctx context.Context, buckets []int) ([]counterredis.Position, error) {
	var ask []int
	l.mu.Lock()
	for _, b := range buckets {
		if _, known := l.at[b]; !known {
			ask = append(ask, b)
		}
	}
	l.mu.Unlock()
	if len(ask) > 0 {
		got, err := l.Remote.Positions(ctx, l.s.cfg.Region, ask)
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		for i, b := range ask {
			l.at[b] = got[i]
		}
		l.mu.Unlock()
	}
	at := make([]counterredis.Position, len(buckets))
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, b := range buckets {
		at[i] = l.at[b]
	}
	return at, nil
}

// forget has the peer asked anew how far it has buckets.
func (l *link) forget(buckets []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range buckets {
		delete(l.at, b)
	}
}

// gauge shows how long the oldest change has been waiting.
func (l *link) gauge() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.dirty)+len(l.whole) == 0 {
		l.since = time.Time{}
	}
	lag := time.Duration(0)
	if !l.since.IsZero() {
		lag = time.Since(l.since)
	}
	l.lag.Set(lag.Seconds())
}

// took notes what became of a telling.
func (l *link) took(t *counterredis.Told) {
	l.news.Add(float64(t.News))
	l.odd.Add(float64(t.Odd))
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case t.Other == counterredis.NoRegion:
	case t.Other != l.said:
		if l.said = t.Other; t.Other != "" {
			l.log.Warn().Str("region", t.Other).Msg("counters are not shared with this peer: the region there has another name; correct --peer")
		} else {
			l.log.Info().Msg("counters are shared with this peer again")
		}
	}
	if t.Older && time.Since(l.lost) > saysAfter { // once for all buckets
		l.lost = time.Now()
		l.log.Warn().Msg("the Redis of this region has come back empty, or with an older memory than the peer has heard of: what counters had gained since, and no region had heard of, is lost")
	}
	if t.Odd > 0 && !l.oddSaid {
		l.oddSaid = true
		l.log.Warn().Int("counters", t.Odd).Msg("the peer cannot take some counters: rules give them another kind there, or their totals leave 64 bits; every region needs the same rules")
	}
}

// needsAll has tellAll tell the peer all of a bucket, which has been waiting since then.
func (l *link) needsAll(bucket int, since time.Time) {
	l.mu.Lock()
	l.waits(since)
	l.whole[bucket] = true
	l.mu.Unlock()
	signal(l.asked)
}

// tellAll tells the peer all of buckets whose logs do not reach back to where it is, until ctx ends. What changes in
// such a bucket meanwhile is told after that. Buckets with few counters go together, so that a long way to the peer is
// gone once for all of them.
func (l *link) tellAll(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	room := make(chan struct{}, tellers)
	under := map[int]bool{} // guarded by l.mu
	done := func(buckets ...int) {
		l.mu.Lock()
		for _, b := range buckets {
			delete(l.whole, b)
			delete(l.at, b)
			delete(under, b)
		}
		l.mu.Unlock()
		for _, b := range buckets {
			l.changed(b) // it is looked at again, also after a failure
		}
	}
	for {
		var next []int
		l.mu.Lock()
		for b := range l.whole {
			if !under[b] {
				next = append(next, b)
				under[b] = true
			}
		}
		l.mu.Unlock()
		if len(next) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-l.asked:
			}
			continue
		}
		large, err := l.tellSmall(ctx, next)
		l.failed(ctx, err)
		done(slices.DeleteFunc(next, func(b int) bool { return slices.Contains(large, b) })...)
		for _, b := range large {
			wg.Go(func() {
				select {
				case <-ctx.Done():
					return
				case room <- struct{}{}:
				}
				err := l.tellBucket(ctx, b)
				<-room
				l.failed(ctx, err)
				done(b)
			})
		}
	}
}

// failed waits after a failure, and notes it.
func (l *link) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if !errors.Is(err, errName) && !errors.Is(err, errNobody) && !errors.Is(err, errBusy) { // the log has the first two already, and a hold passes
		l.ended(failingWhole, err)
	}
	if err == nil {
		return
	}
	l.failures.Inc()
	rest := outage.Jitter(retryAfter)
	if errors.Is(err, errName) {
		rest = looksAfter * l.s.cfg.Every
	}
	outage.Sleep(ctx, rest)
}

// tellSmall tells all of those of buckets that have few counters, in one call, and returns the others.
func (l *link) tellSmall(ctx context.Context, buckets []int) (large []int, err error) {
	// What changes from here on is in the logs behind these positions.
	batches, err := l.s.cfg.Local.Outgoing(ctx, buckets, make([]counterredis.Position, len(buckets)), 1)
	if err != nil {
		return nil, err
	}
	var tellings []counterredis.Telling
	for i, b := range buckets {
		whole, bytes := counterredis.Batch{Bucket: b, To: batches[i].To}, 0
		err := l.s.cfg.Local.EachLine(ctx, b, linesAtOnce, func(lines []counterredis.Line) error {
			for _, line := range lines {
				bytes += line.Size()
			}
			if whole.Lines = append(whole.Lines, lines...); len(whole.Lines) > linesAtOnce || bytes > smallMost {
				return errLarge
			}
			return nil
		})
		switch {
		case errors.Is(err, errLarge):
			large = append(large, b)
		case err != nil:
			return nil, err
		default:
			word := rand.Text()
			tellings = append(tellings,
				counterredis.Telling{Batch: counterredis.Batch{Bucket: b, To: whole.To}, Mode: counterredis.TellBegin, Word: word},
				counterredis.Telling{Batch: whole, Mode: counterredis.TellEnd, Word: word})
		}
	}
	if len(tellings) == 0 {
		return large, nil
	}
	told, err := l.Remote.Tell(ctx, l.s.cfg.Region, l.Name, tellings)
	if err != nil {
		return large, err
	}
	for i := range told {
		if i%2 == 1 {
			l.all.Inc()
		}
		l.took(&told[i])
		err = cmp.Or(err, l.refused(&told[i]))
	}
	return large, err
}

// refused is why the peer has not taken a telling, or nil.
func (l *link) refused(t *counterredis.Told) error {
	switch {
	case t.Merged:
		return nil
	case t.Other == counterredis.NoRegion:
		return errNobody
	case t.Other != "":
		return fmt.Errorf("%w: %q", errName, t.Other)
	}
	return errBusy
}

// tellBucket tells all of a bucket.
func (l *link) tellBucket(ctx context.Context, b int) error {
	word := rand.Text()
	// What changes from here on is in the log behind this position.
	batches, err := l.s.cfg.Local.Outgoing(ctx, []int{b}, []counterredis.Position{{}}, 1)
	if err != nil {
		return err
	}
	to := batches[0].To
	tell := func(mode counterredis.Mode, lines []counterredis.Line) error {
		for {
			told, err := l.Remote.Tell(ctx, l.s.cfg.Region, l.Name, []counterredis.Telling{{
				Batch: counterredis.Batch{Bucket: b, To: to, Lines: lines}, Mode: mode, Word: word,
			}})
			if err != nil {
				return err
			}
			l.took(&told[0])
			if err := l.refused(&told[0]); !errors.Is(err, errBusy) {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(unreadyFor):
			}
		}
	}
	if err := tell(counterredis.TellBegin, nil); err != nil {
		return err
	}
	l.all.Inc()
	if err := l.s.cfg.Local.EachLine(ctx, b, linesAtOnce, func(lines []counterredis.Line) error { return tell(counterredis.TellAll, lines) }); err != nil {
		return err
	}
	return tell(counterredis.TellEnd, nil)
}
