package counterapi

import (
	"context"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/internal/wake"
)

// Viewer is a connection that looks at a set, and needs to know whether its user is a
// member. Live calls it while it holds a lock, so it must not call Live.
type Viewer interface {
	// Mine says whether the user is a member of the set. again is set when no update of the
	// set follows, so that the client has to be sent the newest one again.
	Mine(key string, member, again bool)
}

// viewer is a user who looks at a set, through some connections.
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

// mineCall is a call of Viewer.Mine.
type mineCall struct {
	viewer        Viewer
	key           string
	member, again bool
}

// View makes Live call v.Mine for a member and the set of key, to which v has subscribed: now
// if the membership is known, otherwise soon, and whenever it changes. Unview ends it.
func (l *Live) View(key, member string, v Viewer) {
	l.order.Lock()
	defer l.order.Unlock()
	l.mu.Lock()
	k := l.keys[key]
	if k == nil { // v has not subscribed
		l.mu.Unlock()
		return
	}
	w := k.viewers[member]
	if w == nil {
		if k.viewers == nil {
			k.viewers = map[string]*viewer{}
		}
		w = &viewer{conns: map[Viewer]struct{}{}}
		k.viewers[member] = w
		if k.origin != unknown { // otherwise read asks
			l.question(key, member)
		}
	}
	w.conns[v] = struct{}{}
	is := w.membership
	l.mu.Unlock()
	if is != undetermined {
		v.Mine(key, is == isMember, true)
	}
}

// Unview ends View.
func (l *Live) Unview(key, member string, v Viewer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.keys[key]
	if k == nil || k.viewers[member] == nil {
		return
	}
	delete(k.viewers[member].conns, v)
	if len(k.viewers[member].conns) == 0 {
		delete(k.viewers, member)
	}
}

// set sets the membership of the viewer, and adds the calls of its connections.
func (w *viewer) set(calls []mineCall, key string, is, again bool) []mineCall {
	w.membership = isNotMember
	if is {
		w.membership = isMember
	}
	for v := range w.conns {
		calls = append(calls, mineCall{v, key, is, again})
	}
	return calls
}

// changeMembers carries out what a notification says about the members of a set, and adds
// the calls of viewers. news says whether an update of the set follows. The caller holds mu.
func (l *Live) changeMembers(calls []mineCall, k *tracked, ch *counter.Update, news bool) []mineCall {
	key := ch.Counter.Key
	set := func(user string, is bool) {
		if w := k.viewers[user]; w != nil {
			w.notified = l.seq
			calls = w.set(calls, key, is, !news)
		}
	}
	switch {
	case news && ch.Counter.Value == 0 && !ch.Counter.Stale: // it was deleted or emptied
		for user := range k.viewers {
			set(user, false)
		}
	case ch.Reread || !ch.Counter.Touched():
		l.questionAll(key, k)
	default:
		for _, user := range ch.Joined {
			set(user, true)
		}
		for _, user := range ch.Left {
			set(user, false)
		}
	}
	return calls
}

// question makes an asker ask the store whether member is in the set of key; under mu.
func (l *Live) question(key, member string) {
	keys := l.asking[member]
	if keys == nil {
		keys = map[string]struct{}{}
		l.asking[member] = keys
	}
	keys[key] = struct{}{}
	wake.Signal(l.ask)
}

// questionAll is question for all viewers of a set; under mu.
func (l *Live) questionAll(key string, k *tracked) {
	for member := range k.viewers {
		l.question(key, member)
	}
}

// answer is an asker: it asks the store about members until ctx ends.
func (l *Live) answer(ctx context.Context) {
	failed := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.ask:
		}
		for {
			member, keys, began := l.nextQuestion()
			if keys == nil {
				break
			}
			if err := l.askAbout(ctx, member, keys, began); err == nil {
				failed = 0
				continue
			}
			l.mu.Lock()
			for _, key := range keys {
				l.question(key, member)
			}
			l.mu.Unlock()
			failed++
			if !outage.Sleep(ctx, outage.Pause(failed)) {
				return
			}
		}
	}
}

// nextQuestion returns a member to ask about, with at most as many keys as one read may
// have, and the seq before the read.
func (l *Live) nextQuestion() (member string, keys []string, began uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for member, asked := range l.asking {
		for key := range asked {
			if len(keys) == counter.MaxKeys {
				break
			}
			delete(asked, key)
			if k := l.keys[key]; k != nil && k.viewers[member] != nil {
				keys = append(keys, key)
			}
		}
		if len(asked) == 0 {
			delete(l.asking, member)
		}
		if len(keys) > 0 {
			wake.Signal(l.ask) // for the other askers
			return member, keys, l.seq
		}
	}
	return "", nil, 0
}

func (l *Live) askAbout(ctx context.Context, member string, keys []string, began uint64) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	readings, err := l.cfg.Counters.Read(ctx, keys, member, noLag)
	if err != nil {
		return err
	}
	l.order.Lock()
	defer l.order.Unlock()
	var calls []mineCall
	l.mu.Lock()
	for _, r := range readings {
		k := l.keys[r.Key]
		if k == nil || k.viewers[member] == nil {
			continue
		}
		w := k.viewers[member]
		if w.notified > began || r.Stale && w.membership != undetermined {
			continue // this process knows more than the store answered
		}
		if r.Away && !k.counter.Stale {
			l.reread(r.Key) // and asks again when it can be read
		}
		calls = w.set(calls, r.Key, r.Mine, true)
	}
	l.mu.Unlock()
	for _, c := range calls {
		c.viewer.Mine(c.key, c.member, c.again)
	}
	return nil
}
