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

// acceptLocked takes a reading of a read that began at a seq, and adds what is news to subscribers to updates.
func (l *Live) acceptLocked(
	updates []presence.Update, k *tracked, r counter.Reading, began uint64,
) []presence.Update {
	c := r.Counter
	if r.Stale {
		known := false
		c, known = l.newestLocked(r)
		if !known {
			return updates
		}
	}

	if u, news := l.acceptReadingLocked(k, c, began); news {
		updates = append(updates, u)
	}

	return updates
}

// acceptReadingLocked takes c from a read that began at a seq.
func (l *Live) acceptReadingLocked(k *tracked, c counter.Counter, began uint64) (u presence.Update, news bool) {
	order := c.Version.Compare(k.counter.Version)

	// A notification since the read began is at least as new. Without a version, one of the two was deleted, and
	// nothing says which one is older.
	ordered := c.Touched() && k.counter.Touched()
	if k.notified > began && (!ordered || order <= 0) {
		return u, false
	}

	// This process knows more than a store that has only old values.
	if c.Stale && k.origin != unknown && order <= 0 {
		if k.counter.Stale {
			return u, false
		}
		return k.markStale(), true
	}

	if k.origin == unknown || order != 0 {
		k.origin = wasRead
	}

	return l.replaceLocked(k, c)
}

// acceptNotificationLocked takes c from the feed.
func (l *Live) acceptNotificationLocked(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	k.notified = l.seq

	if k.origin == wasRead {
		// A read has overtaken the notification of the end: the counter may have been made again since.
		if k.counter.Touched() && !c.Touched() {
			l.rereadLocked(c.Key)
			return u, false
		}
		if c.Version.Compare(k.counter.Version) < 0 {
			return u, false
		}
	}
	k.origin = fromFeed

	return l.replaceLocked(k, c)
}

// confirm notes that a read which began at a time found nothing newer. Notifications alone say nothing about time: a
// feed that falls silent looks like a counter that does not change.
func (k *tracked) confirm(r *counter.Counter, began time.Time) {
	if !r.Stale && !newer(r, &k.counter) && began.After(k.asOf) {
		k.asOf = began
	}
}

// differs reports whether the store has another value than subscribers, and does not just know less.
func (k *tracked) differs(r *counter.Counter) bool {
	if r.Stale != k.counter.Stale {
		return true
	}

	order := r.Version.Compare(k.counter.Version)
	knowsLess := k.counter.Stale && order < 0

	return order != 0 && !knowsLess
}

// lags reports whether the counter may lack something that was acknowledged before oldest, and does not say so.
func (k *tracked) lags(oldest time.Time) bool { return !k.counter.Stale && k.asOf.Before(oldest) }

// markStale marks the counter as stale, and returns the update that says so.
func (k *tracked) markStale() presence.Update {
	k.counter.Stale = true
	return presence.Update{Topic: Topic(k.counter.Key), Stale: true}
}

// replaceLocked makes c the counter of k, and reports whether that is news to subscribers. The
// caller has set origin.
func (l *Live) replaceLocked(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	if rule := l.cfg.Rules.Find(c.Key); rule != nil {
		c = c.Or(rule.Kind)
	}

	old := &k.counter
	if old.Key != "" && old.Version == c.Version && old.Value == c.Value && old.Stale == c.Stale {
		return u, false
	}

	c.Key = strings.Clone(c.Key) // a part of a larger text, which would stay in memory
	k.counter = c

	// The counter's own version goes back when it is deleted, so updates have one of this process.
	l.seq++
	version := presence.Version{Incarnation: 1, Sequence: l.seq}

	return presence.Update{Topic: Topic(c.Key), Version: version, Value: valueOf(c)}, true
}
