package counterapi

import (
	"strings"
	"time"

	"headcount/counter"
	"headcount/presence"
)

// tracked is a counter that somebody here looks at.
type tracked struct {
	counter  counter.Counter // as the hub has it
	origin   origin
	notified uint64    // Live.seq at the newest notification
	asOf     time.Time // counter has everything that was acknowledged before; zero while it is unknown
	viewers  map[string]*viewer
}

// origin says where the value of a tracked counter comes from.
type origin uint8

const (
	unknown  origin = iota // there is no value yet
	wasRead                // from a read or from memory: older notifications may still come
	fromFeed               // from a notification: all that come are newer
)

// accept takes a reading of a read that began at a seq, and adds what is news to subscribers to updates. The caller
// holds mu.
func (l *Live) accept(updates []presence.Update, k *tracked, r counter.Reading, began uint64) []presence.Update {
	c, known := r.Counter, true
	if r.Stale {
		c, known = l.newest(r)
	}
	if !known {
		return updates
	}
	if u, news := l.acceptReading(k, c, began); news {
		updates = append(updates, u)
	}
	return updates
}

// acceptReading takes c from a read that began at a seq. The caller holds mu.
func (l *Live) acceptReading(k *tracked, c counter.Counter, began uint64) (u presence.Update, news bool) {
	order := c.Version.Compare(k.counter.Version)
	overtaken := k.notified > began && (!c.Touched() || !k.counter.Touched() || order <= 0)
	switch {
	case overtaken:
		return u, false
	case c.Stale && k.origin != unknown && order <= 0: // this process knows more than the store
		if k.counter.Stale {
			return u, false
		}
		return k.markStale(), true
	}
	if k.origin == unknown || order != 0 {
		k.origin = wasRead
	}
	return l.replace(k, c)
}

// acceptNotification takes c from the feed. The caller holds mu.
func (l *Live) acceptNotification(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	k.notified = l.seq
	if k.origin == wasRead {
		switch {
		case k.counter.Touched() && !c.Touched(): // it may have been made again since
			l.reread(c.Key)
			return u, false
		case c.Version.Compare(k.counter.Version) < 0:
			return u, false
		}
	}
	k.origin = fromFeed
	return l.replace(k, c)
}

// confirm notes that a read which began at a time found nothing newer. Notifications alone say nothing about time: a feed
// that falls silent looks like a counter that does not change.
func (k *tracked) confirm(r *counter.Counter, began time.Time) {
	if !r.Stale && !newer(r, &k.counter) && began.After(k.asOf) {
		k.asOf = began
	}
}

// lags reports whether the counter may lack something that was acknowledged before oldest, and does not say so.
func (k *tracked) lags(oldest time.Time) bool { return !k.counter.Stale && k.asOf.Before(oldest) }

// markStale marks the counter as stale, and returns the update that says so.
func (k *tracked) markStale() presence.Update {
	k.counter.Stale = true
	return presence.Update{Topic: Topic(k.counter.Key), Stale: true}
}

// replace makes c the counter of k, and reports whether that is news to subscribers. The
// caller holds mu, and has set origin.
func (l *Live) replace(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	if rule := l.cfg.Rules.Find(c.Key); rule != nil {
		c = c.Or(rule.Kind)
	}
	old := &k.counter
	if old.Key != "" && old.Version == c.Version && old.Value == c.Value && old.Stale == c.Stale {
		return u, false
	}
	c.Key = strings.Clone(c.Key) // a part of a larger text, which would stay in memory
	k.counter = c
	l.seq++
	return presence.Update{Topic: Topic(c.Key), Version: presence.Version{Incarnation: 1, Sequence: l.seq}, Value: valueOf(c)}, true
}
