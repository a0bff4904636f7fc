package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"headcount/counter/limit"
)

// fakeLasting is the contract of counters in its smallest form: one process, one mutex.
// It is honest unless lie says otherwise.
type fakeLasting struct {
	*httptest.Server
	lie string // one of the lies below
	ill string // one of the troubles below, which are no lies

	mu       sync.Mutex
	counters map[string]*fakeCounter
	once     map[string]bool // Idempotency-Keys
	limits   map[limit.Name]*limit.State
	watchers map[*fakeWatcher]bool
	clock    int64 // versions
	users    int
	turn     int    // calls
	chances  int    // chances to lie
	forgot   string // a member
	work     sync.WaitGroup
}

type fakeCounter struct {
	key, kind string
	value     int64
	version   int64
	members   map[string]bool
	ledger    []entry
}

// A fakeWatcher is a WebSocket or an event stream.
type fakeWatcher struct {
	user string // "" for an event stream
	keys map[string]bool
	out  chan []byte
	gone context.CancelFunc
}

// rare is true for every fourth chance to lie.
func (f *fakeLasting) rare() bool {
	f.chances++
	return f.chances%4 == 3
}

func newFakeLasting(t *testing.T) *fakeLasting {
	f := &fakeLasting{counters: map[string]*fakeCounter{}, once: map[string]bool{}, limits: map[limit.Name]*limit.State{}, watchers: map[*fakeWatcher]bool{}, clock: 1}
	f.Server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.drop()
		f.Close()
		f.work.Wait()
	})
	return f
}

// drop cuts every subscriber off.
func (f *fakeLasting) drop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.watchers {
		w.gone()
	}
}

func (f *fakeLasting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.EscapedPath(), countersRoot)
	name, limits := strings.CutPrefix(r.URL.EscapedPath(), limitsRoot)
	switch {
	case limits:
	case r.URL.Path == "/-/ws":
		f.socket(w, r)
		return
	case r.URL.Path == "/*/counter":
		_, _ = w.Write([]byte(`{"page":"*","count":0,"version":"0-0"}`))
		return
	case !ok:
		http.NotFound(w, r)
		return
	case strings.HasSuffix(path, "/events"):
		f.stream(w, r, part1(path))
		return
	}
	var body struct {
		Delta  *int64
		Reason string
		By     string
		Add    []string
		Remove []string
		Change []struct {
			Key   string
			Delta int64
		} `json:"changes"`
		Limit, Cost       int64
		Window, Algorithm string
	}
	if r.Method == http.MethodPost && json.NewDecoder(r.Body).Decode(&body) != nil {
		return // it was cut off
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.turn++; f.turn%10 == 0 {
		switch f.ill {
		case "unavailable":
			http.Error(w, "away", http.StatusServiceUnavailable)
			return
		case "limits":
			http.Error(w, "slow down", http.StatusTooManyRequests)
			return
		case "unknown": // carried out, and then not answered
			w = httptest.NewRecorder()
			defer panic(http.ErrAbortHandler)
		case "breaks":
			http.Error(w, "broken", http.StatusInternalServerError)
			return
		}
	}
	if limits {
		window, err := time.ParseDuration(body.Window)
		algorithm, ok := limit.ParseAlgorithm(body.Algorithm)
		if err != nil || !ok {
			panic(body)
		}
		f.pass(w, limit.Call{Name: limit.Name{Key: part1(name), Algorithm: algorithm, Window: window.Milliseconds()}, Limit: body.Limit, Cost: body.Cost})
		return
	}
	user := "server"
	if r.Header.Get("X-API-Key") == "" {
		user, _, _ = strings.Cut(r.Header.Get("Headcount-Id"), ".")
	}
	key := part1(path)
	_, call, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	var made []fakeChange
	switch {
	case r.Method == http.MethodGet:
		f.get(w, r, key, call, user)
		return
	case r.Method == http.MethodDelete && call == "":
		if f.lie != "keeps what is deleted" {
			*f.counter(key) = fakeCounter{key: key, kind: kindOf(key), members: map[string]bool{}}
			f.tell(key)
		}
		w.WriteHeader(http.StatusNoContent)
		return
	case strings.HasPrefix(call, "members/"):
		f.edit(key, []string{memberOf(call, user)}, r.Method == http.MethodPut)
		f.answer(w, key, map[string]any{"member": r.Method == http.MethodPut})
		return
	case path == "":
		for _, c := range body.Change {
			made = append(made, fakeChange{c.Key, moving(nil, c.Delta).op, c.Delta})
		}
	case call == "increment":
		made = []fakeChange{{key, call, *body.Delta}}
	case call == "decrement":
		made = []fakeChange{{key, call, -*body.Delta}}
	case call == "adjust":
		made = []fakeChange{{key, call, *body.Delta}}
	}
	id := r.Header.Get("Idempotency-Key") + " " + user + " " + key
	again := f.once[id]
	if again {
		w.Header().Set("Idempotent-Replay", "true")
	}
	switch {
	case again && f.lie == "counts a repetition":
		again = false
	case again && f.lie == "forgets keys":
		again = false
		w.Header().Del("Idempotent-Replay")
	case !again && f.lie == "takes a first call for a repetition" && f.rare():
		w.Header().Set("Idempotent-Replay", "true")
	}
	if !again {
		for i, c := range made {
			t := f.counter(c.key)
			full := t.kind == "exact" && t.value+c.delta < 0 && f.lie != "passes the floor"
			if full || f.lie == "refuses what fits" && t.kind == "exact" && c.delta < 0 && path != "" && f.rare() {
				if f.lie == "makes half of a batch" {
					for _, c := range made[:i] {
						f.change(c, body.Reason, body.By)
					}
				}
				w.WriteHeader(http.StatusConflict)
				_, _ = w.Write(encode(map[string]any{"key": c.key, "value": t.value}))
				return
			}
		}
		f.once[id] = true
		for _, c := range made {
			f.change(c, body.Reason, body.By)
		}
		if call == "members" {
			f.edit(key, body.Add, true)
			f.edit(key, body.Remove, false)
		}
	}
	if path != "" {
		f.answer(w, key, nil)
		return
	}
	var list []json.RawMessage
	for _, c := range made {
		list = append(list, f.json(c.key, nil))
	}
	_, _ = w.Write(encode(map[string]any{"counters": list}))
}

// pass answers a call on a limit.
func (f *fakeLasting) pass(w http.ResponseWriter, c limit.Call) {
	state := f.limits[c.Name]
	if state == nil {
		state = &limit.State{}
		f.limits[c.Name] = state
	}
	now := time.Now().UnixMilli()
	a := state.Take(c, now)
	switch {
	case !a.Allowed && f.lie == "lets more pass":
		a.Allowed, a.Reset = true, c.Window-now%c.Window
		if c.Algorithm == limit.Sliding {
			a.Reset += c.Window
		}
	case !a.Allowed && f.lie == "lets too much pass in a short time":
		*state = limit.State{}
		a = state.Take(c, now)
	case a.Allowed && f.lie == "holds back what fits":
		*state = limit.State{}
		a.Allowed = f.rare()
	case a.Allowed && f.lie == "says that more is left":
		a.Remaining = c.Limit - c.Cost
	case f.lie == "says another limit":
		c.Limit++
	}
	if !a.Allowed {
		w.WriteHeader(http.StatusTooManyRequests)
	}
	_, _ = w.Write(encode(map[string]any{"allowed": a.Allowed, "limit": c.Limit, "remaining": a.Remaining, "reset_after_ms": a.Reset}))
}

type fakeChange struct {
	key, op string
	delta   int64
}

// part1 is the first segment of a path.
func part1(path string) string {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	text, err := url.PathUnescape(first)
	if err != nil {
		panic(err)
	}
	return text
}

func memberOf(call, user string) string {
	if m := part1(strings.TrimPrefix(call, "members/")); m != "me" {
		return m
	}
	return user
}

func kindOf(key string) string {
	return map[bool]string{true: "members"}[strings.HasPrefix(key, "likes:")] + map[bool]string{true: "exact"}[strings.HasPrefix(key, "stock:")] +
		map[bool]string{true: "sum"}[!strings.HasPrefix(key, "likes:") && !strings.HasPrefix(key, "stock:")]
}

func (f *fakeLasting) counter(key string) *fakeCounter {
	c := f.counters[key]
	if c == nil {
		c = &fakeCounter{key: key, kind: kindOf(key), members: map[string]bool{}}
		f.counters[key] = c
	}
	return c
}

func (f *fakeLasting) change(ch fakeChange, reason, by string) {
	c := f.counter(ch.key)
	f.clock++
	c.version = f.clock
	if f.lie == "loses one" && f.rare() {
		return
	}
	e := entry{Seq: uint64(len(c.ledger) + 1), At: time.Now().UTC().Format(time.RFC3339), Op: ch.op, Delta: ch.delta, Before: c.value, After: c.value + ch.delta, Reason: reason, By: by}
	c.value += ch.delta
	switch {
	case f.lie == "forgets an entry" && c.kind == "exact" && f.rare():
	case f.lie == "skips a number" && c.kind == "exact" && f.rare():
		e.Seq++
		c.ledger = append(c.ledger, e)
	case f.lie == "writes a wrong entry" && c.kind == "exact" && f.rare():
		e.After++
		c.ledger = append(c.ledger, e)
	case f.lie == "signs nothing":
		e.By = ""
		c.ledger = append(c.ledger, e)
	default:
		c.ledger = append(c.ledger, e)
	}
	f.tell(ch.key)
}

func (f *fakeLasting) edit(key string, members []string, in bool) {
	c := f.counter(key)
	for _, m := range members {
		if c.members[m] == in {
			continue
		}
		c.value += toggled(!in, in)
		if f.clock++; f.lie == "forgets a member" && f.rare() {
			f.forgot = m
		} else if m != f.forgot {
			c.members[m] = in
		}
		c.version = f.clock
		f.tell(key)
	}
}

func (f *fakeLasting) json(key string, more map[string]any) json.RawMessage {
	c := f.counter(key)
	m := map[string]any{"key": key, "kind": c.kind, "value": c.value, "updated_at": nil, "version": fmt.Sprintf("7-%d", c.version), "exact": true}
	if c.version == 0 {
		m["version"] = "0-0"
	}
	maps.Copy(m, more)
	return encode(m)
}

func (f *fakeLasting) answer(w http.ResponseWriter, key string, more map[string]any) {
	_, _ = w.Write(f.json(key, more))
}

func (f *fakeLasting) get(w http.ResponseWriter, r *http.Request, key, call, user string) {
	switch {
	case call == "exact" && f.lie == "reads too little" && f.counter(key).value > 0 && f.rare():
		f.answer(w, key, map[string]any{"value": 0})
	case call == "exact" && f.lie == "reads old versions" && f.rare():
		f.answer(w, key, map[string]any{"version": "7-0"})
	case call == "exact" || call == "":
		if key != "" {
			f.answer(w, key, nil)
			return
		}
		var list []json.RawMessage
		for _, key := range r.URL.Query()["key"] {
			if f.lie == "lags for ever" {
				list = append(list, f.json(key, map[string]any{"value": 0}))
				continue
			}
			list = append(list, f.json(key, nil))
		}
		_, _ = w.Write(encode(map[string]any{"counters": list}))
	case call == "ledger":
		after, _ := strconv.ParseUint(r.URL.Query().Get("after"), 10, 64)
		page := map[string]any{}
		entries := slices.DeleteFunc(slices.Clone(f.counter(key).ledger), func(e entry) bool { return e.Seq <= after })
		if len(entries) > 50 {
			entries = entries[:50]
			page["next"] = entries[49].Seq
		}
		page["entries"] = entries
		_, _ = w.Write(encode(page))
	case call == "aggregate":
		n, sum := 0, int64(0)
		for other, c := range f.counters {
			if strings.HasPrefix(other, strings.TrimSuffix(key, "*")) {
				n, sum = n+1, sum+c.value
			}
		}
		if f.lie == "adds up wrongly" {
			sum++
		}
		_, _ = w.Write(encode(map[string]any{"match": key, "counters": n, "value": sum}))
	case strings.HasPrefix(call, "members/"):
		f.answer(w, key, map[string]any{"member": f.counter(key).members[memberOf(call, user)]})
	}
}

// tell tells everyone who looks at the counter.
func (f *fakeLasting) tell(key string) {
	for w := range f.watchers {
		if w.keys[key] {
			w.push(f, key)
		}
	}
}

func (w *fakeWatcher) push(f *fakeLasting, key string) {
	more := map[string]any{"type": "counter"}
	if w.user != "" && f.counter(key).members[w.user] != (f.lie == "says mine of others'") {
		more["mine"] = true
	}
	switch {
	case f.lie == "tells no more" && f.rare():
		delete(w.keys, key)
	case f.lie == "lets versions fall":
		more["version"] = fmt.Sprintf("7-%d", 1_000_000-f.clock)
	case f.lie == "uses versions twice":
		more["version"] = "7-1"
	case f.lie == "stays stale":
		more["stale"] = true
	case f.lie == "tells something else":
		more["kind"] = "unique"
	}
	select {
	case w.out <- f.json(key, more):
	default:
		w.gone()
	}
}

// watch adds a watcher, who is told at once.
func (f *fakeLasting) watch(w *fakeWatcher, keys ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watchers[w] = true
	for _, key := range keys {
		w.keys[key] = true
		w.push(f, key)
	}
}

func (f *fakeLasting) unwatch(w *fakeWatcher) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.watchers, w)
	w.gone()
}

func (f *fakeLasting) socket(w http.ResponseWriter, r *http.Request) {
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{subprotocol}})
	if err != nil {
		return
	}
	f.work.Add(1)
	defer f.work.Done()
	defer ws.CloseNow()
	ctx, gone := context.WithCancel(context.Background())
	me := &fakeWatcher{keys: map[string]bool{}, out: make(chan []byte, fakeQueue), gone: gone}
	f.mu.Lock()
	id := r.URL.Query().Get("id")
	if id == "" || f.lie == "forgets who is who" {
		f.users++
		id = fmt.Sprintf("anon%d.one", f.users)
	}
	f.mu.Unlock()
	me.user, _, _ = strings.Cut(id, ".")
	me.out <- encode(map[string]any{"type": "welcome", "user": me.user, "id": id})
	f.watch(me)
	defer f.unwatch(me)
	f.work.Go(func() {
		for {
			select {
			case msg := <-me.out:
				_ = ws.Write(ctx, websocket.MessageText, msg)
			case <-ctx.Done():
				_ = ws.CloseNow()
				return
			}
		}
	})
	for {
		_, msg, err := ws.Read(ctx)
		if err != nil {
			return
		}
		var m struct{ Counters []string }
		if err := json.Unmarshal(msg, &m); err != nil {
			panic(err)
		}
		f.watch(me, m.Counters...)
	}
}

func (f *fakeLasting) stream(w http.ResponseWriter, r *http.Request, key string) {
	ctx, gone := context.WithCancel(r.Context())
	me := &fakeWatcher{keys: map[string]bool{}, out: make(chan []byte, fakeQueue), gone: gone}
	f.watch(me, key)
	defer f.unwatch(me)
	w.Header().Set("Content-Type", "text/event-stream")
	for {
		select {
		case msg := <-me.out:
			var l lasting
			if err := json.Unmarshal(msg, &l); err != nil {
				panic(err)
			}
			fmt.Fprintf(w, "event: counter\nid: %s\ndata: %s\n\n", l.Version, msg)
			w.(http.Flusher).Flush()
		case <-ctx.Done():
			return
		}
	}
}
