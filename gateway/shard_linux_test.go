package gateway

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

// loneShard is a shard whose passes the test makes.
func loneShard(interval time.Duration) *shard {
	h := &hub{wake: make(chan struct{}, 1), pages: map[string]*watched{}}
	s := newShard(h, interval, 1e6, liveness{ping: time.Minute, pong: time.Minute})
	h.shards = []*shard{s}
	return s
}

// watcher is a connection of a loneShard. Its socket keeps every write apart
// from the next, so that writes can be counted.
type watcher struct {
	*conn
	fd int
}

func (s *shard) watcher(t testing.TB, events bool) watcher {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fds[0]), "server")
	nc, err := net.FileConn(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := &conn{g: &Gateway{hub: s.hub}, shard: s, events: events}
	c.turns.Store(1) // nobody serves it
	c.wire.use(nc, time.Minute, c)
	s.add(c)
	return watcher{c, fds[1]}
}

// close ends both sides of the socket.
func (w watcher) close() {
	_ = w.wire.Close()
	_ = syscall.Close(w.fd)
}

// take returns what was written since, one element for each write.
func (w watcher) take(t testing.TB) (writes []string) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		n, err := syscall.Read(w.fd, buf)
		if err == syscall.EAGAIN || err == nil && n == 0 {
			return writes
		}
		if err != nil {
			t.Fatal(err)
		}
		writes = append(writes, string(buf[:n]))
	}
}

// counts are those in the text of frames or events, in order.
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

func countOf(page string, users int64, sequence uint64) presence.Count {
	return presence.Count{Page: page, Users: users, Updated: time.Unix(0, 0), Version: presence.Version{Incarnation: 1, Sequence: sequence}}
}

// All pages of one connection that changed go out in one write.
func TestManyPagesInOneWrite(t *testing.T) {
	s := loneShard(10 * time.Millisecond)
	w := s.watcher(t, false)
	defer w.close()
	var pages []string
	for i := range 30 {
		pages = append(pages, "page "+strconv.Itoa(i))
	}
	if err := s.watch(w.conn, pages, 0); err != nil {
		t.Fatal(err)
	}
	for round := range uint64(3) {
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
}

func TestPrecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 100 * time.Millisecond
		s := loneShard(interval)
		exact, rough := s.watcher(t, false), s.watcher(t, false)
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
		expect := func(w watcher, want ...int64) {
			t.Helper()
			got := counts(t, w.take(t)...)
			if len(got) != len(want) {
				t.Fatalf("got %v, want %v", got, want)
			}
			for i, c := range got {
				if c.Count != want[i] {
					t.Fatalf("got %v, want %v", got, want)
				}
			}
		}
		watch := func(w watcher, precision uint8) {
			t.Helper()
			time.Sleep(time.Millisecond)
			if err := s.watch(w.conn, []string{"p"}, precision); err != nil {
				t.Fatal(err)
			}
			s.deliver()
		}
		watch(exact, 0)
		watch(rough, 2)
		step(1234, false)
		expect(exact, 1234)
		expect(rough, 1200)
		step(1249, false)
		expect(exact, 1249)
		expect(rough)
		step(1250, false)
		expect(exact, 1250)
		expect(rough, 1300)
		step(1251, true) // that it is stale can be seen
		expect(exact, 1251)
		expect(rough, 1300)
		step(1252, false)
		expect(exact, 1252)
		expect(rough, 1300)

		// Away and back between two counts: there is nothing to tell.
		s.update(countOf("p", 90, 100))
		s.update(countOf("p", 1260, 101))
		sequence = 101
		time.Sleep(2 * interval)
		s.deliver()
		expect(exact, 1260)
		expect(rough)

		// Asked again, it comes at once, in the precision asked for last.
		watch(rough, 2)
		expect(rough, 1300)
		watch(rough, 3)
		expect(rough, 1260)
		step(1261, false)
		expect(rough)
		watch(rough, 0)
		expect(rough, 1261)
		step(1262, false)
		expect(rough, 1262)
		if forms := len(s.topics["p"].forms); forms != 3 {
			t.Errorf("%d forms of one count, want exact, 2 and 3 digits", forms)
		}
	})
}

// A join keeps the precision of a subscription, and its first count comes even
// when its number is known already.
func TestPrecisionOfJoined(t *testing.T) {
	s := loneShard(10 * time.Millisecond)
	w := s.watcher(t, false)
	defer w.close()
	if err := s.watch(w.conn, []string{"p"}, 1); err != nil {
		t.Fatal(err)
	}
	s.update(countOf("p", 11, 1))
	s.deliver()
	if fresh, err := s.join(w.conn, "p"); !fresh || err != nil {
		t.Fatal(fresh, err)
	}
	s.update(countOf("p", 12, 2))
	s.ready(w.conn, "p")
	time.Sleep(20 * time.Millisecond)
	s.deliver()
	got := counts(t, w.take(t)...)
	if len(got) != 2 || got[0].Count != 10 || got[1].Count != 10 || got[1].Version != "1-2" {
		t.Fatalf("got %v, want 10 twice", got)
	}
}

// Whatever changes, and whenever, subscribers of all precisions have the newest
// number in the end, and none is told the same number twice in a row.
func TestPrecisionProperties(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const interval = 10 * time.Millisecond
		s := loneShard(interval)
		watchers := make([]watcher, 4)
		last := make([]shownCount, len(watchers))
		for i := range watchers {
			watchers[i] = s.watcher(t, false)
			defer watchers[i].close()
			if err := s.watch(watchers[i].conn, []string{"p"}, uint8(i)); err != nil {
				rt.Fatal(err)
			}
		}
		look := func() {
			s.deliver()
			for i, w := range watchers {
				for _, c := range counts(t, w.take(t)...) {
					if i > 0 && last[i].Page != "" && c.Count == last[i].Count && c.Stale == last[i].Stale {
						rt.Fatalf("precision %d: told %+v after %+v", i, c, last[i])
					}
					last[i] = c
				}
			}
		}
		pass := func(d time.Duration) { s.start = s.start.Add(-d) } // moves the shard's clock
		var newest presence.Count
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
		for range 3 {
			pass(2 * interval)
			look()
		}
		for i := range watchers {
			if want := significant(newest.Users, uint8(i)); last[i].Count != want || last[i].Stale != newest.Stale {
				rt.Fatalf("precision %d: has %+v, want %d of %+v", i, last[i], want, newest)
			}
		}
	})
}

func TestSignificant(t *testing.T) {
	for _, tc := range []struct {
		n      int64
		digits uint8
		want   int64
	}{
		{0, 1, 0}, {7, 1, 7}, {14, 1, 10}, {15, 1, 20}, {95, 1, 100}, {94, 1, 90}, {994, 2, 990}, {995, 2, 1000}, {1249, 2, 1200}, {123456, 3, 123000},
		{123456, 0, 123456}, {123456, 6, 123456}, {123456, 9, 123456}, {1<<63 - 1, 1, 9_000_000_000_000_000_000}, {1<<63 - 1, 2, 9_200_000_000_000_000_000},
	} {
		if got := significant(tc.n, tc.digits); got != tc.want {
			t.Errorf("significant(%d, %d) = %d, want %d", tc.n, tc.digits, got, tc.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) { // what holds for all numbers
		a, b := rapid.Int64Range(0, 1<<60).Draw(t, "a"), rapid.Int64Range(0, 1<<60).Draw(t, "b")
		digits := uint8(rapid.IntRange(1, maxPrecision).Draw(t, "digits"))
		ra, rb := significant(a, digits), significant(b, digits)
		if a <= b && ra > rb {
			t.Fatalf("%d and %d are rounded to %d and %d", a, b, ra, rb)
		}
		if text := strings.TrimRight(strconv.FormatInt(ra, 10), "0"); len(text) > int(digits) {
			t.Fatalf("%d has more than %d digits", ra, digits)
		}
		if significant(ra, digits) != ra || float64(max(ra-a, a-ra)) > 0.5*float64(a) {
			t.Fatalf("significant(%d, %d) = %d", a, digits, ra)
		}
	})
}

// An event stream that comes back with the id of the newest count gets the
// next one only; with any other id it gets the newest.
func TestResume(t *testing.T) {
	s := loneShard(10 * time.Millisecond)
	for has, want := range map[presence.Version]bool{{Incarnation: 1, Sequence: 5}: false, {Incarnation: 1, Sequence: 4}: true, {}: true, {Incarnation: 9, Sequence: 9}: true} {
		w := s.watcher(t, true)
		s.resume(w.conn, "p", has)
		s.update(countOf("p", 3, 5)) // known only now, for the first of them
		time.Sleep(20 * time.Millisecond)
		s.deliver()
		if got := counts(t, w.take(t)...); (len(got) == 1) != want {
			t.Errorf("with %s: got %v of 1-5", has, got)
		}
		w.close()
		s.remove(w.conn)
	}
	// Nobody has ever joined that page, and it knows.
	never := s.watcher(t, true)
	defer never.close()
	s.resume(never.conn, "q", presence.Version{})
	s.update(presence.Count{Page: "q"})
	s.deliver()
	if got := never.take(t); len(got) != 0 {
		t.Errorf("got %q again", got)
	}
	s.update(countOf("q", 1, 1))
	time.Sleep(20 * time.Millisecond)
	s.deliver()
	if got := counts(t, never.take(t)...); len(got) != 1 || got[0].Count != 1 {
		t.Errorf("got %v, want the change", got)
	}
}

// A count is encoded once for all subscribers of one form, and a delivery
// allocates nothing.
func TestDeliveriesAllocateNothing(t *testing.T) {
	s := loneShard(time.Millisecond)
	const each = 50
	var watchers []watcher
	for range each {
		for kind := range 3 {
			w := s.watcher(t, kind == 2)
			defer w.close()
			if err := s.watch(w.conn, []string{"p"}, uint8(kind%2)); err != nil {
				t.Fatal(err)
			}
			watchers = append(watchers, w)
		}
	}
	buf := make([]byte, 4096)
	sequence, delivered := uint64(0), 0
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
	if delivered < 20*3*each {
		t.Fatalf("%d deliveries, want %d", delivered, 20*3*each)
	}
	if allocs > each/2 { // those of encoding three forms of the count
		t.Errorf("%.0f allocations for %d deliveries", allocs, 3*each)
	}
}

// A sweep does what it would do if it looked at every connection each time.
func TestSweepLooksWhenThereIsSomethingToDo(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := loneShard(10 * time.Millisecond)
		s.live = liveness{ping: 15 * time.Second, pong: 5 * time.Second}
		type model struct {
			watcher
			heard, pinged, expires time.Duration
			over                   bool
		}
		all := make([]*model, 5)
		for i := range all {
			all[i] = &model{watcher: s.watcher(t, false)}
			defer all[i].close()
			if rapid.Bool().Draw(rt, "has a token") {
				all[i].expires = s.now() + time.Duration(rapid.IntRange(1, 40).Draw(rt, "for"))*time.Second
				all[i].conn.expires = all[i].expires
			}
			all[i].alive()
			all[i].heard = all[i].conn.heard()
		}
		for range rapid.IntRange(20, 100).Draw(rt, "sweeps") {
			s.start = s.start.Add(-s.live.tick()) // time goes on
			if i := rapid.IntRange(0, 2*len(all)).Draw(rt, "heard of"); i < len(all) && !all[i].over {
				all[i].alive()
				all[i].heard = all[i].conn.heard()
			}
			before := s.now()
			s.sweep()
			after := s.now()
			for i, m := range all {
				if m.over {
					continue
				}
				ping, dead := s.live.verdict(before, m.heard, m.pinged)
				if p2, d2 := s.live.verdict(after, m.heard, m.pinged); p2 != ping || d2 != dead || (m.expires != 0) && (before >= m.expires) != (after >= m.expires) {
					return // it came to pass in between: either is right
				}
				expired := m.expires != 0 && before >= m.expires
				wrote := strings.Join(m.take(t), "")
				switch {
				case dead:
					m.over = true
					if !m.wire.closed.Load() {
						rt.Fatalf("connection %d is dead and open", i)
					}
				case expired:
					m.over = true
					if !strings.Contains(wrote, codeTokenExpired) {
						rt.Fatalf("connection %d: the token is over, and it got %q", i, wrote)
					}
				case ping != (wrote == "\x89\x00"):
					rt.Fatalf("connection %d: ping %v, and it got %q", i, ping, wrote)
				case ping:
					m.pinged = m.conn.pinged
				}
			}
		}
	})
}

// BenchmarkDeliver is a pass that gives 1,000 subscribers a count, without what
// TCP costs: frames, rounded frames and events are the same work.
func BenchmarkDeliver(b *testing.B) {
	for name, kind := range map[string]struct {
		precision uint8
		events    bool
	}{"frames": {}, "rounded": {precision: 2}, "events": {events: true}} {
		b.Run(name, func(b *testing.B) {
			const subscribers = 1000
			s := loneShard(time.Millisecond)
			watchers := make([]watcher, subscribers)
			for i := range watchers {
				watchers[i] = s.watcher(b, kind.events)
				defer watchers[i].close()
				if err := s.watch(watchers[i].conn, []string{"p"}, kind.precision); err != nil {
					b.Fatal(err)
				}
			}
			buf := make([]byte, 4096)
			sequence, took := uint64(0), time.Duration(0)
			for b.Loop() {
				sequence++
				s.start = s.start.Add(-time.Second)                     // an interval has passed
				s.update(countOf("p", int64(10+sequence%80), sequence)) // two digits, so that every change shows
				began := time.Now()
				s.deliver()
				took += time.Since(began)
				for _, w := range watchers {
					if _, err := syscall.Read(w.fd, buf); err != nil {
						b.Fatalf("subscriber got nothing: %v", err)
					}
				}
			}
			b.ReportMetric(float64(took.Nanoseconds())/float64(s.delivered.Load()), "ns/delivery")
			b.ReportMetric(float64(s.delivered.Load())/float64(sequence), "deliveries/op")
		})
	}
}
