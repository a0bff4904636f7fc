package member

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/browser"
	"headcount/presence"
	"headcount/presence/node"
	"headcount/web"
)

const (
	// surferTabs is how many tabs the user with a browser has at most.
	surferTabs = 3
	// surferPatience is how long the browser client may take, all being well: a gateway that died without a word is
	// noticed after a heartbeat and its answer's time, and what comes instead is a WebSocket again after 25 s at most.
	surferPatience = time.Minute
)

// surfer is a user with a browser whose tabs run the browser client. Its tabs share one connection to some gateway.
// Whatever happens to the gateway, the connection and the tab that has it, every tab has to know the counts again. Like
// a program with the Go client the user is counted when all is well, and not held to be counted all the time.
type surfer struct {
	s       *simulation
	user    *user
	browser *browser.Browser

	mu     sync.Mutex // guards the fields below
	chance *rand.Rand
	tabs   []*surferTab // that are open
	opened int
	held   time.Time // when it last asked for a page to be held, and later by the time that owners stood still since
}

// surferTab is one tab.
type surferTab struct {
	name   string
	tab    *browser.Tab // for what runs in the browser
	joined map[string]bool
	last   map[string]seenCount
	// arrival has when a page was joined that no tab had joined, until its first count. While a page is loading or its
	// connection is made that takes longer than arrivesWithin, and the count is not judged.
	arrival map[string]time.Time
	state   string
	hidden  bool
	frozen  bool
}

func (s *simulation) newSurfer(name string) *surfer {
	u := &surfer{s: s, user: newUser(name), chance: chance(s.seed, name)}
	u.browser = browser.New(browser.Config{
		Address: "http://gateways.test/", Files: web.Files, Chance: chance(s.seed, name+"'s scripts"), Dial: u.dial,
		Asked: u.asked,
		Say:   func(text string) { s.detail("the console of %s: %s", name, text) },
		Fail:  func(text string) { s.broken("–", "a script of %s failed: %s", name, text) },
	})

	return u
}

// dial connects to some gateway.
func (u *surfer) dial(context.Context, string, string) (net.Conn, error) {
	u.mu.Lock()
	gateway := u.s.someGateway(u.chance)
	u.mu.Unlock()

	end, err := u.s.net.dial(gateway)
	if err != nil {
		return nil, err
	}

	c := newBuffered(end)
	u.s.clients.Go(c.send)
	u.s.detail("%s dials %s", u.user.name, gateway)

	return c, nil
}

// asked notes a PUT that holds a page, as the client does without a WebSocket. What it no longer wants when that way
// ends is held until the hold expires.
func (u *surfer) asked(method, address string) {
	if method == http.MethodPut && strings.HasSuffix(address, "/counter") {
		u.mu.Lock()
		u.held = time.Now()
		u.mu.Unlock()
	}
}

// stoodStill says that a process did, for so long. If it owned what is held, its clock stood still too, so that those
// who could not renew their holds keep them.
func (u *surfer) stoodStill(d time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()

	u.held = u.held.Add(d)
}

func (u *surfer) heldUntil() time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()

	return u.held.Add(node.HoldTime(u.s.timeout))
}

// visit is what a page of the site does. When the client's file does not come, as from a process that died without a
// word, it is loaded again, as an impatient user does.
const visit = `
	const pages = new Set([page]);
	globalThis.join = (page) => {
		pages.add(page);
		globalThis.headcount?.join(page);
	};
	globalThis.leave = (page) => {
		told('leave', page);
		pages.delete(page);
		globalThis.headcount?.leave(page);
	};
	for (;;) {
		try {
			const late = new Promise((_, fail) => setTimeout(fail, 10_000, 'nothing comes'));
			const { Headcount } = await Promise.race([load('./headcount.js'), late]);
			globalThis.headcount = new Headcount({ token: () => token });
			break;
		} catch (error) {
			console.log('the page is loaded again: ' + error);
			await new Promise((again) => setTimeout(again, 500));
		}
	}
	for (const type of ['state', 'count', 'unread', 'error'])
		headcount.addEventListener(type, ({ detail }) => told(type, JSON.stringify(detail)));
	headcount.watch('*', () => {});
	headcount.unread(() => {});
	for (const page of pages) headcount.join(page);
`

// deed is what is done to a tab. Whoever has mu decides on it, and does it afterwards: scripts wait for mu.
type deed struct {
	tab  *surferTab
	what string
	do   func()
}

// act has the user do something with the browser.
func (u *surfer) act(r *rand.Rand) { u.do(u.decide(r)) }

func (u *surfer) do(deeds ...deed) {
	for _, d := range deeds {
		u.s.log("%s %s", d.tab.name, d.what)
		u.browser.Do(d.do)
	}
}

func (u *surfer) decide(r *rand.Rand) deed {
	u.mu.Lock()
	defer u.mu.Unlock()

	page := u.s.pages[r.IntN(len(u.s.pages))]
	what := r.IntN(8)
	opens := len(u.tabs) == 0 || what == 0 && len(u.tabs) < surferTabs
	if opens {
		return u.openLocked(page)
	}

	i := r.IntN(len(u.tabs))
	t := u.tabs[i]
	switch what {
	case 0, 1:
		u.tabs = slices.Delete(u.tabs, i, i+1)
		if r.IntN(2) == 0 {
			return deed{t, "is closed", func() { t.tab.Leave() }}
		}
		return deed{t, "crashes", func() { t.tab.Kill() }}
	case 2, 3:
		return t.hide(!t.hidden)
	case 4:
		return t.freeze(!t.frozen)
	}

	verb := "leave"
	if !t.joined[page] {
		verb = "join"
		u.s.crowd.arrives(u.user, page)
		// A frozen tab joins when it wakes, and is told of counts of before just then.
		if !t.frozen && !u.hasJoinedLocked(page) {
			t.arrival[page] = time.Now()
		}
	}
	t.joined[page] = !t.joined[page]
	maps.DeleteFunc(t.joined, func(_ string, joined bool) bool { return !joined })

	return deed{t, verb + "s " + page, func() { t.tab.Run(fmt.Sprintf("%s('%s')", verb, page)) }}
}

func (u *surfer) hasJoinedLocked(page string) bool {
	return slices.ContainsFunc(u.tabs, func(t *surferTab) bool { return t.joined[page] })
}

// leaves has a tab forget what it knew of a page. A frozen tab leaves much later than the user wants it, and is told of
// older counts before.
func (u *surfer) leaves(t *surferTab, page string) {
	u.mu.Lock()
	defer u.mu.Unlock()

	delete(t.last, page)
	delete(t.arrival, page)
}

// hide and freeze need the mu of the surfer.
func (t *surferTab) hide(yes bool) deed {
	t.hidden = yes
	return deed{t, fmt.Sprintf("is hidden: %t", yes), func() { t.tab.Hide(yes) }}
}

func (t *surferTab) freeze(yes bool) deed {
	t.frozen = yes
	do := func() { t.tab.Thaw() }
	if yes {
		do = func() { t.tab.Freeze() }
	}

	return deed{t, fmt.Sprintf("is frozen: %t", yes), do}
}

func (u *surfer) openLocked(page string) deed {
	u.opened++
	t := &surferTab{
		name: fmt.Sprintf("%s/%d", u.user.name, u.opened), joined: map[string]bool{page: true},
		last: map[string]seenCount{}, arrival: map[string]time.Time{},
	}
	u.tabs = append(u.tabs, t)
	u.s.crowd.arrives(u.user, page)

	globals := map[string]any{
		"token": u.user.token, "page": page,
		"told": func(kind, detail string) { u.told(t, kind, detail) },
	}

	return deed{t, "is opened, on " + page, func() { t.tab = u.browser.Open(globals, visit) }}
}

// rest has all tabs be seen and awake, so that they must know everything again.
func (u *surfer) rest() {
	u.mu.Lock()
	var deeds []deed
	for _, t := range u.tabs {
		if t.frozen {
			deeds = append(deeds, t.freeze(false))
		}
		if t.hidden {
			deeds = append(deeds, t.hide(false))
		}
	}
	u.mu.Unlock()

	u.do(deeds...)
}

func (u *surfer) pages() []string {
	u.mu.Lock()
	defer u.mu.Unlock()

	var pages []string
	for _, t := range u.tabs {
		pages = slices.AppendSeq(pages, maps.Keys(t.joined))
	}
	slices.Sort(pages)

	return slices.Compact(pages)
}

// told checks what a tab's page was told, and notes what it leaves.
func (u *surfer) told(t *surferTab, kind, detail string) {
	switch u.s.detail("%s: %s %s", t.name, kind, detail); kind {
	case "leave":
		u.leaves(t, detail)
	case "state":
		u.mu.Lock()
		t.state = detail
		u.mu.Unlock()
	case "unread":
		if detail != "0" {
			u.s.broken("–", "%s, who follows nothing, was told that %s are unread", t.name, detail)
		}
	case "error":
		u.s.broken("–", "%s was told of an error: %s", t.name, detail)
	case "count":
		c, err := counterOf([]byte(detail))
		if err != nil {
			u.s.broken("–", "%s was told %s: %v", t.name, detail, err)
			return
		}
		u.counted(t, c)
	}
}

func (u *surfer) counted(t *surferTab, c presence.Count) {
	u.s.crowd.told(t.name, c.Page, c.Users, c.Stale)

	u.mu.Lock()
	old, known := t.last[c.Page]
	t.last[c.Page] = seenCount{c.Version, c.Users, c.Stale}
	arrived, arrives := t.arrival[c.Page]
	first := arrives && !c.Stale
	if first {
		delete(t.arrival, c.Page)
	}
	u.mu.Unlock()

	if known && c.Version.Compare(old.version) < 0 && c.Version != (presence.Version{}) {
		u.s.broken("ordered", "%s was told version %s of %s after %s", t.name, c.Version, c.Page, old.version)
	}
	if first && time.Since(arrived) < arrivesWithin && u.s.store.past.lacks(c.Page, c.Version, u.user.hash) {
		u.s.broken("own join", "the first count of %s after a join of %s is %d, of version %s, without the user",
			c.Page, t.name, c.Users, c.Version)
	}
}

// knowsAll reports whether every tab is connected and knows the truth, and what a tab knows that does not.
func (u *surfer) knowsAll(truth map[string]int) (what string, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()

	for _, t := range u.tabs {
		if t.state != `"open"` {
			return fmt.Sprintf("%s has the state %s", t.name, t.state), false
		}
		for _, page := range append(slices.Sorted(maps.Keys(t.joined)), presence.AllPages) {
			is, known := t.last[page]
			if right := known && !is.stale && is.users == int64(truth[page]); !right {
				return fmt.Sprintf("%s knows %+v of %s (%t); want %d", t.name, is, page, known, truth[page]), false
			}
		}
	}

	return "", true
}

// comeBack waits until every tab is connected.
func (u *surfer) comeBack() {
	isAway := func() bool {
		_, ok := u.knowsAll(u.s.sizes())
		return !ok
	}
	for end := time.Now().Add(surferPatience); isAway() && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
	}
}

// check compares what the tabs know at rest with the model.
func (u *surfer) check(truth map[string]int) {
	if what, ok := u.knowsAll(truth); !ok {
		u.s.broken("newest", "%s", what)
	}
}
