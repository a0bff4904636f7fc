package webhook

import (
	"context"
	"crypto/cipher"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"headcount/internal/outage"
	"headcount/presence"
	"headcount/presence/hashkey"
)

const (
	// maxUsers bounds the users that wait to be judged. Beyond it, a user is left out until the next scan.
	maxUsers = 100_000

	usersEvery = time.Second // between two rounds
	// askTimeout is for the owners of users' partitions: when one is silent, the answers of others are not late yet.
	askTimeout = leastLate / 2
)

var (
	errChanged = errors.New("another process has reported a user meanwhile")
	errSilent  = errors.New("the owner of a user does not answer")
)

// users reports users who come and go, see the package.
type users struct {
	service *Service
	hooks   []*Hook
	seals   []cipher.AEAD // one for each key; the first one seals

	mu      sync.Mutex
	waiting map[presence.User]visit // users to judge in the next rounds; at most maxUsers
}

// visit is what a process has noticed of a user since it was last judged.
type visit struct {
	name     string    // qualified name of a user that came; otherwise empty
	departed time.Time // when to judge whether the user has left; zero: not at all
}

func newUsers(s *Service, hooks []*Hook) *users {
	u := &users{service: s, hooks: hooks, waiting: map[presence.User]visit{}}
	for _, key := range s.cfg.Keys {
		u.seals = append(u.seals, hashkey.Cipher(key, "headcount webhook users"))
	}

	return u
}

// judgeLater schedules a user to be judged: as arrived in the next round or, without a name, as departed at that time.
func (u *users) judgeLater(user presence.User, name string, at time.Time) {
	// A departure comes without a name, so no hook can be ruled out.
	if name != "" && !slices.ContainsFunc(u.hooks, func(h *Hook) bool { return h.matches(name) }) {
		return
	}

	u.mu.Lock()
	defer u.mu.Unlock()

	v, waits := u.waiting[user]
	if !waits && len(u.waiting) >= maxUsers {
		u.service.metrics.left.WithLabelValues("user").Inc()
		return
	}

	switch {
	case name != "":
		v.name = strings.Clone(name) // it may be part of a request, which would stay in memory
	// The later departure counts, so that each absence lasts for Settle.
	case at.After(v.departed):
		v.departed = at
	}
	u.waiting[user] = v
}

// repeat calls do until ctx ends.
func (u *users) repeat(ctx context.Context, every time.Duration, do func(context.Context, time.Time) error) {
	var store failing
	for outage.Sleep(ctx, every) {
		err := do(ctx, time.Now())
		// Other errors are those of owners, as while a partition moves, and no outage of the store.
		if err == nil || errors.Is(err, ErrUnavailable) {
			store.note(ctx, u.service.cfg.Log, err)
		} else {
			u.service.cfg.Log.Debug().Err(err).
				Msg("asking the owners of users which of them came or left failed; retrying")
		}
	}
}

// round judges the users that came, and those whose departures are due. Failed ones are repeated in the next round.
func (u *users) round(ctx context.Context, now time.Time) (err error) {
	names := u.takeDue(now)
	for some := range slices.Chunk(slices.Collect(maps.Keys(names)), presence.MaxAsked) {
		unjudged, failed := u.judge(ctx, some, names)
		err = errors.Join(err, failed)
		for _, user := range unjudged {
			u.judgeLater(user, names[user], now)
		}
	}

	return err
}

// takeDue returns the users to judge now: those that came, with their names, and those whose departures are due,
// without names.
func (u *users) takeDue(now time.Time) map[presence.User]string {
	u.mu.Lock()
	defer u.mu.Unlock()

	names := map[presence.User]string{}
	for user, v := range u.waiting {
		came := v.name != ""
		// An arrival is never put off: it keeps others from reporting the departure before.
		if !came && v.departed.After(now) {
			continue
		}
		// The process stood still. A user who came back meanwhile may just be between two pages.
		if !came && u.service.isLate(v.departed, now) {
			u.waiting[user] = visit{departed: now.Add(u.service.cfg.Settle)}
			continue
		}

		names[user] = v.name
		delete(u.waiting, user)
		// A user that came and left since is judged twice: the second time for the departure.
		if came && !v.departed.IsZero() {
			u.waiting[user] = visit{departed: v.departed}
		}
	}

	return names
}

// judge compares users with their reported states and reports the differences. names has the names of those that came.
// With an error it returns the users that have to be judged again.
func (u *users) judge(
	ctx context.Context, some []presence.User, names map[presence.User]string,
) (again []presence.User, err error) {
	seen := time.Now()
	changes := u.questions(some, names)
	// Read the states before asking the owner: if a user arrives after the owner's answer, the arrival replaces the
	// state, and the change below is refused.
	states, _, err := report(ctx, u.service.cfg.Store, changes)
	if err != nil {
		return some, err
	}
	present := u.present(ctx, some)

	for i, state := range states {
		c := &changes[i]
		c.Was = state
		c.Is = state

		user := userOf(c.Subject)
		name := names[user]
		came := name != ""
		is, answered := present[user]
		if !answered || came != is {
			continue // no answer, or the user has left or returned since, and another call reports that
		}
		if came {
			u.comes(c, name)
		} else {
			u.goes(c)
		}
	}

	changes = slices.DeleteFunc(changes, func(c Change) bool { return c.Was == c.Is })
	reported, err := u.service.report(ctx, seen, changes)
	for i, last := range reported {
		// These users are judged again, against the state of the other process.
		if err == nil && last != changes[i].Is {
			err = errChanged
		}
	}
	// All of them: it is not known which changes were made.
	if err != nil {
		return some, err
	}

	return silent(some, present)
}

// silent returns the users whose owners have not answered, with an error if there are any.
func silent(asked []presence.User, present map[presence.User]bool) (silent []presence.User, err error) {
	for _, user := range asked {
		_, answered := present[user]
		if !answered {
			silent = append(silent, user)
			err = errSilent
		}
	}

	return silent, err
}

// questions returns changes that only read the reported states of users.
func (u *users) questions(some []presence.User, names map[presence.User]string) (asked []Change) {
	for _, user := range some {
		name := names[user]
		for _, h := range u.hooks {
			// Only the reported states have the names of users who left, so any hook may have reported this user.
			if name == "" || h.matches(name) {
				asked = append(asked, Change{Hook: h.ID, Subject: fmt.Sprintf("%016x", uint64(user))})
			}
		}
	}

	return asked
}

// comes makes c the change of a user that is present. It replaces the reported state even if that says so already, so
// that a departure which another process is about to report is refused.
func (u *users) comes(c *Change, name string) {
	c.Is = u.seal(name)
	if c.Was == "" {
		u.addEvent(c, Online, name)
	}
}

// goes makes c the change of a user that is not present any more.
func (u *users) goes(c *Change) {
	c.Is = ""
	name, opened := u.open(c.Was)
	switch {
	case opened:
		u.addEvent(c, Offline, name)
	// No key opens the state, so nobody knows who has left.
	case c.Was != "":
		u.service.metrics.dropped.WithLabelValues(dropSealed).Inc()
	}
}

// scan finds the users whose reported states are wrong although no process is about to judge them.
func (u *users) scan(ctx context.Context, now time.Time) error {
	return errors.Join(u.scanReported(ctx, now), u.scanConnected(ctx))
}

// scanReported finds users that are reported as online but are absent, because the process that noticed the departure
// was killed. The owner of a hook's bucket scans for the hook.
func (u *users) scanReported(ctx context.Context, now time.Time) error {
	for _, o := range u.service.senders {
		if o.hook.condition != attendance || !o.owned.Load() {
			continue
		}

		reported, err := u.service.cfg.Store.Reported(ctx, o.hook.ID)
		if err != nil {
			return err
		}

		var online []presence.User
		// All of them are in memory, for a moment: see docs/bounds.md.
		for subject := range reported {
			online = append(online, userOf(subject))
		}

		for some := range slices.Chunk(online, presence.MaxAsked) {
			for user, is := range u.present(ctx, some) {
				if !is {
					// Not at once, since the user may be on the way to another page.
					u.judgeLater(user, "", now.Add(u.service.cfg.Settle))
				}
			}
		}
	}

	return nil
}

// scanConnected finds users that are connected to this process but not reported as online, and reports those that are
// present. While gateway and owner were parted, the owner let such a user time out; or the store has lost its state. No
// arrival follows, because the user has been on the page all the time.
func (u *users) scanConnected(ctx context.Context) error {
	names := map[presence.User]string{}
	for user, name := range u.service.cfg.Users.Connected() {
		names[user] = name
		if len(names) < presence.MaxAsked {
			continue
		}

		if err := u.judgeUnreported(ctx, names); err != nil {
			return err
		}
		clear(names)
	}

	return u.judgeUnreported(ctx, names)
}

// judgeUnreported judges those of up to presence.MaxAsked users that are not reported as online. It judges them at
// once, so that they take no place among those that wait: all users of this process may have been timed out.
func (u *users) judgeUnreported(ctx context.Context, names map[presence.User]string) error {
	asked := u.questions(slices.Collect(maps.Keys(names)), names)
	states, _, err := report(ctx, u.service.cfg.Store, asked)
	if err != nil {
		return err
	}

	var unreported []presence.User
	for i, state := range states {
		if state == "" {
			unreported = append(unreported, userOf(asked[i].Subject))
		}
	}
	// Almost always there is none, and the owners need not be asked.
	if len(unreported) == 0 {
		return nil
	}

	// Several hooks may lack a user.
	slices.Sort(unreported)
	_, err = u.judge(ctx, slices.Compact(unreported), names)
	// The user has just arrived, and another call has reported that; or the next scan finds the user again.
	if errors.Is(err, errChanged) || errors.Is(err, errSilent) {
		return nil
	}

	return err
}

// present returns which of up to presence.MaxAsked users are on a page, of those whose owners answer in time.
func (u *users) present(ctx context.Context, some []presence.User) map[presence.User]bool {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()

	return u.service.cfg.Users.Present(ctx, some)
}

// userOf returns the user with a subject.
func userOf(subject string) presence.User {
	n, _ := strconv.ParseUint(subject, 16, 64)

	return presence.User(n)
}

func (u *users) addEvent(c *Change, kind, name string) {
	e := newEvent(kind, name)
	// In the outbox it is sealed, and opened just before the event is sent.
	e.User = presence.KeyOf(name)

	c.kind = kind
	c.Event = u.seal(e.encode())
}

// reveal decrypts sealed events. It leaves out events that no secret decrypts.
func (u *users) reveal(sealed []string) (events []string) {
	for _, text := range sealed {
		if event, ok := u.open(text); ok {
			events = append(events, event)
		}
	}

	return events
}

// seal returns a text in the form that stores may have if it names a user. No two results are equal.
func (u *users) seal(text string) string {
	return base64.RawStdEncoding.EncodeToString(u.seals[0].Seal(nil, nil, []byte(text), nil))
}

// open returns the text that seal was called with.
func (u *users) open(sealed string) (text string, ok bool) {
	b, err := base64.RawStdEncoding.DecodeString(sealed)
	if err != nil {
		return "", false
	}

	// Keys rotate: what an older one has sealed may still wait.
	for _, seal := range u.seals {
		opened, err := seal.Open(nil, nil, b, nil)
		if err == nil {
			return string(opened), true
		}
	}

	return "", false
}
