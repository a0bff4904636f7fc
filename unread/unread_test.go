package unread

import (
	"testing"

	"pgregory.net/rapid"
)

func FuzzParseFollow(f *testing.F) {
	f.Add("1 2 0 3")
	f.Add("1700000000000 2 1 3 127.0.0.1:7946/1700000000000 b/2")
	f.Add("1 2  3")

	f.Fuzz(func(t *testing.T, value string) {
		follow, err := ParseFollow("p", value)
		if err != nil {
			return
		}

		again, err := ParseFollow("p", string(follow.AppendValue(nil)))
		if err != nil || again != follow {
			t.Errorf("%q is %+v, then %+v, %v", value, follow, again, err)
		}
	})
}

func TestUsersAsText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := User(rapid.SliceOfN(rapid.Byte(), len(User{}), len(User{})).Draw(t, "user"))
		if got, err := ParseUser(u.String()); err != nil || got != u || len(u.String()) != 22 {
			t.Errorf("%x is %q, then %x, %v", u, u, got, err)
		}
	})

	for _, bad := range []string{"", "A", "AAAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAA*"} {
		if _, err := ParseUser(bad); err == nil {
			t.Errorf("%q is accepted as a user", bad)
		}
	}
}

// Whatever is stored, an unread number is not negative, and not more than what others have changed.
func TestUnreadIsBounded(t *testing.T) {
	number := rapid.Int64Range(0, 5)
	rapid.Check(t, func(t *rapid.T) {
		f := Follow{Incarnation: uint64(number.Draw(t, "incarnation")), Seen: number.Draw(t, "seen")}
		l := Level{Incarnation: uint64(number.Draw(t, "of level")), All: number.Draw(t, "all")}
		o := Own{Changes: number.Draw(t, "own")}
		if n := f.Unread(l, o); n < 0 || n > max(l.All-o.Changes, 0) {
			t.Errorf("%+v of %+v, %+v gives %d", f, l, o, n)
		}
	})
}

// A page that has lost its last changes continues with those that it still has. A user who had seen more has seen no
// change after them.
func TestAFollowOfAnEarlierIncarnation(t *testing.T) {
	for _, tc := range []struct {
		name                    string
		seen, all, before, want int64
	}{
		{"nothing was lost", 4, 4, 4, 0},
		{"nothing was lost, some were unread", 2, 5, 4, 3},
		{"three were lost that were seen, three came", 4, 4, 1, 3},
		{"all were lost, two came", 4, 2, 0, 2},
	} {
		f := Follow{Incarnation: 1, Seen: tc.seen}
		l := Level{Incarnation: 2, All: tc.all, Before: tc.before}
		if n := f.Unread(l, Own{}); n != tc.want {
			t.Errorf("%s: %d unread, want %d", tc.name, n, tc.want)
		}
	}
}
