package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
)

const (
	stayers  = 60 // users who are always there
	churners = 30 // users who come and go while there is churn
	watchers = 2  // clients per gateway that see every count of every page

	// A count that was true at most this long ago is no error: a user whose connection
	// ended stays for leave-grace (2 s), and a change needs time to arrive.
	excuse = 3500 * time.Millisecond
)

var pages = []string{"home", "a/b?c", "Ω", "page 4", "p5", "p6"}

// crowd is all clients of a topology, and the truth about them.
type crowd struct {
	t        testing.TB
	gateways []*member
	truth    *truth
	watchers []*watcher
	churners []*churner

	floor map[string]int64 // page -> stayers on it
	guard atomic.Bool      // no count may be below its page's floor any more

	mu     sync.Mutex
	wrongs []string // what clients saw that must never be; bounded by maxWrongs
	more   int      // how many more there were

	strangers atomic.Int64 // connections of those who stay that ended by themselves
}

const maxWrongs = 12

// wrong notes something that must never happen.
func (c *crowd) wrong(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.wrongs) == maxWrongs {
		c.more++
		return
	}
	c.wrongs = append(c.wrongs, time.Now().UTC().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// takeWrongs returns what was noted, and begins anew.
func (c *crowd) takeWrongs() (wrongs []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wrongs = c.wrongs
	if c.more > 0 {
		wrongs = append(wrongs, fmt.Sprintf("and %d more", c.more))
	}
	c.wrongs, c.more = nil, 0
	return wrongs
}

// frame has the members of all frames that matter here.
type frame struct {
	Type    string
	ID      string
	AfterMS int64 `json:"after_ms"`
	Page    string
	Count   int64
	Version string
	Stale   bool
	Code    string
}

// dial connects to a gateway and says hello.
func dial(ctx context.Context, to *member, id string, hello []string) (*websocket.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, "ws://"+to.addr+"/-/ws?id="+url.QueryEscape(id), &websocket.DialOptions{HTTPClient: upgrades})
	if err != nil {
		return nil, err
	}
	ws.SetReadLimit(1 << 20)
	for _, text := range hello {
		if err := ws.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			_ = ws.CloseNow()
			return nil, err
		}
	}
	return ws, nil
}

var upgrades = &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}

func read(ctx context.Context, ws *websocket.Conn) (f frame, err error) {
	_, text, err := ws.Read(ctx)
	if err == nil {
		if err = json.Unmarshal(text, &f); err != nil {
			err = fmt.Errorf("%w in %q", err, text)
		}
	}
	return f, err
}

func quoted(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func join(page string) string  { return `{"type":"join","page":` + quoted(page) + `}` }
func leave(page string) string { return `{"type":"leave","page":` + quoted(page) + `}` }

// seen checks a count that any client saw.
func (c *crowd) seen(who string, f frame, versions map[string]string) {
	if f.Count < 0 {
		c.wrong("%s: a negative count: %+v", who, f)
	}
	if c.guard.Load() && f.Count < c.floor[f.Page] {
		c.wrong("%s: %d of %d users who stay are missing on %q: %+v", who, c.floor[f.Page]-f.Count, c.floor[f.Page], f.Page, f)
	}
	if old := versions[f.Page]; old != "" && older(f.Version, old) {
		c.wrong("%s: %q goes back from version %s to %s", who, f.Page, old, f.Version)
	}
	versions[f.Page] = f.Version
}

func older(a, b string) bool {
	var a1, a2, b1, b2 uint64
	_, _ = fmt.Sscanf(a, "%d-%d", &a1, &a2)
	_, _ = fmt.Sscanf(b, "%d-%d", &b1, &b2)
	return a1 < b1 || a1 == b1 && a2 < b2
}

// stayer keeps its pages as a browser does. It reconnects at once, to any gateway. When
// it is asked to move, it leaves the old connection when the new one works.
type stayer struct {
	c     *crowd
	name  string
	at    int // its gateway
	hello []string
	id    string
}

// run stays until ctx ends.
func (s *stayer) run(ctx context.Context, joined func()) {
	ws := s.connect(ctx)
	for ctx.Err() == nil {
		joined()
		after, err := s.listen(ctx, ws)
		if ctx.Err() != nil {
			break
		}
		if err != nil { // the gateway died or cut us off
			s.c.strangers.Add(1)
			_ = ws.CloseNow()
			s.at += 1
			wait(ctx, rand.N(200*time.Millisecond))
			ws = s.connect(ctx)
			continue
		}
		old := ws
		drained := make(chan struct{})
		go func() { // ends with old
			defer close(drained)
			_, _ = s.listen(ctx, old)
		}()
		wait(ctx, after)
		s.at++
		ws = s.connect(ctx)
		if ws != nil {
			_, _ = read(ctx, ws) // it serves
		}
		_ = old.CloseNow()
		<-drained
	}
	if ws != nil {
		_ = ws.CloseNow()
	}
}

// listen reads until the gateway asks to move, or fails.
func (s *stayer) listen(ctx context.Context, ws *websocket.Conn) (after time.Duration, err error) {
	versions := map[string]string{}
	for {
		f, err := read(ctx, ws)
		if err != nil {
			return 0, err
		}
		switch f.Type {
		case "welcome":
			s.id = f.ID
		case "count":
			s.c.seen(s.name, f, versions)
		case "error":
			s.c.wrong("%s: error %s", s.name, f.Code)
		case "reconnect":
			return time.Duration(f.AfterMS) * time.Millisecond, nil
		}
	}
}

// connect tries one gateway after the other until one takes it; nil when ctx ended.
func (s *stayer) connect(ctx context.Context) *websocket.Conn {
	for ctx.Err() == nil {
		ws, err := dial(ctx, s.c.gateways[s.at%len(s.c.gateways)], s.id, s.hello)
		if err == nil {
			return ws
		}
		s.at++
		wait(ctx, 50*time.Millisecond+rand.N(100*time.Millisecond))
	}
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// watcher sees every count of one gateway, and reconnects to that gateway.
type watcher struct {
	c    *crowd
	name string
	at   *member

	mu        sync.Mutex
	connected bool
	told      map[string]bool  // pages it was told of on this connection
	shown     map[string]frame // the newest version that it got on any connection, as a browser shows it
}

func (w *watcher) run(ctx context.Context) {
	hello := []string{`{"type":"subscribe","pages":` + quoted(append([]string{site}, pages...)) + `}`}
	for ; ctx.Err() == nil; wait(ctx, 100*time.Millisecond) {
		ws, err := dial(ctx, w.at, "", hello)
		if err != nil {
			continue
		}
		versions := map[string]string{}
		for {
			f, err := read(ctx, ws)
			if err != nil {
				break
			}
			if f.Type != "count" {
				continue
			}
			w.c.seen(w.name, f, versions)
			w.mu.Lock()
			w.connected = true
			w.told[f.Page] = true
			if !older(f.Version, w.shown[f.Page].Version) {
				w.shown[f.Page] = f
			}
			w.mu.Unlock()
		}
		w.mu.Lock()
		w.connected, w.told = false, map[string]bool{}
		w.mu.Unlock()
		_ = ws.CloseNow()
	}
}

// look calls fn with what the watcher shows, if it is connected.
func (w *watcher) look(fn func(frame)) (connected bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.connected {
		for page := range w.told {
			fn(w.shown[page])
		}
	}
	return w.connected
}

// churner is a user who comes and goes. It does not come back when its gateway ends:
// then it has gone.
type churner struct {
	c    *crowd
	name string

	mu    sync.Mutex
	id    string
	ws    *websocket.Conn
	pages []string
}

// come joins one or two pages through a gateway that is up.
func (u *churner) come(ctx context.Context) {
	to := u.c.gateways[rand.IntN(len(u.c.gateways))]
	if !to.up() {
		return
	}
	u.mu.Lock()
	id := u.id
	u.mu.Unlock()
	ws, err := dial(ctx, to, id, nil)
	if err != nil {
		return
	}
	f, err := read(ctx, ws)
	if err != nil {
		_ = ws.CloseNow()
		return
	}
	u.mu.Lock()
	u.id, u.ws = f.ID, ws
	u.pages = []string{pages[rand.IntN(len(pages))]}
	if second := pages[rand.IntN(len(pages))]; rand.IntN(3) == 0 && second != u.pages[0] {
		u.pages = append(u.pages, second)
	}
	for _, p := range u.pages {
		u.c.truth.set(u.name, p, true)
		_ = ws.Write(ctx, websocket.MessageText, []byte(join(p)))
	}
	u.mu.Unlock()
	go func() { // ends with ws
		versions := map[string]string{}
		for {
			f, err := read(ctx, ws)
			if err != nil || f.Type == "reconnect" {
				u.gone(ws)
				return
			}
			if f.Type == "count" {
				u.c.seen(u.name, f, versions)
			}
		}
	}()
}

// here reports whether the user is there.
func (u *churner) here() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.ws != nil
}

// gone ends the connection, unless it is another one by now.
func (u *churner) gone(ws *websocket.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ws != ws {
		return
	}
	for _, p := range u.pages {
		u.c.truth.set(u.name, p, false)
	}
	u.ws, u.pages = nil, nil
	_ = ws.CloseNow()
}

// leave ends the churner's stay: half of the time with a message, else as a closed tab
// does.
func (u *churner) leave(ctx context.Context) {
	u.mu.Lock()
	ws, mine := u.ws, u.pages
	u.mu.Unlock()
	if ws == nil {
		return
	}
	if rand.IntN(2) == 0 {
		for _, p := range mine {
			_ = ws.Write(ctx, websocket.MessageText, []byte(leave(p)))
		}
	}
	u.gone(ws)
}

// newCrowd brings all clients of a topology in and waits until they are counted.
func newCrowd(t testing.TB, gateways []*member) *crowd {
	t.Helper()
	c := &crowd{t: t, gateways: gateways, truth: newTruth(), floor: map[string]int64{}}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	t.Cleanup(func() {
		c.guard.Store(false)
		cancel()
		all.Wait()
	})
	for i := range len(gateways) * watchers {
		w := &watcher{c: c, name: fmt.Sprintf("watcher %d of %s", i, gateways[i%len(gateways)].name), at: gateways[i%len(gateways)], told: map[string]bool{}, shown: map[string]frame{}}
		c.watchers = append(c.watchers, w)
		all.Go(func() { w.run(ctx) })
	}
	var joined sync.WaitGroup
	for i := range stayers {
		s := &stayer{c: c, name: fmt.Sprintf("stayer %d", i), at: i}
		on := []string{pages[i%len(pages)]}
		if i%5 == 0 {
			on = append(on, pages[(i+1)%len(pages)])
		}
		for _, p := range on {
			s.hello = append(s.hello, join(p))
			c.truth.set(s.name, p, true)
		}
		joined.Add(1)
		all.Go(func() { s.run(ctx, sync.OnceFunc(joined.Done)) })
	}
	for _, p := range append([]string{site}, pages...) {
		c.floor[p] = c.truth.now(p)
	}
	for i := range churners {
		c.churners = append(c.churners, &churner{c: c, name: fmt.Sprintf("churner %d", i)})
	}
	joined.Wait()
	if _, err := c.exact(time.Now(), promised); err != nil {
		t.Fatalf("at first: %v", err)
	}
	c.guard.Store(true)
	return c
}

// churn has users come and go until the returned function is called. Then the truth no
// longer changes.
func (c *crowd) churn() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for ctx.Err() == nil {
			u := c.churners[rand.IntN(len(c.churners))]
			if u.here() {
				u.leave(context.Background())
			} else {
				u.come(context.Background())
			}
			wait(ctx, rand.N(100*time.Millisecond))
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		all.Wait()
	})
}

// counter is the outside form of a count.
type counter struct {
	Page    string
	Count   int64
	Version string
	Stale   bool
}

// read asks a gateway for a page's count.
func (c *crowd) read(g *member, page string) (counter, int, error) {
	status, _, body, err := get("http://" + g.addr + "/" + url.PathEscape(page) + "/counter")
	if err != nil || status != http.StatusOK {
		return counter{}, status, err
	}
	var n counter
	if err := json.Unmarshal([]byte(body), &n); err != nil {
		return counter{}, status, err
	}
	who := "GET from " + g.name
	c.seen(who, frame{Page: n.Page, Count: n.Count, Version: n.Version, Stale: n.Stale}, map[string]string{})
	return n, status, nil
}

// off says which count of which gateway is not true, or nil.
func (c *crowd) off() error {
	var wrong []string
	for _, w := range c.watchers {
		if !w.at.up() {
			continue
		}
		n := 0
		if !w.look(func(f frame) {
			n++
			if want := c.truth.now(f.Page); f.Count != want || f.Stale {
				wrong = append(wrong, fmt.Sprintf("%s: %q is %d (stale: %t, version %s), want %d", w.name, f.Page, f.Count, f.Stale, f.Version, want))
			}
		}) || n != len(pages)+1 {
			wrong = append(wrong, fmt.Sprintf("%s has %d counts", w.name, n))
		}
	}
	if len(wrong) > 0 {
		return errors.New(strings.Join(wrong, "; "))
	}
	for _, g := range c.gateways {
		if !g.up() {
			continue
		}
		for _, p := range append([]string{site}, pages...) {
			got, status, err := c.read(g, p)
			if want := c.truth.now(p); err != nil || status != http.StatusOK || got.Count != want || got.Stale {
				wrong = append(wrong, fmt.Sprintf("GET %q from %s: status %d, %+v, %v, want %d", p, g.name, status, got, err, want))
			}
		}
	}
	if len(wrong) > 0 {
		return errors.New(strings.Join(wrong, "; "))
	}
	return nil
}

// steady is how long counts must stay exact before the test believes them.
const steady = 1200 * time.Millisecond

// exact waits until all counts are exact and stay so, and returns the time at which that
// began. It must have begun by the limit.
func (c *crowd) exact(since time.Time, limit func() time.Duration) (time.Duration, error) {
	var begun time.Time
	for {
		at := time.Now()
		err := c.off()
		switch {
		case err != nil && at.Sub(since) > limit():
			return -1, fmt.Errorf("%.1f s later: %w", at.Sub(since).Seconds(), err)
		case err != nil:
			begun = time.Time{}
			time.Sleep(40 * time.Millisecond)
		case begun.IsZero():
			begun = at
		case at.Sub(begun) >= steady:
			return begun.Sub(since), nil
		default:
			time.Sleep(200 * time.Millisecond)
		}
	}
}

// errors looks at what the watchers show until it is stopped. It returns the largest
// errors: in fresh counts, in counts marked stale, and the largest in fresh counts that
// nothing explains, which is an error that is older than a ghost may get.
func (c *crowd) errors(stalled func() time.Duration) (stop func() (fresh, stale, unexplained worst)) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var fresh, stale, unexplained worst
	go func() { // ends with stop
		defer close(done)
		for g := 0; ctx.Err() == nil; g++ {
			since := time.Now().Add(-excuse)
			ghosts := time.Now().Add(-exactWithin - stalled())
			for _, w := range c.watchers {
				w.look(func(f frame) {
					to := &fresh
					if f.Stale {
						to = &stale
					}
					if d := c.truth.distance(f.Page, f.Count, since); d > to.by {
						*to = worst{d, fmt.Sprintf("%s %s: %q is %d, want %d", time.Now().UTC().Format("15:04:05.000"), w.name, f.Page, f.Count, c.truth.now(f.Page))}
					}
					if d := c.truth.distance(f.Page, f.Count, ghosts); !f.Stale && d > unexplained.by {
						unexplained = worst{d, fmt.Sprintf("%s %s: %q is %d, want %d", time.Now().UTC().Format("15:04:05.000"), w.name, f.Page, f.Count, c.truth.now(f.Page))}
					}
				})
			}
			if m := c.gateways[g%len(c.gateways)]; m.up() { // for seen
				_, _, _ = c.read(m, append([]string{site}, pages...)[g%(len(pages)+1)])
			}
			wait(ctx, 100*time.Millisecond)
		}
	}()
	return func() (worst, worst, worst) {
		cancel()
		<-done
		return fresh, stale, unexplained
	}
}

// worst is the largest error seen, and where.
type worst struct {
	by    int64
	where string
}
