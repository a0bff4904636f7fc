package counterapi

import (
	"context"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/internal/wake"
)

// Viewer is a connection that subscribes to a set, and needs to know whether its user is a member. Live calls it while
// holding a lock, so it must not call Live.
type Viewer interface {
	// Mine reports whether the user is a member of the set. again is set if no update of the set follows, so that the
	// newest one must be sent to the client again.
	Mine(key string, member, again bool)
}

// viewer is a user that watches a set through one or more connections.
type viewer struct {
	membership membership
	notified   uint64 // Live.seq at the newest notification about the user
	conns      map[Viewer]struct{}
}

// membership says whether a user is in a set.
type membership uint8

const (
	undetermined membership = iota // the store has not answered yet
	isMember
	isNotMember
)

// mineNotice tells a viewer whether its user is a member.
type mineNotice struct {
	viewer        Viewer
	key           string
	member, again bool
}

// notifyViewersLocked delivers notices, under Live.order.
func notifyViewersLocked(notices []mineNotice) {
	for _, c := range notices {
		c.viewer.Mine(c.key, c.member, c.again)
	}
}

// View makes Live call v.Mine for a member and the set of key, to which v has subscribed: at once if the membership is
// known, otherwise soon, and whenever it changes. Unview ends it.
func (l *Live) View(key, member string, v Viewer) {
	l.order.Lock()
	defer l.order.Unlock()

	// With order held, so that no notification comes between the two calls.
	is := l.addViewer(key, member, v)
	if is != undetermined {
		v.Mine(key, is == isMember, true)
	}
}

// addViewer adds a connection to the viewers of a set, and returns the membership of its user, if it is known.
func (l *Live) addViewer(key, member string, v Viewer) membership {
	l.mu.Lock()
	defer l.mu.Unlock()

	k := l.keys[key]
	if k == nil { // v has not subscribed to the set
		return undetermined
	}

	w := k.viewers[member]
	if w == nil {
		w = &viewer{conns: map[Viewer]struct{}{}}
		if k.viewers == nil {
			k.viewers = map[string]*viewer{}
		}
		k.viewers[member] = w
		if k.origin != unknown { // otherwise the pending read of the set asks
			l.questionLocked(key, member)
		}
	}
	w.conns[v] = struct{}{}

	return w.membership
}

// Unview ends View.
func (l *Live) Unview(key, member string, v Viewer) {
	l.mu.Lock()
	defer l.mu.Unlock()

	k := l.keys[key]
	if k == nil || k.viewers[member] == nil {
		return
	}

	conns := k.viewers[member].conns
	delete(conns, v)
	if len(conns) == 0 {
		// A question about the member that is under way then finds nobody.
		delete(k.viewers, member)
	}
}

// set sets the membership of the viewer, and appends the notices for its connections.
func (w *viewer) set(notices []mineNotice, key string, is, again bool) []mineNotice {
	w.membership = isNotMember
	if is {
		w.membership = isMember
	}

	// Each tab of the member has a connection.
	for v := range w.conns {
		notices = append(notices, mineNotice{v, key, is, again})
	}

	return notices
}

// changeMembersLocked applies what a notification says about the members of a set, and appends the notices for viewers.
// news says whether an update of the set follows.
func (l *Live) changeMembersLocked(notices []mineNotice, k *tracked, ch *counter.Update, news bool) []mineNotice {
	key := ch.Counter.Key
	set := func(user string, is bool) {
		// Most members have no connection here.
		w := k.viewers[user]
		if w == nil {
			return
		}
		// So that an answer of the store that is on its way does not undo this.
		w.notified = l.seq
		notices = w.set(notices, key, is, !news)
	}

	emptied := news && ch.Counter.Value == 0 && !ch.Counter.Stale // or it was deleted
	namesAll := !ch.Reread && ch.Counter.Touched()
	switch {
	case emptied:
		for user := range k.viewers {
			set(user, false)
		}
	case namesAll:
		for _, user := range ch.Joined {
			set(user, true)
		}
		for _, user := range ch.Left {
			set(user, false)
		}
	default:
		// The notification does not name everybody who has joined or left.
		l.questionAllLocked(key, k)
	}

	return notices
}

// questionLocked schedules the question whether member is in the set of key.
func (l *Live) questionLocked(key, member string) {
	keys := l.asking[member]
	if keys == nil {
		keys = map[string]struct{}{}
		l.asking[member] = keys
	}

	keys[key] = struct{}{}
	wake.Signal(l.ask)
}

// questionAllLocked is questionLocked for all viewers of a set.
func (l *Live) questionAllLocked(key string, k *tracked) {
	for member := range k.viewers {
		l.questionLocked(key, member)
	}
}

// answer is the loop of an asker: it reads memberships from the store until ctx ends.
func (l *Live) answer(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.ask:
		}

		if !l.answerAll(ctx) {
			return
		}
	}
}

// answerAll reads memberships until none are left to read. It returns false if ctx has ended.
func (l *Live) answerAll(ctx context.Context) bool {
	for failed := 0; ; {
		member, keys, began := l.nextQuestion()
		if keys == nil {
			return true
		}

		err := l.askAbout(ctx, member, keys, began)
		if err == nil {
			failed = 0
			continue
		}

		// Before the pause, during which a viewer may leave, or another question of the member come.
		l.askAgain(member, keys)
		failed++
		if !outage.Sleep(ctx, outage.Pause(failed)) {
			return false
		}
	}
}

// askAgain schedules another read of a member's memberships.
func (l *Live) askAgain(member string, keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for _, key := range keys {
		l.questionLocked(key, member)
	}
}

// nextQuestion returns a member, with at most as many keys as one read may have, and the seq before the read.
func (l *Live) nextQuestion() (member string, keys []string, began uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for member, asked := range l.asking {
		keys := l.takeViewedLocked(asked, member)
		if len(asked) == 0 {
			delete(l.asking, member)
		}

		if len(keys) > 0 {
			wake.Signal(l.ask) // wakes another asker
			return member, keys, l.seq
		}
	}

	return "", nil, 0
}

// takeViewedLocked removes as many keys from asked as one read may have, and returns those that the member still
// watches.
func (l *Live) takeViewedLocked(asked map[string]struct{}, member string) (keys []string) {
	for key := range asked {
		if len(keys) == counter.MaxKeys {
			break
		}

		delete(asked, key)
		k := l.keys[key]
		if k != nil && k.viewers[member] != nil {
			keys = append(keys, key)
		}
	}

	return keys
}

// askAbout reads from the store whether a member is in sets, and notifies the viewers. The read is newer than
// notifications up to began.
func (l *Live) askAbout(ctx context.Context, member string, keys []string, began uint64) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	readings, err := l.cfg.Counters.Read(ctx, keys, member, noLag)
	if err != nil {
		return err
	}

	// Hold order until the notices are sent, so that no later answer is sent before this one.
	l.order.Lock()
	defer l.order.Unlock()
	notifyViewersLocked(l.acceptMemberships(readings, member, began))

	return nil
}

// acceptMemberships applies the store's answers about a member, and returns the notices for the viewers.
func (l *Live) acceptMemberships(readings []counter.Reading, member string, began uint64) (notices []mineNotice) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for _, r := range readings {
		k := l.keys[r.Key]
		if k == nil || k.viewers[member] == nil {
			continue
		}

		// The store's answer may be older than what this process knows.
		w := k.viewers[member]
		old := r.Stale && w.membership != undetermined
		if old || w.notified > began {
			continue
		}

		if r.Away && !k.counter.Stale {
			l.rereadLocked(r.Key) // its memberships are read again with it
		}
		// No update follows, so the newest is sent again, in the right form.
		notices = w.set(notices, r.Key, r.Mine, true)
	}

	return notices
}
