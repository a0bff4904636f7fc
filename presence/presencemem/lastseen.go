package presencemem

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"go.etcd.io/bbolt"

	"headcount/presence"
)

const (
	seenBatch = 1024 // entries in one transaction of the data directory
	// seenFlush is for what has to be written before a process or a log ends; the rest is lost, or lost by a kill.
	seenFlush = 2 * time.Second
	// seenExpire is how many users are forgotten at a time, so that joins do not wait; the others go with later writes.
	seenExpire = 1000
)

// lastSeen has when users departed, in unix seconds. Store.mu guards it, except writing. After the
// retention, and beyond the bound, it forgets those who departed first.
type lastSeen struct {
	retention time.Duration                        // 0: nothing is kept
	users     *simplelru.LRU[presence.User, int64] // by departure, the earliest first

	// With a data directory: the users whose entry there differs, at most those here and those
	// there. Otherwise nil.
	unsaved map[presence.User]struct{}
	writing sync.Mutex // held while entries are written, so that none replaces a newer one
}

func newLastSeen(cfg Config) *lastSeen {
	l := &lastSeen{retention: cfg.LastSeen}
	// NewLRU fails only without room.
	l.users, _ = simplelru.NewLRU(cfg.MaxLastSeen, func(u presence.User, _ int64) { l.mark(u) })

	return l
}

func (l *lastSeen) mark(u presence.User) {
	if l.unsaved != nil {
		l.unsaved[u] = struct{}{}
	}
}

func (l *lastSeen) departed(u presence.User, at time.Time) {
	last, known := l.users.Peek(u)
	// Changes of several owners, and a replayed log, may come in another order.
	newer := !known || last < at.Unix()
	// Nobody has departed in the future: the clock was ahead, and was set.
	newer = newer || last > time.Now().Unix()
	if l.retention > 0 && newer {
		l.users.Add(u, at.Unix())
		l.mark(u)
	}
}

// replay makes a departure of the log. One at the unix time 0 says that the user was forgotten.
func (l *lastSeen) replay(d presence.Departure) {
	if d.At.Unix() > 0 {
		l.departed(d.User, d.At)
	} else {
		l.users.Remove(d.User)
	}
}

// expire forgets some of those who departed before the retention.
func (l *lastSeen) expire(now time.Time) {
	oldest := now.Add(-l.retention).Unix()

	for range seenExpire {
		if _, at, ok := l.users.GetOldest(); !ok || at >= oldest {
			return
		}
		l.users.RemoveOldest()
	}
}

var _ presence.LastSeen = (*Store)(nil)

// LastSeen implements presence.LastSeen.
func (s *Store) LastSeen(_ context.Context, users []presence.User) ([]time.Time, error) {
	times := make([]time.Time, len(users))

	s.mu.Lock()
	defer s.mu.Unlock()

	// expire is slow on purpose, so some that are too old may still be there.
	oldest := time.Now().Add(-s.seen.retention).Unix()
	for i, u := range users {
		if at, ok := s.seen.users.Peek(u); ok && at >= oldest {
			times[i] = presence.TimeOf(at)
		}
	}

	return times, nil
}

// ForgetSeen implements presence.LastSeen. With a data directory it returns when the file has forgotten the user, too.
func (s *Store) ForgetSeen(_ context.Context, u presence.User) error {
	s.log.mu.Lock()
	s.mu.Lock()
	s.seen.users.Remove(u)
	s.mu.Unlock()
	// Logged as a departure at 0, or a kill would bring the user back with the log.
	s.logChangesLocked([]presence.Change{{Departures: []presence.Departure{{User: u, At: time.Unix(0, 0)}}}})
	s.log.mu.Unlock()

	if s.dir == "" || s.seen.retention == 0 { // nothing is kept
		return nil
	}

	s.seen.writing.Lock() // so that earlier batches are written first
	defer s.seen.writing.Unlock()

	entry := put{seenBucket, binary.BigEndian.AppendUint64(nil, uint64(u)), nil}
	if err := s.unread.disk.update([]put{entry}, nil); err != nil {
		return refused(err)
	}

	return nil
}

// In the data directory, the bucket seen has 8 bytes of user -> 8 bytes: unix seconds.

// keepSeen writes what the data directory lacks, until Close. After a kill the log of present users has the departures
// since the last write (replacePresent).
func (s *Store) keepSeen() {
	s.keep(func(began time.Time, closing bool) error {
		until := time.Time{}
		if closing {
			// Bounded, because Close waits for it.
			until = began.Add(seenFlush)
		}

		s.mu.Lock()
		s.seen.expire(began)
		s.mu.Unlock()

		return s.writeSeen(until)
	}, "when users were last here cannot be written to the data directory; retrying",
		"when users were last here can be written to the data directory again")
}

// writeSeen writes what the data directory lacks, unless it takes longer than until; zero: however long it takes.
// After a failure the next call writes it.
func (s *Store) writeSeen(until time.Time) error {
	for until.IsZero() || time.Now().Before(until) {
		if done, err := s.writeSomeSeen(); done || err != nil {
			return err
		}
	}

	return nil
}

func (s *Store) writeSomeSeen() (done bool, err error) {
	s.seen.writing.Lock()
	defer s.seen.writing.Unlock()

	puts := s.unsavedSeen()
	if len(puts) == 0 {
		return true, nil
	}

	// Neighbours share pages of the file.
	slices.SortFunc(puts, func(a, b put) int { return bytes.Compare(a.key, b.key) })

	if err := s.unread.disk.update(puts, nil); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range puts {
			// Marked again, unless a later departure has done so; either way the newest one is written.
			s.seen.mark(presence.User(binary.BigEndian.Uint64(p.key)))
		}
		return false, err
	}

	return false, nil
}

// unsavedSeen takes some of the users that the data directory lacks, few enough that joins do not wait.
func (s *Store) unsavedSeen() (puts []put) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for u := range s.seen.unsaved {
		p := put{seenBucket, binary.BigEndian.AppendUint64(nil, uint64(u)), nil}
		if at, ok := s.seen.users.Peek(u); ok {
			p.value = binary.BigEndian.AppendUint64(nil, uint64(at))
		}

		// Before it is written: a departure in the meantime marks it again.
		delete(s.seen.unsaved, u)
		puts = append(puts, p)
		if len(puts) == seenBatch {
			break
		}
	}

	return puts
}

// loadSeen fills lastSeen from the file.
func (l *loader) loadSeen(tx *bbolt.Tx) {
	type entry struct {
		user presence.User
		at   int64
	}

	var all []entry
	l.each(tx, seenBucket, func(k, v []byte) error {
		if len(k) != 8 || len(v) != 8 {
			return fmt.Errorf("when a user was last here: %q", v)
		}
		all = append(all, entry{presence.User(binary.BigEndian.Uint64(k)), int64(binary.BigEndian.Uint64(v))})
		return nil
	})

	// The list of users is in the order of their departures, the file is not.
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(a.at, b.at) })
	for _, e := range all {
		l.seen.users.Add(e.user, e.at)
	}
}

// dropSeen deletes what an earlier process remembered, because this one has --last-seen 0.
func (d *disk) dropSeen() error {
	empty := false
	err := d.db.View(func(tx *bbolt.Tx) error { // reading works on a full disk too
		first, _ := tx.Bucket(seenBucket).Cursor().First()
		empty = first == nil
		return nil
	})
	if err != nil || empty {
		return err
	}

	// As a whole, which is one transaction however many users there are.
	return d.db.Update(func(tx *bbolt.Tx) error {
		if err := tx.DeleteBucket(seenBucket); err != nil {
			return err
		}
		_, err := tx.CreateBucket(seenBucket)
		return err
	})
}
