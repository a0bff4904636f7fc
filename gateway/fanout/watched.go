package fanout

import (
	"time"

	"headcount/presence"
)

// watched is a topic that a shard has subscribers for, or had a moment ago. The
// hub's lock guards it.
type watched struct {
	update   presence.Update // the newest received; its Topic is always set
	known    bool            // update may be delivered; it may not before the topic is attached
	endpoint endpoint
	kind     *kind
	bucket   uint16        // among presence.DefaultBuckets
	refs     int32         // shards with subscribers, and watchers
	left     time.Duration // when refs fell to 0, since Hub.born

	in         *line // the line it stands in; nil: none
	prev, next *watched
}

// endpoint says how far the store is with the endpoint of a topic. A topic whose kind has
// a Source needs none, and counts as attached from the beginning.
type endpoint uint8

const (
	unasked  endpoint = iota // the store was never asked for it, so there is nothing to detach
	asked                    // the store was asked, and may have it
	outdated                 // the store has attached it, but it has to be attached and read again
	attached                 // the store has attached it, and its updates come
)

// remember keeps the newest update until the topic is attached, so that no older one is
// delivered then.
func (w *watched) remember(u presence.Update) {
	if !u.Stale && !w.update.Newer(u) {
		w.update = u
	}
}

// line is topics in the order in which they came. A topic stands in one line at most, and
// can leave it from any place at the same cost.
type line struct {
	first, last *watched
	len         int
}

// push adds w, which stands in no line, at the end.
func (l *line) push(w *watched) {
	w.in, w.prev = l, l.last
	if l.last == nil {
		l.first = w
	} else {
		l.last.next = w
	}
	l.last = w
	l.len++
}

// leaveLine takes w out of its line, if it stands in one.
func (w *watched) leaveLine() {
	l := w.in
	if l == nil {
		return
	}
	if w.prev == nil {
		l.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		l.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.in, w.prev, w.next = nil, nil, nil
	l.len--
}
