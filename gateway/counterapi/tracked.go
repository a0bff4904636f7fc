package counterapi

import (
	"strings"
	"time"

	"headcount/counter"
	"headcount/presence"
)

// tracked is a counter that clients of this process watch.
type tracked struct {
	counter  counter.Counter // the value in the hub
	origin   origin
	notified uint64    // Live.seq at the newest notification
	asOf     time.Time // counter includes everything that was acknowledged before; zero: unknown
	viewers  map[string]*viewer
}

// origin says how the value of a tracked counter was obtained.
type origin uint8

const (
	unknown  origin = iota // there is no value yet
	wasRead                // from a read or from memory: older notifications may still arrive
	fromFeed               // from a notification: all later ones are newer
)

// acceptLocked applies a reading of a read that began at the given seq, and appends to updates if it is news to
// subscribers.
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

// acceptReadingLocked applies a value from a read that began at the given seq.
func (l *Live) acceptReadingLocked(k *tracked, c counter.Counter, began uint64) (u presence.Update, news bool) {
	order := c.Version.Compare(k.counter.Version)

	// A notification that arrived after the read began is at least as new as the read. If one of the two has no
	// version, the counter was deleted in between, and they cannot be ordered.
	ordered := c.Touched() && k.counter.Touched()
	if k.notified > began && (!ordered || order <= 0) {
		return u, false
	}

	// The store has only an old value, and this process knows a newer one.
	if c.Stale && k.origin != unknown && order <= 0 {
		if k.counter.Stale {
			return u, false
		}
		return k.markStale(), true
	}

	// A value of the feed that a read confirms stays the feed's.
	if k.origin == unknown || order != 0 {
		k.origin = wasRead
	}

	return l.replaceLocked(k, c)
}

// acceptNotificationLocked applies a value from the feed.
func (l *Live) acceptNotificationLocked(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	k.notified = l.seq

	if k.origin == wasRead {
		// A read was faster than the notification of a deletion: the counter may have been created again since.
		if k.counter.Touched() && !c.Touched() {
			l.rereadLocked(c.Key)
			return u, false
		}
		// The read was faster than this notification.
		if c.Version.Compare(k.counter.Version) < 0 {
			return u, false
		}
	}
	k.origin = fromFeed

	return l.replaceLocked(k, c)
}

// confirm records that a read which began at the given time found nothing newer. Notifications do not confirm anything:
// a feed that has stalled looks like a counter that does not change.
func (k *tracked) confirm(r *counter.Counter, began time.Time) {
	if !r.Stale && !newer(r, &k.counter) && began.After(k.asOf) {
		k.asOf = began
	}
}

// differs reports whether the store has another value than subscribers see, and not merely an older one.
func (k *tracked) differs(r *counter.Counter) bool {
	if r.Stale != k.counter.Stale {
		return true
	}

	order := r.Version.Compare(k.counter.Version)
	knowsLess := k.counter.Stale && order < 0

	return order != 0 && !knowsLess
}

// lags reports whether the counter may lack a change that was acknowledged before oldest, without being marked as
// stale.
func (k *tracked) lags(oldest time.Time) bool { return !k.counter.Stale && k.asOf.Before(oldest) }

// markStale marks the counter as stale, and returns the update for subscribers.
func (k *tracked) markStale() presence.Update {
	k.counter.Stale = true
	return presence.Update{Topic: Topic(k.counter.Key), Stale: true}
}

// replaceLocked makes c the value of k, and reports whether that is news to subscribers. The caller must have set
// origin.
func (l *Live) replaceLocked(k *tracked, c counter.Counter) (u presence.Update, news bool) {
	if rule := l.cfg.Rules.Find(c.Key); rule != nil {
		c = c.Or(rule.Kind)
	}

	old := &k.counter
	// Without a former value any is news, also that of a counter that does not exist.
	if old.Key != "" && old.Version == c.Version && old.Value == c.Value && old.Stale == c.Stale {
		return u, false
	}

	// A copy, because the key may be a part of a larger buffer.
	c.Key = strings.Clone(c.Key)
	k.counter = c

	// The counter's own version falls when it is deleted, so updates are numbered by this process.
	l.seq++
	version := presence.Version{Incarnation: 1, Sequence: l.seq}

	return presence.Update{Topic: Topic(c.Key), Version: version, Value: valueOf(c)}, true
}
