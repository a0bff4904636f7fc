package member

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/unread"
)

// Unread notifications in a simulation: users who follow pages and read them, a model of what is unread, and the
// changes and follows in the store.
//
// The model knows nothing of levels and records. It only knows when each call began and when it was answered: a change
// that began after the user had read is unread, and one that was answered before the user began to read is not. If both
// were under way at the same moment, either is right. So the model knows a number exactly, or within two bounds.
// was under way at the same moment it asks for neither, so a number is known exactly or within two bounds.

const (
	// simReaders of the crowd follow pages. The last of them is the author of ownPage.
	simReaders = 4
	// ownPage is followed and changed by its author alone, who so never has anything unread of it.
	ownPage = "own"
	// simNews is how many other pages they follow. Some change for the first time just before the store loses that.
	simNews = 10
	// readWithin is how long a read over the WebSocket may be under way: its gateway may stand still meanwhile.
	readWithin = 20 * time.Second
)

// readers are the users who follow pages.
type readers struct {
	s      *simulation
	chance *rand.Rand // of the driver
	ended  chan struct{}

	mu      sync.Mutex // guards the fields below
	changes []*pageChange
	steps   map[*user][]step // in the order in which they began
	busy    map[*user]bool   // users with a step under way
	made    int              // calls
	under   int              // calls that are under way
	// most[user] is how much can be unread at all, whatever is read and lost: the changes by others of pages that the
	// user had ever asked to follow.
	most     map[*user]int64
	followed map[*user][]string
}

// period is from when a call was first made to when it was answered.
type period struct {
	begin, end time.Time // end is zero while it is under way
	doubtful   bool      // the store may have lost its effect
}

func (p *period) isOver() bool { return !p.end.IsZero() }

// pageChange is a change of a page.
type pageChange struct {
	*period
	page string
	by   *user // nil: nobody
}

// step is what a user did: follow a page, end that, or read one page or all pages.
type step struct {
	*period
	does stepKind
	page string // empty: all
}

type stepKind int

const (
	follows stepKind = iota
	unfollows
	reads
	mayRead // over the WebSocket: no answer says whether it was carried out
)

func (one step) concerns(page string) bool { return one.page == page || one.page == "" }

// simJudged counts the numbers that were checked at rest, and simExact those of them that the model knew exactly.
var simExact, simJudged atomic.Int64

func newReaders(s *simulation) *readers {
	return &readers{
		s: s, chance: chance(s.seed, "readers"), ended: make(chan struct{}),
		steps: map[*user][]step{}, busy: map[*user]bool{}, most: map[*user]int64{}, followed: map[*user][]string{},
	}
}

// users returns those who follow pages.
func (r *readers) users() []*user { return r.s.crowd.users[:min(simReaders, len(r.s.crowd.users))] }

// act makes a user do something about notifications, or changes a page.
func (r *readers) act() {
	u := r.users()[r.chance.IntN(simReaders)]
	page := fmt.Sprint("news", r.chance.IntN(simNews))
	isAuthor := u == r.users()[simReaders-1]
	if isAuthor {
		page = ownPage
	}

	switch what := r.chance.IntN(12); what {
	case 0, 1:
		r.do(u, follows, page)
	case 2:
		r.do(u, unfollows, page)
	case 3:
		r.do(u, reads, page)
	case 4:
		r.do(u, reads, "")
	case 5:
		r.readInTab(u, page)
	default:
		by := u
		if what%2 == 0 && !isAuthor {
			by = nil
		}
		r.change(page, by)
	}
}

// do makes a call for a user who has no other one under way.
func (r *readers) do(u *user, does stepKind, page string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy[u] {
		return
	}

	r.busy[u] = true

	method, path, body := http.MethodPut, "/-/me/follows/"+page, ""
	switch does {
	case unfollows:
		method = http.MethodDelete
	case reads:
		path = "/-/me/unread"
		body = `{"action":"reset"}`
		if page != "" {
			body = `{"action":"reset","page":"` + page + `"}`
		}
	}

	p := r.repeatLocked(u.name+": "+method+" "+path+" "+body, func(gateway, _ string) int {
		status, _ := r.s.request(gateway, method, path, u.token, body)
		return status
	}, func() { r.busy[u] = false })

	r.steps[u] = append(r.steps[u], step{p, does, page})
	isNew := !slices.Contains(r.followed[u], page)
	if does == follows && isNew {
		r.followed[u] = append(r.followed[u], page)
		for _, c := range r.changes {
			// A change that is under way may be made after the follow.
			if c.page == page && c.by != u && !c.isOver() {
				r.most[u]++
			}
		}
	}
}

// change changes a page.
func (r *readers) change(page string, by *user) {
	r.mu.Lock()
	defer r.mu.Unlock()

	body := `{}`
	if by != nil {
		body = `{"by":"` + by.name + `"}`
	}

	p := r.repeatLocked("change of "+page+" "+body, func(gateway, key string) int {
		status, _ := r.s.request(gateway, http.MethodPost, "/"+page+"/changes", "", body, simAPIKey, key)
		return status
	}, func() {})
	r.changes = append(r.changes, &pageChange{p, page, by})
	for u, pages := range r.followed {
		if u != by && slices.Contains(pages, page) {
			r.most[u]++
		}
	}
}

// repeatLocked makes a call under one key, each time at some gateway, until it succeeds.
func (r *readers) repeatLocked(what string, call func(gateway, key string) (status int), done func()) *period {
	r.made++
	r.under++
	number := r.made
	p := &period{begin: time.Now()}
	luck := chance(r.s.seed, fmt.Sprint("call ", number))
	r.s.log("call %d: %s", number, what)

	r.s.clients.Go(func() {
		for {
			status := call(r.s.someGateway(luck), fmt.Sprint("Idempotency-Key: ", number))
			if status/100 == 2 {
				break
			}

			pause := time.NewTimer(200*time.Millisecond + time.Duration(luck.Int64N(int64(200*time.Millisecond))))
			select {
			case <-pause.C:
			case <-r.ended:
				return
			}
		}

		r.mu.Lock()
		p.end = time.Now()
		r.under--
		done()
		r.mu.Unlock()
		r.s.detail("call %d is answered", number)
	})

	return p
}

// readInTab sends a read message over one of the user's connections.
func (r *readers) readInTab(u *user, page string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(u.tabs) == 0 {
		return
	}

	t := u.tabs[r.chance.IntN(len(u.tabs))]
	r.s.log("%s reads %s", t.name, page)
	r.steps[u] = append(r.steps[u], step{
		&period{begin: time.Now(), end: time.Now().Add(readWithin)}, mayRead, page,
	})

	t.mu.Lock()
	defer t.mu.Unlock()
	t.say(`{"type":"read","page":"` + page + `"}`)
}

// idle reports whether all calls are answered.
func (r *readers) idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.under == 0
}

// lose marks what was answered after a moment as doubtful: the store has lost it.
func (r *readers) lose(after time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.changes = slices.DeleteFunc(r.changes, func(c *pageChange) bool { return c.isOver() && c.begin.After(after) })
	for _, c := range r.changes {
		c.doubtAfter(after)
	}

	for u, steps := range r.steps {
		r.steps[u] = slices.DeleteFunc(steps, func(one step) bool {
			return one.does != mayRead && one.isOver() && one.begin.After(after)
		})
		for _, one := range r.steps[u] {
			one.doubtAfter(after)
		}
	}
}

// doubtAfter marks the period as doubtful if the store has lost what it received after the moment.
func (p *period) doubtAfter(moment time.Time) {
	stays := p.isOver() && p.end.Before(moment)
	p.doubtful = p.doubtful || !stays
}

// told checks a number that a user has received.
func (r *readers) told(by string, u *user, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if n < 0 || n > r.most[u] {
		r.s.broken("–", "%s was told that %d are unread, of at most %d", by, n, r.most[u])
	}
}

// check compares the numbers of all users with the model, at rest.
func (r *readers) check() {
	for _, u := range r.users() {
		least, most := r.bounds(u)
		simJudged.Add(1)
		if least == most {
			simExact.Add(1)
		}

		for _, gateway := range r.s.where {
			status, body := r.s.request(gateway, http.MethodGet, "/-/me/unread", u.token, "")
			var answer struct{ Count int64 }
			err := json.Unmarshal(body, &answer)
			if status != http.StatusOK || err != nil {
				r.s.broken("newest", "%s answers %d %s to what is unread, %v", gateway, status, body, err)
				continue
			}
			if answer.Count < least || answer.Count > most {
				r.s.broken("newest", "%s says that %d are unread of %s, want %d to %d",
					gateway, answer.Count, u.name, least, most)
			}

			// Every tab, at whichever gateway, has the number of the store.
			for _, t := range u.tabs {
				t.mu.Lock()
				if !t.hasUnread || t.unread != answer.Count {
					r.s.broken("newest", "%s at %s was last told that %d are unread (%t), and %s says %d",
						t.name, t.at, t.unread, t.hasUnread, gateway, answer.Count)
				}

				t.mu.Unlock()
			}
		}
	}
}

// bounds returns how many changes the user has not read, at least and at most.
func (r *readers) bounds(u *user) (least, most int64) {
	r.mu.Lock()
	defer r.mu.Unlock()

	least, most = r.boundsOfLocked(u, ownPage)
	for n := range simNews {
		l, m := r.boundsOfLocked(u, fmt.Sprint("news", n))
		least += l
		most += m
	}

	return least, most
}

func (r *readers) boundsOfLocked(u *user, page string) (least, most int64) {
	var steps []step
	var doubtful []int
	for _, one := range r.steps[u] {
		if !one.concerns(page) {
			continue
		}
		isRead := one.does == mayRead // this one is in doubt anyway
		if one.doubtful && !isRead {
			doubtful = append(doubtful, len(steps))
		}
		steps = append(steps, one)
	}

	// The store has lost each of the doubtful steps, or has not: all combinations are tried.
	doubtful = doubtful[max(0, len(doubtful)-6):]
	least = -1
	for lost := range 1 << len(doubtful) {
		var left []step
		for i, one := range steps {
			at := slices.Index(doubtful, i)
			if at < 0 || lost>>at&1 == 0 {
				left = append(left, one)
			}
		}

		l, m := r.unreadLocked(u, page, left)
		if least < 0 {
			least = l
		}
		least = min(least, l)
		most = max(most, m)
	}

	return least, most
}

// unreadLocked returns how much of a page is unread after these steps, at least and at most.
func (r *readers) unreadLocked(u *user, page string, steps []step) (least, most int64) {
	var seen *period // the read or follow since which changes are unread; nil: the user does not follow
	for _, one := range steps {
		switch one.does {
		case follows:
			if seen == nil {
				seen = one.period
			}
		case unfollows:
			seen = nil
		case reads:
			if seen != nil {
				seen = one.period
			}
		}
	}

	if seen == nil {
		return 0, 0
	}

	for _, c := range r.changes {
		isRead := c.isOver() && c.end.Before(seen.begin)
		if c.page != page || c.by == u || isRead {
			continue
		}

		most++
		isSure := c.isOver() && !c.doubtful && seen.isOver() && c.begin.After(seen.end)
		mayBeRead := slices.ContainsFunc(steps, func(one step) bool {
			return one.does == mayRead && !c.begin.After(one.end)
		})
		if isSure && !mayBeRead {
			least++
		}
	}

	return least, most
}

// unreadData is what the store knows of changes and follows in addition to the inner store.
type unreadData struct {
	log      []unreadWrite
	before   map[string]int64 // by page: unread.Level.Before
	restored bool             // came back older and not claimed again yet, so lost versions could be given again
	void     uint64           // incarnation of what was never written
	closed   bool             // it accepts nothing, because it is about to be lost
}

// unreadWrite is a write that the store has made: a change or, with a user, a record.
type unreadWrite struct {
	at     time.Time
	page   string
	change unread.Change
	user   unread.User
	record unread.Record
}

// restoreUnread fills an inner store that is empty with what was written up to a moment. As in Redis, all its versions
// are above those that were lost.
func (s *sharedStore) restoreUnread(until time.Time) {
	d := &s.unread
	d.log = slices.DeleteFunc(d.log, func(w unreadWrite) bool { return w.at.After(until) })
	d.before = map[string]int64{}
	d.restored = len(d.log) > 0
	d.void = 0

	ctx := context.Background()
	for _, w := range d.log {
		if w.page != "" {
			must(s.inner.Change(ctx, w.page, w.change))
			levels, _, err := s.inner.Levels(ctx, w.user, []string{w.page})
			must(err)
			d.before[w.page] = levels[0].All
			continue
		}

		old, err := s.inner.Records(ctx, []unread.User{w.user})
		must(err)
		_, err = s.inner.Save(ctx, w.user, old[0], w.record)
		must(err)
	}
}

// writeUnread makes a write, and notes it if it was made.
func (h *handle) writeUnread(ctx context.Context, w unreadWrite, write func() error) error {
	return h.call(ctx, func() error {
		if h.unread.closed {
			return presence.ErrUnavailable
		}

		err := write()
		if err == nil {
			w.at = time.Now()
			h.unread.log = append(h.unread.log, w)
		}

		return err
	})
}

func (h *handle) readUnread(ctx context.Context, read func() error) error {
	return h.call(ctx, func() error {
		if h.unread.restored {
			return presence.ErrUnavailable
		}
		return read()
	})
}

// claimed handles a claim. The first one of another generation gives all data incarnations above those before the loss,
// whether or not its process repairs a loss: the one that could may be dead.
func (d *unreadData) claimed(generation uint64) {
	if generation > 0 && d.void == 0 {
		d.void = uint64(time.Now().UnixMilli())
		d.restored = false
	}
}

// patchLevel gives a level what an inner store that was emptied lacks.
func (h *handle) patchLevel(page string, l *unread.Level) {
	l.Before = h.unread.before[page]
	if l.Incarnation == 0 {
		l.Incarnation = h.unread.void
	}
}

func (h *handle) Change(ctx context.Context, page string, c unread.Change) error {
	return h.writeUnread(ctx, unreadWrite{page: page, change: c}, func() error { return h.inner.Change(ctx, page, c) })
}

func (h *handle) Save(ctx context.Context, user unread.User, old, r unread.Record) (v presence.Version, err error) {
	err = h.writeUnread(ctx, unreadWrite{user: user, record: r.Clone()}, func() (err error) {
		v, err = h.inner.Save(ctx, user, old, r)
		return err
	})

	return v, err
}

func (h *handle) Levels(
	ctx context.Context, user unread.User, pages []string,
) (levels []unread.Level, owns []unread.Own, err error) {
	err = h.readUnread(ctx, func() (err error) {
		levels, owns, err = h.inner.Levels(ctx, user, pages)
		for i := range levels {
			h.patchLevel(pages[i], &levels[i])
		}

		return err
	})
	if err != nil {
		return nil, nil, err
	}

	return levels, owns, nil
}

func (h *handle) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (l unread.Level, owns map[unread.User]unread.Own, err error) {
	err = h.readUnread(ctx, func() (err error) {
		l, owns, err = h.inner.Authors(ctx, page, since, users)
		h.patchLevel(page, &l)

		return err
	})
	if err != nil {
		return unread.Level{}, nil, err
	}

	return l, owns, nil
}

func (h *handle) Notes(ctx context.Context, pages []string) (notes []unread.Note, err error) {
	err = h.readUnread(ctx, func() (err error) {
		notes, err = h.inner.Notes(ctx, pages)
		return err
	})
	if err != nil {
		return nil, err
	}

	return notes, nil
}

func (h *handle) Records(ctx context.Context, users []unread.User) (records []unread.Record, err error) {
	err = h.readUnread(ctx, func() (err error) {
		records, err = h.inner.Records(ctx, users)
		return err
	})
	if err != nil {
		return nil, err
	}

	return records, nil
}
