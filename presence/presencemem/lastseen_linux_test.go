package presencemem

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"headcount/presence"
)

func openSeen(t *testing.T, dir string, cfg Config) *Store {
	t.Helper()
	cfg.PresenceTimeout = time.Minute
	s, err := Open(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// depart writes departures into partition 3.
func depart(t *testing.T, s *Store, departures ...presence.Departure) {
	t.Helper()
	claims, _ := s.Claim(t.Context(), "n", []int{3}, false)
	change := presence.Change{Claim: claims[0], Sequence: 1, Departures: departures}
	if out := s.Write(t.Context(), []presence.Change{change}); out[0].Err != nil {
		t.Fatal(out[0].Err)
	}
}

func wantSeen(t *testing.T, when string, s *Store, users []presence.User, want ...time.Time) {
	t.Helper()
	got, err := s.LastSeen(t.Context(), users)
	if err != nil {
		t.Fatal(err)
	}

	for i, at := range got {
		if !at.Equal(want[i]) {
			t.Errorf("%s: user %d was last seen %s, want %s", when, users[i], at, want[i])
		}
	}
}

// stored returns how many departures the file has.
func stored(t *testing.T, s *Store) (n int) {
	t.Helper()
	err := s.unread.disk.db.View(func(tx *bbolt.Tx) error {
		n = tx.Bucket(seenBucket).Stats().KeyN
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A data directory keeps departures over restarts, with the same and with other settings.
func TestLastSeenOverRestarts(t *testing.T) {
	dir, now := t.TempDir(), time.Now().Truncate(time.Second)
	users := []presence.User{1, 2, 3, 4}
	never := time.Time{}
	restart := func(s *Store, cfg Config) *Store {
		t.Helper()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return openSeen(t, dir, cfg)
	}

	s := openSeen(t, dir, Config{LastSeen: time.Hour, MaxLastSeen: 3})
	depart(t, s, presence.Departure{User: 1, At: now.Add(-5 * time.Second)},
		presence.Departure{User: 2, At: now.Add(-4 * time.Second)})
	depart(t, s, presence.Departure{User: 3, At: now.Add(-3 * time.Minute)},
		presence.Departure{User: 1, At: now.Add(-time.Second)})

	s = restart(s, Config{LastSeen: time.Hour, MaxLastSeen: 3})
	wantSeen(t, "restarted", s, users, now.Add(-time.Second), now.Add(-4*time.Second), now.Add(-3*time.Minute), never)

	depart(t, s, presence.Departure{User: 4, At: now}) // one too many, so user 3 is forgotten, who departed first
	if err := s.ForgetSeen(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	want := []time.Time{now.Add(-time.Second), never, never, now}
	wantSeen(t, "one too many, and one is erased", s, users, want...)
	if n := stored(t, s); n != 2 {
		t.Errorf("the file has %d departures, want 2", n)
	}

	s = restart(s, Config{LastSeen: time.Hour, MaxLastSeen: 1})
	wantSeen(t, "with a lower bound", s, users, never, never, never, now)

	depart(t, s, presence.Departure{User: 1, At: now.Add(-10 * time.Minute)})
	wantSeen(t, "who departed earlier is remembered nevertheless", s, users[:1], now.Add(-10*time.Minute))

	s = restart(s, Config{LastSeen: time.Minute})
	wantSeen(t, "with a shorter retention", s, users, never, never, never, never)

	s = restart(s, Config{})
	if n := stored(t, s); n != 0 {
		t.Errorf("without the setting the file has %d departures, want none", n)
	}

	// A departure without the setting is not kept for a later start with it.
	depart(t, s, presence.Departure{User: 4, At: now})
	s = restart(s, Config{LastSeen: time.Hour})
	defer s.Close()
	wantSeen(t, "after a start without the setting", s, users, never, never, never, never)
}

// TestLastSeenAfterTheClockWentBack: a clock was hours ahead, and was then set. Who leaves now was last here now.
func TestLastSeenAfterTheClockWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLastSeen(Config{LastSeen: 24 * time.Hour, MaxLastSeen: 10})
		now := time.Now()

		l.departed(1, now.Add(8*time.Hour))
		l.departed(1, now)
		l.departed(1, now.Add(-time.Minute)) // the report of another owner, which comes late
		if at, _ := l.users.Peek(1); at != now.Unix() {
			t.Errorf("the user was last here %s from now, want now", time.Unix(at, 0).Sub(now))
		}
	})
}

// A write frees the memory of old departures.
func TestLastSeenExpires(t *testing.T) {
	s := New(Config{LastSeen: time.Minute})
	depart(t, s, presence.Departure{User: 1, At: time.Now().Add(-2 * time.Minute)})
	if n := s.seen.users.Len(); n != 0 {
		t.Errorf("%d departures are kept, want none", n)
	}
}

// A process is killed, and its successor starts too late to count its users further. They were last seen at the time of
// the kill.
func TestLastSeenOfThosePresentAtACrash(t *testing.T) {
	dir := t.TempDir()
	s := openSeen(t, dir, Config{LastSeen: time.Hour})
	claims, _ := s.Claim(t.Context(), "n", []int{3}, false)

	here := presence.MemberChange{Member: presence.Member{User: 1, Page: "p"}}
	out := s.Write(t.Context(), []presence.Change{
		{Claim: claims[0], Sequence: 1, Members: []presence.MemberChange{here}},
	})
	if out[0].Err != nil {
		t.Fatal(out[0].Err)
	}

	before := time.Now().Add(-time.Second)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// Within the timeout the user is still present, and so has no time of departure.
	for later, known := range map[time.Duration]bool{
		30 * time.Second: false, 10 * time.Minute: true, 2 * time.Hour: true,
	} {
		next := New(Config{PresenceTimeout: time.Minute, LastSeen: 24 * time.Hour})
		next.dir = dir

		next.loadPresent(time.Now().Add(later))

		times, err := next.LastSeen(t.Context(), []presence.User{1})
		if err != nil || times[0].IsZero() == known {
			t.Errorf("a successor %s later has %v, %v; want a known time: %t", later, times, err, known)
		}
		if known && (times[0].Before(before) || times[0].After(time.Now())) {
			t.Errorf("a successor %s later has %v, want the time of the crash", later, times)
		}
	}
}

// An erasure that cannot be written is refused, and meanwhile nothing is lost.
func TestLastSeenOnAFullDisk(t *testing.T) {
	dir, at := t.TempDir(), time.Now().Truncate(time.Second)
	s := openSeen(t, dir, Config{LastSeen: time.Hour})
	depart(t, s, presence.Departure{User: 1, At: at}, presence.Departure{User: 2, At: at})
	// Both departures are in the file, so an erasure has to write.
	if err := s.writeSeen(time.Time{}); err != nil {
		t.Fatal(err)
	}
	mend := breakFile(t, dir)
	if err := s.ForgetSeen(t.Context(), 1); !errors.Is(err, presence.ErrUnavailable) {
		t.Errorf("an erasure on a full disk returns %v, want ErrUnavailable", err)
	}

	// A departure is accepted: it may be written later.
	depart(t, s, presence.Departure{User: 3, At: at})
	wantSeen(t, "on a full disk", s, []presence.User{2, 3}, at, at)

	mend()
	if err := s.ForgetSeen(t.Context(), 1); err != nil {
		t.Errorf("when there is room again the erasure returns %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = openSeen(t, dir, Config{LastSeen: time.Hour})
	defer s.Close()
	wantSeen(t, "restarted", s, []presence.User{1, 2, 3}, time.Time{}, at, at)
}

// TestLastSeenThatCannotBeRead: malformed departures are dropped.
func TestLastSeenThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	s := openSeen(t, dir, Config{LastSeen: time.Hour})
	for i, value := range []string{"", "short", "far too long"} {
		broken := []put{{seenBucket, fmt.Appendf(nil, "user %d..", i), []byte(value)}}
		if err := s.unread.disk.update(broken, nil); err != nil {
			t.Fatal(err)
		}
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = openSeen(t, dir, Config{LastSeen: time.Hour})
	defer s.Close()
	if n := stored(t, s); n != 0 {
		t.Errorf("the file has %d departures, want none", n)
	}
}
