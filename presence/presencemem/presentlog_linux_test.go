package presencemem

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

// answered is a store with a data directory and without goroutines, so that it can be killed at any moment.
type answered struct {
	*Store
	claims   []presence.Claim
	sequence uint64
}

func newAnswered(t rapid.TB, dir string) *answered {
	t.Helper()
	s := New(Config{Partitions: 3, PresenceTimeout: time.Minute, LastSeen: time.Hour})
	s.dir = dir
	s.loadPresent(time.Now())
	if err := s.writePresent(time.Now()); err != nil {
		t.Fatal(err)
	}

	claims, _ := s.Claim(context.Background(), "n", []int{0, 1, 2}, false)
	return &answered{Store: s, claims: claims}
}

// openAnswered opens a store that writes its data directory, as a process does.
func openAnswered(t *testing.T, dir string, cfg Config) *answered {
	t.Helper()
	s, err := Open(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })

	claims, _ := s.Claim(t.Context(), "n", []int{0, 1, 2}, false)
	return &answered{Store: s, claims: claims}
}

// write makes a change, which must be acknowledged.
func (a *answered) write(t rapid.TB, partition int, c presence.Change) {
	t.Helper()
	a.sequence++
	c.Claim = a.claims[partition]
	c.Sequence = a.sequence
	if out := a.Write(context.Background(), []presence.Change{c}); out[0].Err != nil {
		t.Fatal(out[0].Err)
	}
}

// wantRecalled checks that a new store over the directory has the members of s.
func wantRecalled(t rapid.TB, when string, dir string, s *Store) {
	t.Helper()
	next := New(s.cfg)
	next.dir = dir
	next.loadPresent(time.Now())
	if !next.Recalled() {
		t.Fatalf("%s: Recalled is false", when)
	}

	for id := range s.partitions {
		if got, want := next.partitions[id].members, s.partitions[id].members; !maps.Equal(got, want) {
			t.Fatalf("%s: partition %d has %v, want %v", when, id, got, want)
		}
	}
}

// A process may be killed at any moment, also between the replacement of the file and that of its log. Its directory
// has all acknowledged changes.
func TestWhatWasAnsweredIsRecalled(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		defer os.RemoveAll(dir)
		a := newAnswered(rt, dir)

		end := time.UnixMilli(time.Now().Add(2 * time.Minute).UnixMilli())
		member := rapid.Custom(func(t *rapid.T) presence.MemberChange {
			m := presence.MemberChange{Member: presence.Member{
				User: presence.User(rapid.IntRange(1, 4).Draw(t, "user")),
				Page: rapid.SampledFrom([]string{"p", "q", "\x1fshop\x1fé"}).Draw(t, "page"),
			}}

			m.Gone = rapid.Bool().Draw(t, "gone")
			if rapid.Bool().Draw(t, "held") {
				m.Hold = end
				m.Alone = rapid.Bool().Draw(t, "alone")
			}
			return m
		})

		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			log, err := os.ReadFile(filepath.Join(dir, presentLogFile))
			if err != nil {
				rt.Fatal(err)
			}

			steps := []string{"change", "change", "change", "write", "half a write", "restart"}
			switch rapid.SampledFrom(steps).Draw(rt, "step") {
			case "change":
				a.write(rt, rapid.IntRange(0, 2).Draw(rt, "partition"), presence.Change{
					Reset:   rapid.IntRange(0, 5).Draw(rt, "reset") == 0,
					Members: rapid.SliceOfN(member, 0, 4).Draw(rt, "members"),
				})
			case "write":
				if err := a.writePresent(time.Now()); err != nil {
					rt.Fatal(err)
				}
			case "half a write": // the new file and the log of the old one
				if err := a.writePresent(time.Now()); err != nil {
					rt.Fatal(err)
				}

				// A kill between the two replacements leaves the new file beside the log of the old one.
				between := t.TempDir()
				present, err := os.ReadFile(filepath.Join(dir, presentFile))
				if err != nil || os.WriteFile(filepath.Join(between, presentFile), present, 0o600) != nil ||
					os.WriteFile(filepath.Join(between, presentLogFile), log, 0o600) != nil {
					rt.Fatal(err)
				}

				wantRecalled(rt, "between two files", between, a.Store)
			case "restart":
				a = newAnswered(rt, dir)
			}
			wantRecalled(rt, "killed", dir, a.Store)
		}
	})
}

// Changes that are made while the file is written are in the log that continues it.
func TestChangesWhileTheFileIsWrittenAreRecalled(t *testing.T) {
	dir := t.TempDir()
	a := newAnswered(t, dir)
	change := func(u presence.User, gone bool) {
		m := presence.MemberChange{Member: presence.Member{User: u, Page: "p"}, Gone: gone}
		a.write(t, 0, presence.Change{Members: []presence.MemberChange{m}})
	}

	change(1, false)
	// The file has user 1, who leaves while it is written.
	next := a.present(time.Now())
	change(1, true)
	change(2, false)

	wantRecalled(t, "before the file is replaced", dir, a.Store)
	if err := a.replacePresent(next); err != nil {
		t.Fatal(err)
	}
	wantRecalled(t, "when it is replaced", dir, a.Store)
}

// A departure outlives a kill, and so does its erasure.
func TestDeparturesAreRecalled(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Partitions: 3, PresenceTimeout: time.Minute, LastSeen: time.Hour}
	a := openAnswered(t, dir, cfg)

	now := time.Unix(time.Now().Unix(), 0)
	a.write(t, 0, presence.Change{Departures: []presence.Departure{{User: 1, At: now}, {User: 2, At: now}}})
	if err := a.ForgetSeen(t.Context(), 2); err != nil {
		t.Fatal(err)
	}

	wantRecalledSeen := func(cfg Config, want ...time.Time) {
		t.Helper()
		next := New(cfg)
		next.dir = dir
		next.loadPresent(time.Now())
		wantSeen(t, "killed", next, []presence.User{1, 2}, want...)
	}

	wantRecalledSeen(cfg, now, time.Time{})
	// A process without the setting recalls no departures.
	cfg.LastSeen = 0
	wantRecalledSeen(cfg, time.Time{}, time.Time{})
}

// The file of present users is written anew, and with it begins another log. The departures in the former log are in
// the data directory by then, so they outlive a kill.
func TestDeparturesOutliveTheirLog(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Partitions: 3, PresenceTimeout: time.Minute, LastSeen: time.Hour}
	a := openAnswered(t, dir, cfg)

	now := time.Unix(time.Now().Unix(), 0)
	here := presence.MemberChange{Member: presence.Member{User: 2, Page: "p"}}
	a.write(t, 0, presence.Change{
		Departures: []presence.Departure{{User: 1, At: now}}, Members: []presence.MemberChange{here},
	})
	if err := a.writePresent(now); err != nil {
		t.Fatal(err)
	}

	killed := t.TempDir()
	if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	next, err := Open(killed, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	wantSeen(t, "killed", next, []presence.User{1}, now)
}

// A kill may tear the last record of the log, which was not acknowledged. All records before it are recalled.
func TestATornRecordIsIgnored(t *testing.T) {
	dir := t.TempDir()
	a := newAnswered(t, dir)
	path := filepath.Join(dir, presentLogFile)

	ends := []int{0} // of the records
	for u := range 3 {
		m := presence.MemberChange{Member: presence.Member{User: presence.User(u + 1), Page: "p"}}
		a.write(t, 0, presence.Change{Members: []presence.MemberChange{m}})

		is, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, int(is.Size()))
	}

	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := range len(whole) + 1 {
		for _, tail := range []string{"", "\x01\xff"} { // a file system may leave other bytes there
			torn := append(slices.Clone(whole[:size]), tail...)
			if err := os.WriteFile(path, torn, 0o600); err != nil {
				t.Fatal(err)
			}

			next := New(a.cfg)
			next.dir = dir
			next.loadPresent(time.Now())

			// A record is recalled if the file has all of it.
			want := 0
			for want+1 < len(ends) && ends[want+1] <= size {
				want++
			}
			if got := len(next.partitions[0].members); got != want || !next.Recalled() {
				t.Fatalf("of %d bytes and %q, %d members are recalled, want %d", size, tail, got, want)
			}
		}
	}
}

// If a change cannot be logged, no user is recalled until the file is written again: otherwise users who have left
// would be recalled.
func TestAChangeThatCannotBeLogged(t *testing.T) {
	dir := t.TempDir()
	a := newAnswered(t, dir)
	here := presence.MemberChange{Member: presence.Member{User: 1, Page: "p"}}

	nobody := func(when string) {
		t.Helper()
		next := New(a.cfg)
		next.dir = dir
		next.loadPresent(time.Now())
		if next.Recalled() || len(next.partitions[0].members) != 0 {
			t.Fatalf("%s: %v are recalled, want nobody", when, next.partitions[0].members)
		}
	}

	// From now on every write to the log fails.
	_ = a.log.file.Close()
	a.write(t, 0, presence.Change{Members: []presence.MemberChange{here}})
	nobody("a change was not logged")

	// A directory with the name of the temporary file prevents a new log.
	inTheWay := filepath.Join(dir, presentLogFile+".new")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}

	if err := a.writePresent(time.Now()); err == nil {
		t.Fatal("writePresent returns no error, though it cannot make a log")
	}
	nobody("the file has no log")

	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	if err := a.writePresent(time.Now()); err != nil {
		t.Fatal(err)
	}

	here.Gone = true
	a.write(t, 0, presence.Change{Members: []presence.MemberChange{here}})
	wantRecalled(t, "when the file was written again", dir, a.Store)
}
