package presencemem

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

// After a restart the same users are present. A damaged file is refused.
func TestPresentIsReadAsItWasWritten(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := New(Config{Partitions: 4})
		s.dir = t.TempDir()
		for id := range s.partitions {
			for range rapid.IntRange(0, 5).Draw(rt, "members") {
				m := member{
					presence.User(rapid.Uint64().Draw(rt, "user")),
					rapid.StringMatching(`(\x1fshop\x1f)?[a-zé/ ]{1,20}`).Draw(rt, "page"),
				}

				s.partitions[id].members[m] = rapid.Int64().Draw(rt, "hold")
			}
		}

		s.membersChanged = true
		now := time.UnixMilli(rapid.Int64Range(0, 1<<42).Draw(rt, "now"))
		if err := s.writePresent(now); err != nil {
			rt.Fatal(err)
		}

		path := filepath.Join(s.dir, presentFile)
		b, err := os.ReadFile(path)
		if err != nil {
			rt.Fatal(err)
		}

		written, partitions, err := parsePresent(b)
		if err != nil || !written.Equal(now) || len(partitions) != len(s.partitions) {
			rt.Fatalf("%v, %d partitions of %s, want %s", err, len(partitions), written, now)
		}

		for id := range partitions {
			if !maps.Equal(partitions[id], s.partitions[id].members) {
				rt.Fatalf("partition %d: %v, want %v", id, partitions[id], s.partitions[id].members)
			}
		}

		// Whichever byte is damaged or missing, the file is refused.
		i := rapid.IntRange(0, len(b)-1).Draw(rt, "damaged byte")
		b[i] ^= 1 << rapid.IntRange(0, 7).Draw(rt, "bit")
		if _, _, err := parsePresent(b); err == nil {
			rt.Fatalf("byte %d of %d is wrong, and the file is accepted", i, len(b))
		}
		if _, _, err := parsePresent(b[:i]); err == nil {
			rt.Fatalf("the first %d of %d bytes are accepted as a file", i, len(b))
		}
	})
}

// A file that announces more members than it has takes no memory for them, and a file with an invalid page is refused.
func TestPresentThatCannotBe(t *testing.T) {
	parse := func(body []byte) error {
		sum := crc32.ChecksumIEEE(body)
		_, _, err := parsePresent(append(binary.BigEndian.AppendUint32([]byte(presentMagic), sum), body...))
		return err
	}

	const promised = 1 << 20
	// The partition announces a million members, and a million zero bytes follow.
	body := append(binary.AppendUvarint([]byte{0, 1, 0}, promised), make([]byte, promised)...)

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := parse(body)
	runtime.ReadMemStats(&after)

	if took := after.TotalAlloc - before.TotalAlloc; err == nil || took > 4*promised {
		t.Errorf("%v, and %d bytes of memory for a file of %d", err, took, len(body))
	}

	for page, can := range map[string]bool{
		"p": true, "\x1fshop\x1fp": true, "": false, "*": false, "\xff": false, "a\nb": false, "\x1fSHOP\x1fp": false,
		strings.Repeat("x", 129): false,
	} {
		body := append([]byte{0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0}, binary.AppendUvarint(nil, uint64(len(page)))...)
		if err := parse(append(body, page...)); (err == nil) != can {
			t.Errorf("a file with the page %q: %v; want it accepted: %t", page, err, can)
		}
	}
}

func FuzzParsePresent(f *testing.F) {
	f.Add([]byte{0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 1, 'p'}) // user 7 on page p
	f.Fuzz(func(t *testing.T, body []byte) {
		b := binary.BigEndian.AppendUint32([]byte(presentMagic), crc32.ChecksumIEEE(body))
		if _, partitions, err := parsePresent(append(b, body...)); err == nil && len(partitions) > len(body) {
			t.Fatalf("%d partitions were read from %d bytes", len(partitions), len(body))
		}
	})
}

// Users who were present are recalled if the file is not older than the timeout; holds are recalled until they end.
func TestPresentIsRememberedForTheTimeout(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	hold := now.Add(150 * time.Second)
	s, err := Open(dir, Config{PresenceTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}

	claims, _ := s.Claim(t.Context(), "n", []int{3}, false)
	write := func(seq uint64, members ...presence.MemberChange) {
		change := presence.Change{Claim: claims[0], Sequence: seq, Members: members}
		if out := s.Write(t.Context(), []presence.Change{change}); out[0].Err != nil {
			t.Fatal(out[0].Err)
		}
	}

	here := func(u presence.User) presence.Member { return presence.Member{User: u, Page: "p"} }
	held := presence.Member{User: 2, Page: "p", Hold: hold}
	write(1, presence.MemberChange{Member: here(1)}, presence.MemberChange{Member: held},
		presence.MemberChange{Member: here(3)})
	write(2, presence.MemberChange{Member: here(3), Gone: true})

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		later    time.Duration
		want     int
		recalled bool
	}{
		"at once": {0, 2, true}, "within the timeout": {50 * time.Second, 2, true},
		"after it": {2 * time.Minute, 1, false}, "after the hold": {2 * time.Hour, 0, false},
		"a clock that was set back": {-time.Hour, 0, false},
	} {
		s := New(Config{PresenceTimeout: time.Minute})
		s.dir = dir
		s.loadPresent(now.Add(tc.later))
		if got := len(s.partitions[3].members); got != tc.want {
			t.Errorf("%s: %d members, want %d", name, got, tc.want)
		}
		if !s.membersChanged {
			t.Errorf("%s: the file of the former life would not be replaced", name)
		}
		if s.Recalled() != tc.recalled {
			t.Errorf("%s: Recalled is %t, want %t", name, s.Recalled(), tc.recalled)
		}
	}
}

// While nothing changes, the file is not written again, but counts as just written.
func TestPresentHoldsWhileNobodyMoves(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	s := New(Config{PresenceTimeout: time.Minute})
	s.dir = dir
	if err := s.writePresent(now); err != nil {
		t.Fatal(err)
	}

	before, err := os.ReadFile(filepath.Join(dir, presentFile))
	if err != nil {
		t.Fatal(err)
	}

	// Nothing has changed since, so the second write only renews the time of the file.
	if err := s.writePresent(now.Add(10 * time.Minute)); err != nil {
		t.Fatal(err)
	}

	after, err := os.ReadFile(filepath.Join(dir, presentFile))
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("without a change the file was written again, %v", err)
	}

	for later, want := range map[time.Duration]bool{
		10*time.Minute + 59*time.Second: true, 11*time.Minute + 2*time.Second: false,
	} {
		back := New(Config{PresenceTimeout: time.Minute})
		back.dir = dir
		back.loadPresent(now.Add(later))
		if back.Recalled() != want {
			t.Errorf("%s after the write Recalled is %t, want %t", later, !want, want)
		}
	}

	// If the file was removed, the next write makes it anew.
	if err := os.Remove(filepath.Join(dir, presentFile)); err != nil {
		t.Fatal(err)
	}
	if err := s.writePresent(now); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, presentFile)); err != nil {
		t.Error(err)
	}
}

// If the file cannot be written, there is an error and no other harm, and later it is written again.
func TestPresentThatCannotBeWritten(t *testing.T) {
	s := New(Config{})
	s.dir = t.TempDir()
	s.membersChanged = true
	// A directory that has the name of the temporary file makes each write fail.
	inTheWay := filepath.Join(s.dir, presentFile+".new")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}

	if err := s.writePresent(time.Now()); err == nil {
		t.Fatal("writePresent returns no error, though it cannot write")
	}

	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}

	if err := s.writePresent(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(s.dir, presentFile)); err != nil {
		t.Fatal(err)
	}
}
