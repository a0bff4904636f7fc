//go:build !portable

package fanout

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cespare/xxhash/v2"
	"pgregory.net/rapid"

	"headcount/gateway/socket"
	"headcount/presence"
)

// loneShard returns a shard whose passes the test makes.
func loneShard(interval time.Duration) *shard {
	h := New(Config{Numbers: plain{}, Shards: 1, Interval: interval, Budget: 1e6, Ping: time.Minute, Pong: time.Minute})
	h.Deliver(testKind, plain{})
	return h.shards[0]
}

const events Form = 1 << 7

var testKind = presence.KindOf("test")

func topicOf(key string) presence.Topic { return presence.Topic{Kind: testKind, Key: key} }

// plain encodes counts as JSON. The form says how many digits are kept, or that the frames are events.
type plain struct{}

func (plain) Encode(b []byte, u presence.Update, form Form) (encoded []byte, shown uint64) {
	n, _ := strconv.ParseInt(u.Value, 10, 64)
	stale := strconv.FormatBool(u.Stale)

	// The exact form shows every change, so shown stays 0.
	if form != 0 && form != events {
		n = rounded(n, form)
		shown = xxhash.Sum64String(strconv.FormatInt(n, 10) + stale)
	}

	b = append(b, `{"Page":"`...)
	b = append(b, u.Key...)
	b = append(b, `","count":`...)
	b = strconv.AppendInt(b, n, 10)
	b = append(b, `,"Version":"`...)
	b = append(b, u.Version.String()...)
	b = append(b, `","Stale":`...)
	b = append(b, stale...)

	return append(b, '}'), shown
}

func (plain) AppendNumber(b []byte, n int64) []byte {
	return append(strconv.AppendInt(append(b, `{"Page":"own","count":`...), n, 10), '}')
}

// rounded returns n with the given number of significant digits; halves are rounded up.
func rounded(n int64, digits Form) int64 {
	unit := int64(1)
	for i := len(strconv.FormatInt(n, 10)); i > int(digits); i-- {
		unit *= 10
	}

	return (n + unit/2) / unit * unit
}

// watcher is a client of a loneShard. Its socket keeps the writes apart, so that they can be counted.
type watcher struct {
	*client
	fd int
}

// client is a Subscriber over a socket that a test reads.
type client struct {
	Subscriber
	wire socket.Wire
}

func (c *client) Busy() bool { return c.wire.Busy() }

func (c *client) Try(p []byte) error {
	err := c.wire.Try(p)
	if errors.Is(err, socket.ErrBusy) {
		return ErrBusy
	}
	return err
}

func (c *client) Close() error { return c.wire.Close() }
func (c *client) Ping() bool   { return c.Try([]byte("ping")) == nil }
func (c *client) Expire()      { _ = c.Try([]byte("expired")) }

// The methods below implement socket.Owner. Nothing is read here.
func (c *client) WriteTimeout() time.Duration             { return time.Minute }
func (c *client) Slow()                                   {}
func (c *client) Spawn(f func())                          { go f() }
func (c *client) Look(*socket.Input) (more bool, _ error) { return false, nil }
func (c *client) Freed(bool)                              { c.Free() }
func (c *client) Ended()                                  {}

func (s *shard) watcher(t testing.TB) watcher {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}

	// FileConn duplicates the descriptor, so the file has to be closed.
	file := os.NewFile(uintptr(fds[0]), "server")
	nc, err := net.FileConn(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}

	c := &client{}
	c.wire.Use(nc, c)
	s.hub.Prepare(&c.Subscriber, c, 0)
	c.Enter()
	return watcher{c, fds[1]}
}

// watch subscribes to topics with these keys.
func (w watcher) watch(form Form, keys ...string) {
	var topics []presence.Topic
	for _, key := range keys {
		topics = append(topics, topicOf(key))
	}

	w.Subscribe(topics, form)
}

// close ends both sides of the socket.
func (w watcher) close() {
	_ = w.wire.Close()
	_ = syscall.Close(w.fd)
}

// take returns what was written since the last call, one element for each write.
func (w watcher) take(t testing.TB) (writes []string) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		n, err := syscall.Read(w.fd, buf)
		// There are no more writes, or the other side is closed.
		if err == syscall.EAGAIN || err == nil && n == 0 {
			return writes
		}

		if err != nil {
			t.Fatal(err)
		}

		writes = append(writes, string(buf[:n]))
	}
}

// expect takes what was written, which must be these counts.
func (w watcher) expect(t testing.TB, want ...int64) {
	t.Helper()
	got := counts(t, w.take(t)...)
	if !slices.EqualFunc(got, want, func(c shownCount, n int64) bool { return c.Count == n }) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// counts returns the counts in the text of frames or events, in order.
func counts(t testing.TB, texts ...string) (all []shownCount) {
	t.Helper()
	for _, text := range texts {
		for rest := text; ; {
			i := strings.IndexByte(rest, '{')
			if i < 0 {
				break
			}

			var c shownCount
			d := json.NewDecoder(strings.NewReader(rest[i:]))
			if err := d.Decode(&c); err != nil {
				t.Fatalf("%q: %v", text, err)
			}

			all = append(all, c)
			rest = rest[i+int(d.InputOffset()):]
		}
	}

	return all
}

type shownCount struct {
	Page    string
	Count   int64
	Version string
	Stale   bool
}

func countOf(key string, n int64, sequence uint64) presence.Update {
	return presence.Update{
		Topic: topicOf(key), Version: presence.Version{Incarnation: 1, Sequence: sequence},
		Value: strconv.FormatInt(n, 10),
	}
}

// All changed pages of one connection are sent in one write.
func TestManyPagesInOneWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		var pages []string
		for i := range 30 {
			pages = append(pages, "page "+strconv.Itoa(i))
		}
		w.watch(0, pages...)

		for round := range uint64(3) {
			// Fewer pages in each round, so that a write with all pages of the client, changed or not, would show.
			changed := pages[:30-10*round]
			for _, page := range changed {
				s.update(countOf(page, 7, round+1))
			}

			time.Sleep(30 * time.Millisecond) // longer than any interval here
			s.deliver()
			writes := w.take(t)
			if len(writes) != 1 {
				t.Fatalf("round %d: %d writes, want one", round, len(writes))
			}

			if got := counts(t, writes...); len(got) != len(changed) {
				t.Fatalf("round %d: %d counts, want %d", round, len(got), len(changed))
			}
		}
	})
}

// runningShard returns a shard that runs until the test ends, and a watcher who is new on page p.
func runningShard(t *testing.T, interval time.Duration) (*shard, watcher) {
	s := loneShard(interval)
	w := s.watcher(t)
	t.Cleanup(w.close)
	w.watch(0, "p")

	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	go s.run(ctx)

	return s, w
}

// When people come one by one, new clients see each of them at once, too.
func TestAChangeThatComesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 250 * time.Millisecond
		s, w := runningShard(t, interval)

		for n := range int64(5) {
			time.Sleep(2 * interval)
			s.update(countOf("p", n+1, uint64(n+1)))
			time.Sleep(s.quantum)
			if got := counts(t, w.take(t)...); len(got) != 1 || got[0].Count != n+1 {
				t.Errorf("just after change %d the client got %v, want the count %d", n+1, got, n+1)
			}
		}
	})
}

// While a page fills, a new client gets half as many of its counts, and the last one as early as everybody.
func TestAPageThatFills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 250 * time.Millisecond
		s, w := runningShard(t, interval)

		last := int64(0)
		for _, want := range []int{10, 20} { // counts in 5 s: for a new client, and for an older one
			for range 500 {
				last++
				s.update(countOf("p", last, uint64(last)))
				time.Sleep(10 * time.Millisecond)
			}

			time.Sleep(interval + s.quantum)
			// A new client that missed the end of the crowd would show a number that nobody corrects.
			got := counts(t, w.take(t)...)
			if n := len(got); n < want*9/10 || n > want*11/10+2 {
				t.Errorf("%d counts in 5 s, want about %d", n, want)
			}
			if end := got[len(got)-1]; end.Count != last {
				t.Errorf("an interval later the last count is %d, want %d", end.Count, last)
			}
		}
	})
}

// A client gets a count only if it differs in the precision that the client asked for.
func TestPrecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 100 * time.Millisecond

		s := loneShard(interval)
		exact, rough := s.watcher(t), s.watcher(t)
		defer exact.close()
		defer rough.close()

		sequence := uint64(0)
		step := func(users int64, stale bool) {
			sequence++
			c := countOf("p", users, sequence)
			c.Stale = stale
			s.update(c)
			time.Sleep(2 * interval)
			s.deliver()
		}

		watch := func(w watcher, precision Form) {
			t.Helper()
			time.Sleep(interval) // otherwise the answer waits
			w.watch(precision, "p")
			s.deliver()
		}

		watch(exact, 0)
		watch(rough, 2)
		step(1234, false)
		exact.expect(t, 1234)
		rough.expect(t, 1200)

		step(1249, false)
		exact.expect(t, 1249)
		rough.expect(t)

		// Half of the last digit shown is where the rounded number changes.
		step(1250, false)
		exact.expect(t, 1250)
		rough.expect(t, 1300)

		step(1251, true) // the mark changes, though the rounded number does not
		exact.expect(t, 1251)
		rough.expect(t, 1300)
		step(1252, false)
		exact.expect(t, 1252)
		rough.expect(t, 1300)

		// Between two deliveries the count changed and changed back, so nothing is sent.
		s.update(countOf("p", 90, 100))
		s.update(countOf("p", 1260, 101))
		sequence = 101
		time.Sleep(2 * interval)
		s.deliver()
		exact.expect(t, 1260)
		rough.expect(t)

		// A repeated subscribe is answered at once, in the precision of the last one.
		watch(rough, 2)
		rough.expect(t, 1300)
		watch(rough, 3)
		rough.expect(t, 1260)

		step(1261, false)
		rough.expect(t)

		watch(rough, 0)
		rough.expect(t, 1261)
		step(1262, false)
		rough.expect(t, 1262)

		if forms := len(s.topics[topicOf("p")].texts); forms != 3 {
			t.Errorf("%d forms of one count, want exact, 2 and 3 digits", forms)
		}
	})
}

// A join keeps the precision of a subscription, and its first count is sent even if its number is known already.
func TestPrecisionOfJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		w.watch(1, "p")
		s.update(countOf("p", 11, 1))
		s.deliver()

		w.Withhold(topicOf("p"))
		s.update(countOf("p", 12, 2))
		w.Ready(topicOf("p"))
		time.Sleep(20 * time.Millisecond)
		s.deliver()

		// A client that waits for its join needs the answer, although it shows the same 10 as before.
		got := counts(t, w.take(t)...)
		if len(got) != 2 || got[0].Count != 10 || got[1].Count != 10 || got[1].Version != "1-2" {
			t.Fatalf("got %v, want 10 twice", got)
		}
	})
}

// Whatever changes, and whenever, in the end subscribers of all precisions have the newest number, and none of them
// gets the same number twice in a row.
func TestPrecisionProperties(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const interval = 10 * time.Millisecond
		s := loneShard(interval)
		watchers := make([]watcher, 4)
		last := make([]shownCount, len(watchers))
		for i := range watchers {
			watchers[i] = s.watcher(t)
			defer watchers[i].close()
			watchers[i].watch(Form(i), "p")
		}

		look := func() {
			s.deliver()
			for i, w := range watchers {
				for _, c := range counts(t, w.take(t)...) {
					// The exact form shows every version, so only the others may not repeat a number.
					if i > 0 && last[i].Page != "" && c.Count == last[i].Count && c.Stale == last[i].Stale {
						rt.Fatalf("precision %d: told %+v after %+v", i, c, last[i])
					}
					last[i] = c
				}
			}
		}

		pass := func(d time.Duration) { s.start = s.start.Add(-d) } // moves the shard's clock
		var newest presence.Update
		steps := rapid.SliceOfN(rapid.IntRange(0, 12_000), 1, 60).Draw(rt, "steps")
		for i, n := range steps {
			newest = countOf("p", int64(n/4), uint64(i+1))
			newest.Stale = n%7 == 0
			s.update(newest)

			if n%3 == 0 {
				look()
			}
			pass(time.Duration(n%4) * interval / 2)
		}

		// In the end there is time for all deliveries.
		for range 3 {
			pass(2 * interval)
			look()
		}

		for i := range watchers {
			want := int64(steps[len(steps)-1] / 4)
			if i > 0 {
				want = rounded(want, Form(i))
			}

			if last[i].Count != want || last[i].Stale != newest.Stale {
				rt.Fatalf("precision %d: has %+v, want %d of %+v", i, last[i], want, newest)
			}
		}
	})
}

// Reform changes the form from the next update on, or at once if asked for.
func TestReform(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		s.update(countOf("p", 123, 1))
		w.watch(0, "p")
		s.update(countOf("p", 123, 1))

		take := func(want ...int64) {
			t.Helper()
			time.Sleep(20 * time.Millisecond)
			s.deliver()
			got := counts(t, w.take(t)...)
			if len(got) != len(want) || len(want) == 1 && got[0].Count != want[0] {
				t.Errorf("got %v, want %v", got, want)
			}
		}

		take(123)
		w.Reform(topicOf("p"), 1, false)
		take()

		s.update(countOf("p", 456, 2))
		take(500)

		w.Reform(topicOf("p"), 0, true)
		take(456)

		w.Reform(topicOf("p"), 0, true) // no change: the topic has that form
		w.Reform(topicOf("q"), 1, true) // no effect: the client has no such topic
		take()
	})
}

// A count is encoded once for all subscribers of one form, and a delivery allocates nothing.
func TestDeliveriesAllocateNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(time.Millisecond)
		const each = 50

		var watchers []watcher
		for range each {
			for kind := range 3 {
				w := s.watcher(t)
				defer w.close()
				w.watch([]Form{0, 1, events}[kind], "p")
				watchers = append(watchers, w)
			}
		}

		buf := make([]byte, 4096)
		sequence, delivered := uint64(0), 0

		// AllocsPerRun does not count its first run, which allocates what later ones reuse.
		allocs := testing.AllocsPerRun(20, func() {
			sequence++
			s.update(countOf("p", int64(sequence%9+1), sequence))
			time.Sleep(3 * time.Millisecond)
			s.deliver()
			for _, w := range watchers {
				if n, err := syscall.Read(w.fd, buf); err == nil && bytes.Contains(buf[:n], []byte(`"count":`)) {
					delivered++
				}
			}
		})

		// Without this a shard that delivered nothing would pass.
		if delivered < 20*3*each {
			t.Fatalf("%d deliveries, want %d", delivered, 20*3*each)
		}
		if allocs > each/2 { // what encoding three forms of the count may allocate
			t.Errorf("%.0f allocations for %d deliveries, want at most %d", allocs, 3*each, each/2)
		}
	})
}

// A sweep that only looks when something is due does the same as one that looks at every connection each time, also
// where pings are more frequent than clients have to answer them.
func TestSweepLooksWhenThereIsSomethingToDo(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := loneShard(10 * time.Millisecond)
		s.live = rapid.SampledFrom([]liveness{
			{ping: 15 * time.Second, pong: 5 * time.Second},
			{ping: time.Second, pong: 5 * time.Second},
		}).Draw(rt, "liveness")

		type model struct {
			watcher
			heard, pinged, expires time.Duration
			over                   bool
		}
		all := make([]*model, 5)
		for i := range all {
			all[i] = &model{watcher: s.watcher(t)}
			defer all[i].close()
			if rapid.Bool().Draw(rt, "has a token") {
				all[i].expires = s.now() + time.Duration(rapid.IntRange(1, 40).Draw(rt, "for"))*time.Second
				all[i].Subscriber.expires = all[i].expires
			}

			all[i].MarkAlive()
			all[i].heard = all[i].lastAlive()
		}

		for range rapid.IntRange(20, 100).Draw(rt, "sweeps") {
			s.start = s.start.Add(-s.live.tick()) // time passes
			if i := rapid.IntRange(0, 2*len(all)).Draw(rt, "heard of"); i < len(all) && !all[i].over {
				all[i].MarkAlive()
				all[i].heard = all[i].lastAlive()
			}

			// The sweep reads the clock itself, some time between these two.
			before := s.now()
			s.sweep()
			after := s.now()
			for i, m := range all {
				if m.over {
					continue
				}

				ping, dead := s.live.verdict(before, m.heard, m.pinged)
				p2, d2 := s.live.verdict(after, m.heard, m.pinged)
				expiredMeanwhile := m.expires != 0 && (before >= m.expires) != (after >= m.expires)
				if p2 != ping || d2 != dead || expiredMeanwhile {
					return // due between the two: either is right
				}

				expired := m.expires != 0 && before >= m.expires
				wrote := strings.Join(m.take(t), "")

				switch {
				case dead:
					m.over = true
					if !m.wire.Closed() {
						rt.Fatalf("connection %d is open, though its client is silent for too long", i)
					}
				case expired:
					m.over = true
					if wrote != "expired" {
						rt.Fatalf("connection %d: its token has expired, and it got %q, want \"expired\"", i, wrote)
					}
				case ping != (wrote == "ping"):
					rt.Fatalf("connection %d got %q; want a ping: %v", i, wrote, ping)
				case ping:
					m.pinged = m.Subscriber.pinged
				}
			}
		}
	})
}

// A client that takes a minute of silence for a broken connection gets pings in time, whatever the interval for other
// clients is.
func TestPingOften(t *testing.T) {
	for ping, want := range map[time.Duration]time.Duration{
		2 * time.Minute: maxSilence, 15 * time.Second: 15 * time.Second,
	} {
		s := loneShard(10 * time.Millisecond)
		s.live = liveness{ping: ping, pong: 5 * time.Second}

		often, other := s.watcher(t), s.watcher(t)
		defer often.close()
		defer other.close()

		often.PingOften()
		s.sweep() // the first sweep sets when the next one has something to do
		for passed := s.live.tick(); passed <= 30*time.Second; passed += s.live.tick() {
			s.start = s.start.Add(-s.live.tick()) // time passes
			s.sweep()
			pinged := strings.Join(often.take(t), "") != ""
			if pinged {
				if passed < want-2*s.live.tick() { // the machine may have stood still for a moment
					t.Errorf("with an interval of %s the ping came after %s, want %s", ping, passed, want)
				}

				break
			}
			if passed > want {
				t.Errorf("with an interval of %s no ping came within %s", ping, want)
				break
			}
		}

		if got := other.take(t); ping > maxSilence && len(got) > 0 {
			t.Errorf("with an interval of %s another client got %q, want nothing", ping, got)
		}
	}
}

// A client that repeats a subscribe is answered once per interval. Neither that, nor leaving a page and coming again,
// changes the pace of other pages.
func TestRepeatedSubscribesAreLimited(t *testing.T) {
	intervals := 50
	if testing.Short() {
		intervals = 10
	}
	for _, leave := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const interval = 100 * time.Millisecond
			s := loneShard(interval)
			s.pace.budget = 100
			w := s.watcher(t)
			defer w.close()

			var pages []string
			for i := range answersAtOnce {
				pages = append(pages, "p"+strconv.Itoa(i))
			}

			w.watch(0, pages...)
			for _, page := range pages {
				s.update(countOf(page, 1, 1))
			}

			s.deliver()
			if n := len(counts(t, w.take(t)...)); n != answersAtOnce {
				t.Fatalf("%d counts at first, want all %d at once", n, answersAtOnce)
			}

			answers := 0
			for range 20 * intervals {
				time.Sleep(interval / 20)
				if leave {
					for _, page := range pages {
						w.Unsubscribe(topicOf(page))
					}
				}

				w.watch(0, pages...)
				for _, page := range pages { // as the hub would do
					s.update(countOf(page, 1, 1))
				}
				// A topic that the client comes back to is new to the shard, and due at once. Only answers are counted
				// here.
				if leave {
					for _, topic := range s.due {
						topic.scanAt = 0
					}
					s.due = s.due[:0]
				}

				s.deliver()
				answers += len(counts(t, w.take(t)...))
			}

			if most := (intervals + 1) * answersAtOnce; answers > most || answers < most*9/10 {
				t.Errorf("leave %v: %d answers in %d intervals, want %d or a little less",
					leave, answers, intervals, most)
			}

			// Answers that were charged to the pace would make all clients of a busy page wait for one that repeats
			// itself.
			if s.pace.stretch != 0 || s.pace.load > 1 {
				t.Errorf("leave %v: the pace is stretched by %.1f with a load of %.1f",
					leave, s.pace.stretch, s.pace.load)
			}
			if len(s.visits) > 0 || len(s.asking) > 1 {
				t.Errorf("leave %v: %d visits and %d subscribers wait, want none and 1 at most",
					leave, len(s.visits), len(s.asking))
			}
		})
	}
}
