package fanout

import (
	"time"

	"headcount/presence"
)

// watched is a topic that a shard has subscribers for, or had a moment ago. The
// hub's lock guards it.
type watched struct {
	update   presence.Update // its Topic is set from the beginning
	heard    bool            // update is one that was heard of
	known    bool            // update may be told; until then it is the newest heard of, if any
	asked    bool            // the store was asked to attach it, and may have it
	attached bool
	current  bool          // attached and read since everything was last to be attached anew
	sourced  bool          // its kind has a Source: it is not the store's
	bucket   uint16        // among presence.DefaultBuckets
	refs     int32         // shards with subscribers, and watchers
	left     time.Duration // when refs fell to 0, since the hub's birth

	in         *line // the one it stands in; nil: none
	prev, next *watched
}

// line is topics in the order in which they came. A topic stands in one line at most,
// and leaves it at no cost, wherever it stands.
type line struct {
	first, last *watched
	len         int
}

// push has w stand at the end; it stands nowhere yet.
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

// leaveLine takes w out of the line that it stands in, if it does.
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
