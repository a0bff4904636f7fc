package counterapi

import (
	"context"

	"headcount/counter"
	"headcount/internal/outage"
)

// Viewer is a connection that looks at a counter, and is told whether its user is a
// member. It is called while Live tells others nothing, and must not call Live.
type Viewer interface {
	// Mine says that the user is in the set, or is not. When again is set, no update of
	// the counter comes with it.
	Mine(key string, is, again bool)
}

// viewer is a user who looks at a set, through some connections.
type viewer struct {
	known, mine bool
	told        bool // the store told something since the last question began
	conns       map[Viewer]struct{}
}

// View has v told whether the member is in the set of key, which v has subscribed to:
// now when that is known, else soon, and when it changes. Unview ends it.
func (l *Live) View(key, member string, v Viewer) {
	l.telling.Lock()
	defer l.telling.Unlock()
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
		if k.known { // else it is asked about when the counter is followed
			l.question(key, member)
		}
	}
	w.conns[v] = struct{}{}
	known, mine := w.known, w.mine
	l.mu.Unlock()
	if known {
		v.Mine(key, mine, true)
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

// question has the store asked whether member is in key; under mu.
func (l *Live) question(key, member string) {
	keys := l.asking[member]
	if keys == nil {
		keys = map[string]struct{}{}
		l.asking[member] = keys
	}
	keys[key] = struct{}{}
	signal(l.ask)
}

// answer asks the store about members until ctx ends.
func (l *Live) answer(ctx context.Context) {
	failed := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.ask:
		}
		for {
			member, keys := l.next()
			if keys == nil {
				break
			}
			if err := l.askAbout(ctx, member, keys); err == nil {
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

// next takes a member to ask about, with at most as many keys as one read has.
func (l *Live) next() (member string, keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for member, asked := range l.asking {
		for key := range asked {
			if len(keys) == counter.MaxKeys {
				break
			}
			delete(asked, key)
			k := l.keys[key]
			if k == nil || k.viewers[member] == nil {
				continue // it looks no more
			}
			k.viewers[member].told = false
			keys = append(keys, key)
		}
		if len(asked) == 0 {
			delete(l.asking, member)
		}
		if len(keys) > 0 {
			signal(l.ask) // for the other lookers
			return member, keys
		}
	}
	return "", nil
}

func (l *Live) askAbout(ctx context.Context, member string, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	read, err := l.store.Read(ctx, keys, member, noLag)
	if err != nil {
		return err
	}
	l.telling.Lock()
	defer l.telling.Unlock()
	for _, r := range read {
		var tell []Viewer
		l.mu.Lock()
		if k := l.keys[r.Key]; k != nil {
			if w := k.viewers[member]; w != nil && !w.told && !(w.known && r.Stale) {
				w.known, w.mine = true, r.Mine
				for v := range w.conns {
					tell = append(tell, v)
				}
			}
		}
		l.mu.Unlock()
		for _, v := range tell {
			v.Mine(r.Key, r.Mine, true)
		}
	}
	return nil
}
