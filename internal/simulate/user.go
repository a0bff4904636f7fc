package simulate

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// A user is one person with any number of tabs. The first tab of an anonymous user gets an id from the server. The
// other tabs present the same id, so that they count as one user.
type user struct {
	name string // the token's subject; not sent without tokens

	// first holds a value while a tab requests the user's first id. The other tabs wait for it, because otherwise each
	// would become a user of its own.
	first chan struct{}

	mu   sync.Mutex
	id   string // signed by the server; empty until the first welcome
	who  string // the name of the user in `welcome`
	tabs []*tab
}

func newUser(name string) *user { return &user{name: name, first: make(chan struct{}, 1)} }

// claim returns the id to dial with. Until there is one, it lets one caller at a time dial without it; release lets the
// next one go on.
func (u *user) claim(ctx context.Context) (id string, release func(), err error) {
	if id := u.signed(); id != "" {
		return id, func() {}, nil
	}

	select {
	case u.first <- struct{}{}:
	case <-ctx.Done():
		return "", nil, ctx.Err()
	}

	// Once, because callers release again by defer, which must not free the place of another tab.
	release = sync.OnceFunc(func() { <-u.first })

	// The tab before may have got the id.
	if id := u.signed(); id != "" {
		release()
		return id, release, nil
	}

	return "", release, nil
}

func (u *user) signed() string {
	u.mu.Lock()
	defer u.mu.Unlock()

	return u.id
}

// acceptWelcome stores what `welcome` says about a tab that dialled with the id sent. It reports false if the server
// has welcomed the tab as another user than the user's other tabs: then the tab must dial again. renamed says that the
// server has given the user a new id, for example because it has lost its secret in a restart.
func (u *user) acceptWelcome(sent, who, id string) (ok, renamed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()

	// The user has got another id since this tab dialled, and the tab must dial again with that one.
	if u.who != who && u.id != sent {
		return false, false
	}

	renamed = u.who != "" && u.who != who
	u.who = who
	u.id = id

	return true, renamed
}

// called returns the server's name for the user.
func (u *user) called() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return cmp.Or(u.who, u.name) // with tokens the server must use the token's name, as each tab checks
}

func (u *user) add(c *tab) {
	u.mu.Lock()
	defer u.mu.Unlock()

	u.tabs = append(u.tabs, c)
}

func (u *user) remove(c *tab) {
	u.mu.Lock()
	defer u.mu.Unlock()

	u.tabs = slices.DeleteFunc(u.tabs, func(t *tab) bool { return t == c })
}

// open returns the tabs that have not left. A tab that has left stays in u.tabs until its goroutine has ended.
func (u *user) open() []*tab {
	u.mu.Lock()
	defer u.mu.Unlock()

	var open []*tab
	for _, c := range u.tabs {
		if !c.left() {
			open = append(open, c)
		}
	}

	return open
}
