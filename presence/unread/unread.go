// Package unread has the words and contract of notifications: pages change,
// users follow pages, and a user's unread count is a sum over the followed
// pages of the changes that others made and the user has not seen. A change is
// one increment, however many users follow the page.
package unread

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

const (
	MaxFollows = 1000           // pages one user may follow
	MaxKey     = 255            // bytes of an idempotency key
	KeyFor     = 24 * time.Hour // how long a key is remembered
	// MaxAuthors is of how many users a page's own changes are noted. The changes
	// of later ones count for themselves, too.
	MaxAuthors = 10_000
)

// ErrConflict says that a record has changed since it was read.
var ErrConflict = errors.New("the follows have changed meanwhile")

// User is the keyed 128-bit hash of a user id. Ids themselves never leave the
// gateway.
type User [presence.FollowerSize]byte

// String is the user as stores write it: 22 characters.
func (u User) String() string { return base64.RawURLEncoding.EncodeToString(u[:]) }

// ParseUser reads what String wrote.
func ParseUser(s string) (u User, err error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) != len(u) {
		return u, fmt.Errorf("unread: %q is no user", s)
	}
	return User(b), nil
}

// Change says that a page was modified.
type Change struct {
	Key string // of two changes of a page with the same key within KeyFor one counts; empty: this one counts
	By  *User  // whose own unread does not move; nil: nobody's
}

// KeyHash is a page's key as stores keep it.
func KeyHash(page, key string) [16]byte {
	sum := sha256.Sum256([]byte(page + "\x00" + key)) // no page has a zero byte
	return [16]byte(sum[:16])
}

// Level is how far the changes of a page have come. The zero Level is that of a
// page that never changed.
type Level struct {
	Incarnation uint64    // grows when the past of the counter was lost
	All         int64     // changes in this incarnation
	By          int64     // those of them that had an author
	At          time.Time // of the last one, in UTC, whole seconds
}

// Newer reports whether l replaces o as the level of the same page.
func (l Level) Newer(o Level) bool {
	return cmp.Or(cmp.Compare(l.Incarnation, o.Incarnation), cmp.Compare(l.All, o.All)) > 0
}

// Count is the level as it is published.
func (l Level) Count(page string) presence.Count {
	return presence.Count{
		Page: presence.ChangesTopic(page), Users: l.By, Updated: l.At,
		Version: presence.Version{Incarnation: l.Incarnation, Sequence: uint64(l.All)},
	}
}

// LevelOf is the level that was published as c.
func LevelOf(c presence.Count) Level {
	return Level{Incarnation: c.Version.Incarnation, All: int64(c.Version.Sequence), By: c.Users, At: c.Updated}
}

// Own is what one user has changed of a page.
type Own struct {
	Changes int64     // in the level's incarnation
	Last    int64     // Level.All at the last of them
	Before  time.Time // of the last change by somebody else before that; zero: there was none
}

// Next is o after another change by the user, from the page's old level.
func (o Own) Next(old Level) Own {
	n := Own{Changes: o.Changes + 1, Last: old.All + 1, Before: old.At}
	if o.Changes > 0 && o.Last == old.All {
		n.Before = o.Before
	}
	return n
}

// others is the number of changes that the user did not make, and the time of
// the last of them.
func others(l Level, o Own) (n int64, at time.Time) {
	at = l.At
	if o.Changes > 0 && o.Last == l.All {
		at = o.Before
	}
	return max(l.All-o.Changes, 0), at
}

// Follow is one page that a user follows, as it is stored.
type Follow struct {
	Page string
	// AwayOnly: changes while the user is present on the page do not count.
	AwayOnly    bool
	Incarnation uint64 // of the page's changes; 0: it had never changed
	Seen        int64  // changes by others that are not unread
	// Through names the lives of the gateways through which a user who follows
	// away only is present on the page, and Held is where the changes by others
	// were when that began. Without any the user is away.
	Through []string
	Held    int64
}

// Unread is how many changes of the page are unread. alive reports whether the
// life of a gateway that Through names still lasts; nil: all do.
func (f Follow) Unread(l Level, o Own, alive func(string) bool) int64 {
	n, _ := others(l, o)
	seen, held := f.at(l)
	if f.present(alive) {
		n = min(n, held)
	}
	return max(n-seen, 0)
}

// at is Seen and Held as numbers of the level's incarnation: of another one
// nothing has been seen.
func (f Follow) at(l Level) (seen, held int64) {
	if f.Incarnation != l.Incarnation {
		return 0, 0
	}
	return f.Seen, f.Held
}

func (f Follow) present(alive func(string) bool) bool {
	return slices.ContainsFunc(f.Through, func(life string) bool { return alive == nil || alive(life) })
}

// AppendValue appends all of f but its page: "incarnation seen away held life life …".
func (f Follow) AppendValue(b []byte) []byte {
	b = strconv.AppendUint(b, f.Incarnation, 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, f.Seen, 10)
	if f.AwayOnly {
		b = append(b, " 1 "...)
	} else {
		b = append(b, " 0 "...)
	}
	b = strconv.AppendInt(b, f.Held, 10)
	for _, life := range f.Through {
		b = append(b, ' ')
		b = append(b, life...)
	}
	return b
}

// ParseFollow reads what AppendValue wrote.
func ParseFollow(page, value string) (Follow, error) {
	f := Follow{Page: page}
	var fields [4]string
	rest, more := value, true
	for i := range fields {
		fields[i], rest, more = strings.Cut(rest, " ")
		if !more && i < len(fields)-1 {
			return f, badFollow(page, value)
		}
	}
	var errs [3]error
	f.Incarnation, errs[0] = strconv.ParseUint(fields[0], 10, 64)
	f.Seen, errs[1] = strconv.ParseInt(fields[1], 10, 64)
	f.Held, errs[2] = strconv.ParseInt(fields[3], 10, 64)
	if errs != [3]error{} || f.Seen < 0 || f.Held < 0 || fields[2] != "0" && fields[2] != "1" {
		return f, badFollow(page, value)
	}
	f.AwayOnly = fields[2] == "1"
	if more {
		if f.Through = strings.Split(rest, " "); slices.Contains(f.Through, "") {
			return f, badFollow(page, value)
		}
	}
	return f, nil
}

func badFollow(page, value string) error {
	return fmt.Errorf("unread: a follow of %q is %q", page, value)
}

// Record is what a user follows.
type Record struct {
	Version presence.Version // grows with every change of the record
	Updated time.Time        // when a change of it last moved the unread count; zero: never
	Follows []Follow         // sorted by page, byte by byte
}

// Clone is r with memory of its own.
func (r Record) Clone() Record {
	r.Follows = slices.Clone(r.Follows) // Through is replaced, never written to
	return r
}

// Find returns where the page is in r.Follows, or would be.
func (r Record) Find(page string) (int, bool) {
	return slices.BinarySearchFunc(r.Follows, page, func(f Follow, page string) int { return strings.Compare(f.Page, page) })
}

// Pages are the pages of the record, in its order.
func (r Record) Pages() []string {
	pages := make([]string, len(r.Follows))
	for i, f := range r.Follows {
		pages[i] = f.Page
	}
	return pages
}

// Differences returns the follows of r that old has not, or has otherwise, and
// the pages that only old has.
func (r Record) Differences(old Record) (set []Follow, gone []string) {
	for _, f := range r.Follows {
		if i, ok := old.Find(f.Page); !ok || !equal(f, old.Follows[i]) {
			set = append(set, f)
		}
	}
	for _, f := range old.Follows {
		if _, ok := r.Find(f.Page); !ok {
			gone = append(gone, f.Page)
		}
	}
	return set, gone
}

func equal(a, b Follow) bool {
	return a.Page == b.Page && a.AwayOnly == b.AwayOnly && a.Incarnation == b.Incarnation &&
		a.Seen == b.Seen && a.Held == b.Held && slices.Equal(a.Through, b.Through)
}

// Store keeps changes and follows. All methods may be called from any
// goroutine. What a call has returned from without an error is kept as well as
// the store keeps anything. presence.ErrUnavailable says that it cannot be
// reached; all calls are safe to repeat, Change when it has a key.
//
// A change is published under presence.ChangesTopic, as Level.Count has it, and
// a saved record under presence.FollowsTopic, with its version.
type Store interface {
	// Change counts a change of the page.
	Change(ctx context.Context, page string, c Change) error
	// Levels returns the levels of pages, in their order, and what of each user
	// has changed.
	Levels(ctx context.Context, user User, pages []string) ([]Level, []Own, error)
	// Authors returns the page's level and, in the same step, what those of users
	// have changed of it who did so after the level's By was since. It may return
	// others' beside; who is not in the answer has what they had.
	Authors(ctx context.Context, page string, since int64, users []User) (Level, map[User]Own, error)
	// Records returns what users follow, in their order. Who follows nothing and
	// never did has the zero Record.
	Records(ctx context.Context, users []User) ([]Record, error)
	// Save puts r in the place of old, which Records returned, and returns the
	// version it now has. It returns ErrConflict when another was saved meanwhile.
	Save(ctx context.Context, user User, old, r Record) (presence.Version, error)
}
