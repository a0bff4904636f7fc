package seal_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/presence/seal"
)

func keys(t rapid.TB, purpose string, secrets ...string) *seal.Keys {
	t.Helper()

	var list [][]byte
	for _, s := range secrets {
		list = append(list, []byte(s))
	}

	k, err := seal.NewKeys(list, purpose)
	if err != nil {
		t.Fatal(err)
	}

	return k
}

func TestVerify(t *testing.T) {
	for name, tc := range map[string]struct {
		signs, verifies *seal.Keys
		want            error
	}{
		"same":                   {keys(t, "p", "a"), keys(t, "p", "a"), nil},
		"new key known already":  {keys(t, "p", "b", "a"), keys(t, "p", "a", "b"), nil},
		"old key not gone yet":   {keys(t, "p", "a", "b"), keys(t, "p", "b", "a"), nil},
		"other key":              {keys(t, "p", "a"), keys(t, "p", "b"), seal.ErrKey},
		"other purpose":          {keys(t, "p", "a"), keys(t, "q", "a"), seal.ErrKey},
		"not signed":             {keys(t, "p"), keys(t, "p", "a"), seal.ErrKey},
		"signed, but nobody can": {keys(t, "p", "a"), keys(t, "p"), seal.ErrKey},
		"not signed, need not":   {keys(t, "p"), keys(t, "p"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := tc.signs.Signer()
			sig := s.Sign(nil, []byte("message"))
			if len(sig) != seal.Size {
				t.Fatalf("the signature has %d bytes, want another length", len(sig))
			}

			v := tc.verifies.Signer()
			for range 2 { // a Signer can be used several times
				if err := v.Verify(s.ID(), []byte("message"), sig); !errors.Is(err, tc.want) {
					t.Fatalf("got %v, want %v", err, tc.want)
				}
			}

			if tc.want == nil && tc.signs.Signed() {
				if err := v.Verify(s.ID(), []byte("massage"), sig); !errors.Is(err, seal.ErrForged) {
					t.Errorf("with another message: %v, want ErrForged", err)
				}
				if err := v.Verify(s.ID(), []byte("message"), sig[:8]); !errors.Is(err, seal.ErrForged) {
					t.Errorf("with half a signature: %v, want ErrForged", err)
				}
			}
		})
	}
}

func TestNewKeysRefusesAnEmptySecret(t *testing.T) {
	if _, err := seal.NewKeys([][]byte{[]byte("a"), nil}, "p"); !errors.Is(err, seal.ErrConfig) {
		t.Fatal(err)
	}
}

func guard() *seal.Guard { return seal.NewGuard(1024, time.Now()) }

// admit admits number seq of a message that was sent age ago.
func admit(g *seal.Guard, name string, seq uint64, age time.Duration) error {
	_, err := g.Admit(time.Now(), []byte(name), 1, time.Now().Add(-age).UnixMilli(), seq)
	return err
}

func TestTimeWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := guard()
		if err := admit(g, "early", 1, 2500*time.Millisecond); !errors.Is(err, seal.ErrOld) {
			t.Errorf("a message from before this process began: %v, want ErrOld", err)
		}

		// After a minute only the time window matters.
		time.Sleep(time.Minute)
		for i, tc := range []struct {
			age  time.Duration
			want error
		}{
			{0, nil}, {30 * time.Second, nil}, {-30 * time.Second, nil},
			{30*time.Second + time.Millisecond, seal.ErrOld},
			{-30*time.Second - time.Millisecond, seal.ErrFuture},
			{1 << 60, seal.ErrOld}, {-1 << 60, seal.ErrFuture},
		} {
			if err := admit(g, "n", uint64(i+1), tc.age); !errors.Is(err, tc.want) {
				t.Errorf("sent %s ago: %v, want %v", tc.age, err, tc.want)
			}
		}
	})
}

// TestForgottenSenderCannotBeReplayed: a sender is forgotten only when all its messages are too old, including those
// from the future, and even if the clock is then set back.
func TestForgottenSenderCannotBeReplayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := guard()
		sent := time.Now().Add(29 * time.Second)
		at := sent.UnixMilli()

		// The guard is full of senders. Each incarnation of a process is a sender with its own numbers.
		for incarnation := range uint64(1024) {
			if _, err := g.Admit(time.Now(), []byte("a"), 1+incarnation, at, 1); err != nil {
				t.Fatal(err)
			}
		}

		replay := func(now time.Time) error {
			_, err := g.Admit(now, []byte("a"), 1, at, 1)
			return err
		}

		other := func() error { return admit(g, "b", 1, 0) }

		time.Sleep(58 * time.Second)
		if err := other(); !errors.Is(err, seal.ErrSenders) {
			t.Errorf("a sender beyond the bound: %v", err)
		}
		if err := replay(time.Now()); !errors.Is(err, seal.ErrReplayed) {
			t.Errorf("a replay: %v", err)
		}

		time.Sleep(2 * time.Second)
		if err := other(); err != nil { // takes the place of a forgotten sender
			t.Errorf("a new sender, when there is room: %v", err)
		}

		if err := replay(time.Now()); !errors.Is(err, seal.ErrOld) {
			t.Errorf("a replay of a forgotten sender: %v", err)
		}
		if err := replay(sent); !errors.Is(err, seal.ErrOld) {
			t.Errorf("a replay after the clock was set back: %v", err)
		}
	})
}

// TestEachNumberOnce compares the window with a set: a number is accepted at most once, and always if it is new and not
// further back than the width.
func TestEachNumberOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.SampledFrom([]int{64, 128, 1024}).Draw(t, "width")
		g := seal.NewGuard(width, time.Now())

		taken := map[uint64]bool{}
		newest := uint64(0)

		step := rapid.OneOf(rapid.IntRange(-10, 10), rapid.IntRange(-width-70, width+70), rapid.IntRange(0, 5*width))

		for range rapid.IntRange(1, 300).Draw(t, "messages") {
			seq := uint64(max(int64(newest)+int64(step.Draw(t, "step")), 1))
			err := admit(g, "a", seq, 0)
			replayed := errors.Is(err, seal.ErrReplayed)
			inWindow := seq > newest || newest-seq < uint64(width)
			if err != nil && !replayed {
				t.Fatal(err)
			}
			if err == nil && taken[seq] {
				t.Fatalf("number %d was accepted twice", seq)
			}
			if replayed && !taken[seq] && inWindow {
				t.Fatalf("number %d was refused, the newest is %d", seq, newest)
			}

			taken[seq] = true
			newest = max(newest, seq)
		}
	})
}

// TestASenderWhoseClockIsBehind: while a process has just started, it refuses such a sender, until the sender's
// messages are clearly no replays.
func TestASenderWhoseClockIsBehind(t *testing.T) {
	g := guard()
	begun := time.Now()
	const behind = 10 * time.Second

	admit := func(name string, after time.Duration, sent time.Duration, seq uint64) error {
		_, err := g.Admit(begun.Add(after), []byte(name), 1, begun.Add(sent).UnixMilli(), seq)
		return err
	}

	for ms := range 4 {
		after := time.Duration(ms) * time.Second
		want := error(nil)
		if after < 2*time.Second {
			want = seal.ErrOld
		}

		if err := admit("behind", after, after-behind, uint64(100+ms)); !errors.Is(err, want) {
			t.Errorf("after %s a message gets %v, want %v", after, err, want)
		}

		// An attacker keeps replaying messages recorded before this process started.
		if err := admit("behind", after, -behind-time.Second, uint64(90+ms)); !errors.Is(err, seal.ErrOld) {
			t.Errorf("after %s a recorded message gets %v, want ErrOld", after, err)
		}
	}

	// A sender whose clock is only a second behind is never refused. A recording without its sender never becomes
	// newer.
	if err := admit("nearly", 0, -time.Second, 1); err != nil {
		t.Error(err)
	}
	for range 3 {
		if err := admit("recording", 5*time.Second, -behind, 1); !errors.Is(err, seal.ErrOld) {
			t.Errorf("a recorded message gets %v, want ErrOld", err)
		}
	}
}
