package fanout

import (
	"container/list"
	"time"

	"headcount/presence"
)

// watched is a topic that has subscribers in some shard, or had until a moment ago. The hub's lock guards it.
type watched struct {
	update   presence.Update  // the newest update that is or was right; its Topic is always set
	newest   presence.Version // the newest received, stale ones included
	known    bool             // update may be delivered, which it may not before the topic is attached
	endpoint endpoint
	kind     *kind
	bucket   uint16        // among presence.DefaultBuckets
	refs     int32         // number of shards with subscribers, and of watchers
	left     time.Duration // when refs fell to 0, since Hub.born

	in *list.List    // backlog.fresh, backlog.lingering or nil
	at *list.Element // its place there
}

// endpoint is the state of a topic's endpoint in the store. A topic whose kind has a Source needs none, and counts as
// attached from the start.
type endpoint uint8

const (
	unasked  endpoint = iota // the store was never asked to attach it, so it need not be detached
	asked                    // the store was asked to attach it, and may have done so
	outdated                 // the store has attached it, but it has to be attached and read again
	attached                 // the store has attached it, and its updates arrive
)

// remember keeps the newest update until the topic is attached, so that no older one is delivered then.
func (w *watched) remember(u presence.Update) {
	if !u.Stale && !w.update.Newer(u) {
		w.update = u
	}
}

// note records which version the store has.
func (w *watched) note(u presence.Update) {
	if u.Version.Compare(w.newest) > 0 {
		w.newest = u.Version
	}
}

// outdates reports whether the store is known to have a newer version than u.
func (w *watched) outdates(u presence.Update) bool { return u.Version.Compare(w.newest) < 0 }

// hasEndpoint reports whether the store should have the topic's endpoint.
func (w *watched) hasEndpoint() bool {
	// An outdated topic that nobody wants is attached again when somebody does, so it may be missing until then.
	wanted := w.refs > 0 && w.endpoint >= outdated
	return w.kind.source == nil && (wanted || w.endpoint == attached)
}

// overtook reports whether the known update overtook a stale one, so that it is as new.
func (w *watched) overtook(u *presence.Update) bool {
	versioned := u.Version != (presence.Version{})
	return u.Stale && versioned && !u.Newer(w.update)
}

// join moves w to the end of a list, out of the one it is in.
func (w *watched) join(l *list.List) {
	w.leave()
	w.in = l
	w.at = l.PushBack(w)
}

// leave removes w from its list, if it is in one.
func (w *watched) leave() {
	if w.in != nil {
		w.in.Remove(w.at)
		w.in, w.at = nil, nil
	}
}

// first returns the first topic of a list, or nil.
func first(l *list.List) *watched {
	if e := l.Front(); e != nil {
		return e.Value.(*watched)
	}

	return nil
}
