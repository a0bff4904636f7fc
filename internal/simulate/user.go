package simulate

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// A user is one person with any number of tabs. Anonymous users get their id from
// the server with the first tab; the others send it back, so that they count as one.
type user struct {
	name string // the token's subject; not sent without tokens

	// first holds a value while a tab asks for the user's first id. The other tabs
	// wait for it, or each would become a user of its own.
	first chan struct{}

	mu   sync.Mutex
	id   string // signed, as it is sent back; empty until the first welcome
	who  string // the same as `welcome` names the user
	tabs []*tab
}

func newUser(name string) *user { return &user{name: name, first: make(chan struct{}, 1)} }

// claim returns the id to dial with. When there is none yet it lets one caller
// through at a time; release lets the next one look again.
func (u *user) claim(ctx context.Context) (id string, release func(), err error) {
	if id := u.signed(); id != "" {
		return id, func() {}, nil
	}

	select {
	case u.first <- struct{}{}:
	case <-ctx.Done():
		return "", nil, ctx.Err()
	}

	// Callers release by defer as well, which must not free the place of another tab.
	release = sync.OnceFunc(func() { <-u.first })

	// The tab that was let through before may have brought the id.
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
// takes the tab for another user than the user's other tabs: then the tab must dial again. renamed says that the server
// has given the user a new id, as a server does that has lost its secret in a restart.
func (u *user) acceptWelcome(sent, who, id string) (ok, renamed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()

	// The user got another id after this tab had dialled; it dials again with that one.
	if u.who != who && u.id != sent {
		return false, false
	}

	renamed = u.who != "" && u.who != who
	u.who = who
	u.id = id

	return true, renamed
}

// called returns what the server calls the user.
func (u *user) called() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return cmp.Or(u.who, u.name) // with tokens it is the name, which each tab checks
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

// open returns the tabs that are meant to stay. A tab that has left is still
// among u.tabs until its goroutine has ended.
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
