package replication

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const buckets = 4

var (
	all     = []int{0, 1, 2, 3}
	errLost = errors.New("lost on the way")
)

// place is a position: how far the peer has received a log.
type place struct{ log, cursor int }

// row is a key in a log: the value, and the place of its last change.
type row struct{ value, place int }

// source is a bucket of this region. Its log has each key once.
type source struct {
	log, end, trimmed int
	rows              map[string]row
}

func (s *source) set(key string, value int) {
	s.end++
	s.rows[key] = row{value, s.end}
}

// batch is the part of a log after a place, or the whole bucket if the log does not reach back to that place.
type batch struct {
	bucket   int
	from, to place
	whole    bool
	rows     map[string]row
	more     bool
}

func (s *source) after(bucket int, from place, limit int) batch {
	b := batch{bucket: bucket, from: from, to: place{s.log, s.end}, rows: map[string]row{}}
	if from.log != s.log || from.cursor < s.trimmed || from.cursor > s.end {
		b.whole, b.rows = true, maps.Clone(s.rows)
		return b
	}

	// Rows are sent in the order of their last changes, so that a position says which of them the peer has.
	keys := slices.SortedFunc(maps.Keys(s.rows), func(x, y string) int { return s.rows[x].place - s.rows[y].place })
	for _, key := range keys {
		if s.rows[key].place <= from.cursor {
			continue
		}

		if len(b.rows) == limit {
			b.more = true
			break
		}

		b.rows[key], b.to.cursor = s.rows[key], s.rows[key].place
	}

	if !b.more {
		b.to.cursor = s.end
	}

	return b
}

// sink is a bucket of the peer.
type sink struct {
	at     place
	values map[string]int
}

// merge applies a batch and returns the number of rows that had an effect.
func (s *sink) merge(b batch) (effects int) {
	if !b.whole && (b.from.log != s.at.log || b.from.cursor > s.at.cursor) {
		return 0 // earlier batches are missing
	}

	for key, r := range b.rows {
		if r.value > s.values[key] {
			s.values[key] = r.value
			effects++
		}
	}

	// Batches may arrive out of order, but a position never goes back.
	if b.whole && b.to.log >= s.at.log || b.to.log == s.at.log && b.to.cursor > s.at.cursor {
		s.at = b.to
	}

	return effects
}

func (s *sink) clone() sink { return sink{s.at, maps.Clone(s.values)} }

// world has a region, a peer and the network between them, and implements Protocol.
type world struct {
	mu      sync.Mutex
	random  *rand.Rand
	sources [buckets]source
	sinks   [buckets]sink
	backup  [buckets]sink
	owned   []int

	cut, bad, refused, away, unready bool
	delay                            time.Duration // each way
	atOnce                           int           // how many rows of a bucket a batch has
	late                             []batch       // copies of sent batches

	tally
}

// tally counts calls, the rows and whole buckets that arrived, and rows that had an effect.
type tally struct{ greets, positions, sends, rows, effects, wholes, failures int }

func newWorld(seed uint64) *world {
	w := &world{random: rand.New(rand.NewPCG(seed, 1)), owned: all, atOnce: 3}
	for b := range buckets {
		w.sources[b] = source{log: 1, rows: map[string]row{}}
		w.sinks[b] = sink{values: map[string]int{}}
		w.backup[b] = w.sinks[b].clone()
	}

	return w
}

// do calls change while the world is locked.
func (w *world) do(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

func (w *world) tallied() tally {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tally
}

// way is the network to the peer or back. The world is unlocked only while way waits.
func (w *world) way() error {
	if w.cut {
		return errLost
	}
	delay := w.delay
	lost := false
	if w.bad {
		delay = time.Duration(w.random.IntN(300)) * time.Millisecond
		lost = w.random.IntN(4) == 0
	}

	w.mu.Unlock()
	time.Sleep(delay)
	w.mu.Lock()

	if lost || w.cut {
		return errLost
	}

	return nil
}

func (w *world) Owned() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.owned
}

func (w *world) Greet(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.greets++
	if w.refused {
		return fmt.Errorf("greet: %w", ErrRefused)
	}

	return w.way()
}

func (w *world) Positions(_ context.Context, believed []At[place]) ([]place, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.positions++
	if err := w.way(); err != nil {
		return nil, err
	}

	found := make([]place, len(believed))
	for i, at := range believed {
		found[i] = w.sinks[at.Bucket].at
	}

	// Positions take longer than batches, so they may arrive outdated.
	_ = w.way()
	_ = w.way()

	return found, w.way()
}

func (w *world) Send(_ context.Context, from []At[place], limit int) ([]Result[place], error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.away {
		return nil, errLost
	}

	results := make([]Result[place], len(from))
	var batches []batch
	rows := 0

	for i, at := range from {
		b := w.sources[at.Bucket].after(at.Bucket, at.Position, w.atOnce)
		results[i] = Result[place]{at.Position, Unchanged}
		switch {
		case b.to == at.Position:
		case rows >= limit:
			results[i].Outcome = More
		default:
			results[i].Outcome = Sent
			batches = append(batches, b)
			rows += len(b.rows)
		}
	}

	if len(batches) == 0 {
		return results, nil
	}

	w.sends++
	if err := w.way(); err != nil {
		return nil, err
	}

	for _, b := range batches {
		i := slices.IndexFunc(from, func(at At[place]) bool { return at.Bucket == b.bucket })
		if w.unready {
			results[i].Outcome = Later
			continue
		}

		w.rows += len(b.rows)
		if b.whole {
			w.wholes++
		}

		if w.bad {
			w.late = append(w.late, b)
		}

		w.effects += w.sinks[b.bucket].merge(b)
		results[i].Position = w.sinks[b.bucket].at
		if b.more || results[i].Position != b.to {
			results[i].Outcome = More
		}
	}

	if err := w.way(); err != nil {
		return nil, err
	}

	return results, nil
}

func (w *world) Failed(error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
}

// differs returns a difference between the peer and this region, or "".
func (w *world) differs() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b := range buckets {
		for key, r := range w.sources[b].rows {
			if got := w.sinks[b].values[key]; got != r.value {
				return fmt.Sprintf("bucket %d: %q is %d there and %d here; it is at %v, and here is %v",
					b, key, got, r.value, w.sinks[b].at, w.sources[b])
			}
		}
	}

	return ""
}

// with runs a Link over a world in a bubble, until fn returns.
func with(t *testing.T, w *world, fn func(t *testing.T, l *Link[place])) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := New(w, Config{Every: 200 * time.Millisecond, CompareEvery: 2 * time.Second, MaxItems: 4096})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			l.Run(ctx)
		}()

		fn(t, l)

		cancel()
		<-done
	})
}

// TestThePeerHasEverythingInTheEnd plants faults of every kind: of the network, the peer, this region and the ownership
// of buckets. Within 5 s after the last of them the peer has everything, and then nothing more is sent.
func TestThePeerHasEverythingInTheEnd(t *testing.T) {
	seeds := uint64(400)
	if testing.Short() {
		seeds = 100
	}

	for seed := range seeds {
		w := newWorld(seed)
		value := 0

		with(t, w, func(t *testing.T, l *Link[place]) {
			step := func() (changed int) {
				w.mu.Lock()
				defer w.mu.Unlock()

				r := w.random
				b := r.IntN(buckets)
				s := &w.sources[b]
				switch r.IntN(24) {
				default:
					value++
					s.set(string(rune('a'+r.IntN(8))), value)
					if r.IntN(4) > 0 { // one of four notifications is lost
						return b
					}
				case 0:
					w.cut = !w.cut
				case 1:
					w.bad = !w.bad
				case 2:
					w.refused = !w.refused
				case 3:
					w.away = !w.away
				case 4:
					w.unready = !w.unready
				case 5: // a batch of long ago arrives once more
					if len(w.late) > 0 {
						b := w.late[r.IntN(len(w.late))]
						w.sinks[b.bucket].merge(b)
					}
				case 6: // the peer forgets everything
					w.sinks[b] = sink{values: map[string]int{}}
				case 7:
					w.backup[b] = w.sinks[b].clone()
				case 8: // the peer restarts from an older backup
					w.sinks[b] = w.backup[b].clone()
				case 9: // the log begins anew
					s.log++
					s.trimmed = s.end
				case 10: // the log loses its oldest entries
					s.trimmed = s.end - r.IntN(s.end+1)
				case 11:
					w.owned = all[:r.IntN(buckets+1)]
				case 12: // another process sends the bucket
					w.sinks[b].merge(s.after(b, w.sinks[b].at, 100))
				}

				return -1
			}

			// Changes and faults come at random moments.
			for range 150 {
				if b := step(); b >= 0 {
					l.Changed(b)
				}

				w.mu.Lock()
				pause := time.Duration(w.random.IntN(400)) * time.Millisecond
				w.mu.Unlock()
				time.Sleep(pause)
			}

			// All faults end.
			w.do(func() {
				w.cut, w.bad = false, false
				w.refused, w.away, w.unready = false, false, false
				w.owned = all
			})
			time.Sleep(5 * time.Second)
			if d := w.differs(); d != "" {
				t.Fatalf("seed %d: %s", seed, d)
			}

			if lag := l.Lag(); lag != 0 {
				t.Fatalf("seed %d: the lag is %s", seed, lag)
			}

			before := w.tallied().sends
			time.Sleep(10 * time.Second)
			if after := w.tallied().sends; after != before {
				t.Fatalf("seed %d: %d batches were sent without a change", seed, after-before)
			}
		})

		if t.Failed() {
			return
		}
	}
}

// Without faults every change takes effect once and no row is sent twice, even if reading the peer's positions takes
// long.
func TestNothingIsSentTwice(t *testing.T) {
	for _, delay := range []time.Duration{0, 30 * time.Millisecond, 170 * time.Millisecond} {
		w := newWorld(1)
		w.delay, w.atOnce = delay, 100

		with(t, w, func(t *testing.T, l *Link[place]) {
			time.Sleep(3 * time.Second)
			w.do(func() { w.wholes = 0 }) // the empty peer had no positions, so each bucket was sent as a whole

			// The pauses make changes fall into all phases of a round.
			for n := range 1000 {
				w.do(func() { w.sources[n%buckets].set(fmt.Sprint(n), n+1) })
				l.Changed(n % buckets)
				time.Sleep(time.Duration(1+n*n%300) * time.Millisecond)
			}

			time.Sleep(2 * time.Second)
			if is := w.tallied(); is.effects != 1000 || is.rows != 1000 || is.wholes != 0 || is.failures != 0 {
				t.Errorf("with a delay of %s, 1000 changes cause %+v", delay, is)
			}
		})
	}
}

// If a round leaves changes behind, the next round follows at once.
func TestMoreThanARoundHas(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, l *Link[place]) {
		time.Sleep(3 * time.Second)

		w.do(func() {
			for n := range 1000 {
				w.sources[n%buckets].set(fmt.Sprint(n), n+1)
			}
		})

		// Only one bucket changes: a second one that changes during the first round would wait for the next.
		l.Changed(0)
		time.Sleep(10 * time.Millisecond)
		if n := w.tallied().effects; n != 250 {
			t.Errorf("%d of 250 changes arrived", n)
		}
	})
}

func TestASingleChangeIsSentAtOnceAndManyTogether(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, l *Link[place]) {
		time.Sleep(10 * time.Second)

		w.do(func() { w.sources[0].set("a", 1) })
		l.Changed(0)
		synctest.Wait()
		if d := w.differs(); d != "" {
			t.Error(d)
		}

		time.Sleep(time.Second)

		// A thousand changes in a second are sent in a few rounds.
		before := w.tallied().sends
		for n := range 1000 {
			w.do(func() { w.sources[0].set("a", n+2) })
			l.Changed(0)
			time.Sleep(time.Millisecond)
		}

		if n := w.tallied().sends - before; n < 4 || n > 6 {
			t.Errorf("%d rounds in a second", n)
		}
	})
}

func TestAPeerThatForgotIsSentTheWholeBucket(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, _ *Link[place]) {
		w.do(func() {
			for n := range 10 {
				w.sources[1].set(fmt.Sprint(n), n+1)
			}
		})
		time.Sleep(3 * time.Second)

		w.do(func() {
			w.sinks[1] = sink{values: map[string]int{}}
			w.wholes = 0
		})

		time.Sleep(2100 * time.Millisecond)
		if d := w.differs(); d != "" || w.tallied().wholes != 1 {
			t.Errorf("%d buckets were sent as a whole, want 1: %s", w.tallied().wholes, d)
		}

		// A peer that comes back after an outage may have lost data, so its positions are read at once.
		for n := range 8 {
			w.do(func() { w.cut = true })
			time.Sleep(2*time.Second + time.Duration(n)*300*time.Millisecond)
			w.do(func() {
				w.sinks[1] = sink{values: map[string]int{}}
				w.cut = false
			})

			time.Sleep(retryAfter)
			if d := w.differs(); d != "" {
				t.Errorf("half a second after its return: %s", d)
			}
		}
	})
}

func TestRoundsShrinkAfterFailures(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, l *Link[place]) {
		time.Sleep(3 * time.Second)

		l.mu.Lock()
		if l.limit <= 1024 {
			t.Errorf("after a success the limit is %d", l.limit)
		}
		l.mu.Unlock()

		// A round that is too large may be the reason for a failure.
		w.do(func() { w.away = true })
		l.Changed(0)
		time.Sleep(time.Minute)

		l.mu.Lock()
		if l.limit != minItems {
			t.Errorf("after failures the limit is %d", l.limit)
		}
		l.mu.Unlock()
	})
}

func TestARefusedPeerIsSentNothing(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, l *Link[place]) {
		time.Sleep(3 * time.Second)

		w.do(func() { w.refused = true })
		time.Sleep(2 * time.Second)
		before := w.tallied()

		w.do(func() { w.sources[0].set("a", 1) })
		l.Changed(0)
		time.Sleep(2 * time.Minute)

		is := w.tallied()
		if is.sends != before.sends || is.positions != before.positions {
			t.Errorf("two minutes of refused greetings cause %+v after %+v, want greetings alone", is, before)
		}
		if n := is.greets - before.greets; n < 240 || n > 500 {
			t.Errorf("the peer is greeted %d times in two minutes, want 240 to 500 times", n)
		}

		w.do(func() { w.refused = false })
		time.Sleep(600 * time.Millisecond)
		if d := w.differs(); d != "" {
			t.Error(d)
		}
	})
}

// A process without buckets does not even greet. When it gets a bucket, and Look is called, it sends the bucket at
// once.
func TestBucketsOfOthersAreNotSent(t *testing.T) {
	w := newWorld(1)
	w.owned = nil
	with(t, w, func(t *testing.T, l *Link[place]) {
		w.do(func() {
			for b := range buckets {
				w.sources[b].set("a", 1)
			}
		})

		l.Changed(0)
		time.Sleep(time.Minute)
		if is := w.tallied(); is != (tally{}) || l.Lag() != 0 {
			t.Errorf("without buckets the calls are %+v, and the lag is %s; want none", is, l.Lag())
		}

		// The last greeting may have been part of a comparison of positions, or not.
		for n, b := range []int{2, 0, 1} {
			w.do(func() { w.owned = all[b : b+1] })
			l.Look()
			time.Sleep(300 * time.Millisecond)
			if is := w.tallied(); is.rows != n+1 {
				t.Errorf("%d rows were sent, of %d buckets", is.rows, n+1)
			}
		}

		if w.differs() == "" {
			t.Error("the bucket of another process was sent")
		}
	})
}

// The lag is the age of the oldest change that the peer lacks, however steadily changes come.
func TestLag(t *testing.T) {
	w := newWorld(1)
	with(t, w, func(t *testing.T, l *Link[place]) {
		shows := func(want time.Duration) {
			t.Helper()
			synctest.Wait()
			if lag := l.Lag(); lag != want {
				t.Errorf("the lag is %s, want %s", lag, want)
			}
		}

		change := func(b int) {
			w.do(func() { w.sources[b].set("a", w.sources[b].end+1) })
			l.Changed(b)
		}

		time.Sleep(3 * time.Second)

		// While the peer keeps up, there is no lag.
		for range 5 {
			change(1)
			shows(0)
			time.Sleep(time.Second)
			shows(0)
		}

		// While the peer accepts nothing, the lag grows.
		w.do(func() { w.unready = true })
		change(1)
		time.Sleep(3 * time.Second)
		change(1)
		change(2)
		time.Sleep(time.Second)
		shows(4 * time.Second)

		w.do(func() { w.unready, w.cut = false, true })
		time.Sleep(4 * time.Second)
		shows(8 * time.Second)

		// Everything has arrived.
		w.do(func() { w.cut = false })
		time.Sleep(time.Second)
		shows(0)

		// The age of a change without a notification counts from its discovery.
		w.do(func() { w.unready = true })
		w.do(func() { w.sources[3].set("a", 9) })

		time.Sleep(2 * time.Second)
		if lag := l.Lag(); lag == 0 || lag > 2*time.Second {
			t.Errorf("the lag is %s", lag)
		}
	})
}
