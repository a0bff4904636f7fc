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
	KeyFor     = 24 * time.Hour // how long an idempotency key is remembered
	EmptyFor   = 24 * time.Hour // how long a record without follows is kept
	// MaxAuthors bounds the authors that the store keeps for a page. Further authors see
	// their own changes as unread.
	MaxAuthors = 10_000
)

// ErrConflict means that a record has changed since it was read.
var ErrConflict = errors.New("the follows have changed meanwhile")

// User is the keyed 128-bit hash of a user id. Ids themselves never leave the
// gateway.
type User [16]byte

// String returns the user as stores write it: 22 characters.
func (u User) String() string { return base64.RawURLEncoding.EncodeToString(u[:]) }

// ParseUser parses what String wrote.
func ParseUser(s string) (u User, err error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil || len(b) != len(u) {
		return u, fmt.Errorf("unread: %q is not a valid user", s)
	}

	return User(b), nil
}

// Change is one modification of a page.
type Change struct {
	Key string // idempotency key: changes of a page with the same key within KeyFor count once; empty: always counts
	By  *User  // the author, for whom the change is not unread; nil: none
	// Title and URL describe the change in a list of notifications. Both may be empty. They
	// have no control characters.
	Title, URL string
}

// Note has the title and the URL of a page's newest change with a title or URL. A page
// without such a change has the zero Note.
type Note struct {
	All        int64 // Level.All at that change
	Title, URL string
}

// Value returns the note of a change as stores write it, without All, or an empty string.
func (c Change) Value() string {
	if c.Title == "" && c.URL == "" {
		return ""
	}

	return c.Title + "\n" + c.URL
}

// NoteOf parses "all", a space and what Value wrote. Empty text is the zero Note.
func NoteOf(text string) (n Note) {
	// The number first, because a title may have spaces.
	all, value, _ := strings.Cut(text, " ")
	n.All, _ = strconv.ParseInt(all, 10, 64)

	n.Title, n.URL, _ = strings.Cut(value, "\n")

	return n
}

// KeyHash returns a page's idempotency key as stores keep it.
func KeyHash(page, key string) [16]byte {
	sum := sha256.Sum256([]byte(page + "\x00" + key)) // no page has a zero byte
	return [16]byte(sum[:16])
}

// Level counts the changes of a page. A page that never changed has the zero Level; after a loss of data it may have an
// incarnation.
type Level struct {
	Incarnation uint64    // grows when the counter's history was lost
	All         int64     // changes in this incarnation
	By          int64     // how many of them had an author
	At          time.Time // time of the last change, in UTC, whole seconds
	// Before is how many of All were made before this incarnation: the changes that remained
	// when the store lost the last ones. An Update does not have it.
	Before int64
}

// Newer reports whether l replaces o as the level of the same page.
func (l Level) Newer(o Level) bool {
	return cmp.Or(cmp.Compare(l.Incarnation, o.Incarnation), cmp.Compare(l.All, o.All)) > 0
}

// Own counts one user's own changes of a page.
type Own struct {
	Changes int64     // in the level's incarnation
	Last    int64     // Level.All at the user's last change
	Before  time.Time // time of the last change by another user before Last; zero: there was none
}

// Next returns o after another change by the user. old is the page's level before it.
func (o Own) Next(old Level) Own {
	n := Own{Changes: o.Changes + 1, Last: old.All + 1, Before: old.At}

	// Several changes of the user in a row have the same other change before them.
	if o.Changes > 0 && o.Last == old.All {
		n.Before = o.Before
	}

	return n
}

// others returns the number of changes by other users, and the time of the last of them.
func others(l Level, o Own) (n int64, at time.Time) {
	at = l.At
	// The user's own change is no news to the user.
	if o.Changes > 0 && o.Last == l.All {
		at = o.Before
	}

	return max(l.All-o.Changes, 0), at
}

// Follow is one page that a user follows, as it is stored.
type Follow struct {
	Page        string
	Incarnation uint64 // of the page's level; 0: the page had never changed
	Seen        int64  // changes by others that are not unread
}

// Unread returns how many changes of the page are unread.
func (f Follow) Unread(l Level, o Own) int64 {
	n, _ := others(l, o)
	return max(n-f.seen(l), 0)
}

// seen returns Seen for the level's incarnation. If the follow has another incarnation, the
// user has seen at most the changes from before the level's incarnation.
func (f Follow) seen(l Level) int64 {
	// The store has lost changes: Seen may count some that are not there any more.
	if f.Incarnation != l.Incarnation {
		return min(f.Seen, l.Before)
	}
	return f.Seen
}

// AppendValue appends all of f except its page: "incarnation seen 0 0". Earlier releases
// need the zeros, and append more.
func (f Follow) AppendValue(b []byte) []byte {
	b = strconv.AppendUint(b, f.Incarnation, 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, f.Seen, 10)
	return append(b, " 0 0"...)
}

// ParseFollow parses what AppendValue wrote, in this or an earlier release.
func ParseFollow(page, value string) (Follow, error) {
	f := Follow{Page: page}

	incarnation, rest, _ := strings.Cut(value, " ")
	// What earlier releases appended is not needed any more.
	seen, _, _ := strings.Cut(rest, " ")

	var errs [2]error
	f.Incarnation, errs[0] = strconv.ParseUint(incarnation, 10, 64)
	f.Seen, errs[1] = strconv.ParseInt(seen, 10, 64)

	if errs != [2]error{} || f.Seen < 0 {
		return f, fmt.Errorf("unread: the follow of %q is malformed: %q", page, value)
	}
	return f, nil
}

// Record has the follows of a user.
type Record struct {
	Version presence.Version // grows with every change of the record
	Updated time.Time        // when a change of the record last changed the unread count; zero: never
	Follows []Follow         // sorted by page, byte by byte
}

// Clone returns a copy of r that shares no memory with it.
func (r Record) Clone() Record {
	r.Follows = slices.Clone(r.Follows)
	return r
}

// Find returns the index of the page in r.Follows, or the index where it would be.
func (r Record) Find(page string) (int, bool) {
	return slices.BinarySearchFunc(r.Follows, page, func(f Follow, page string) int {
		return strings.Compare(f.Page, page)
	})
}

// Pages returns the pages of the record, in its order.
func (r Record) Pages() []string {
	pages := make([]string, len(r.Follows))
	for i, f := range r.Follows {
		pages[i] = f.Page
	}

	return pages
}

// Differences returns the follows of r that are missing or different in old, and the pages
// that only old has.
func (r Record) Differences(old Record) (set []Follow, gone []string) {
	for _, f := range r.Follows {
		if i, ok := old.Find(f.Page); !ok || f != old.Follows[i] {
			set = append(set, f)
		}
	}

	// Both are sorted, so looking one up takes a few comparisons.
	for _, f := range old.Follows {
		if _, ok := r.Find(f.Page); !ok {
			gone = append(gone, f.Page)
		}
	}

	return set, gone
}

// Store has changes and follows. Any goroutine may call its methods. After a call without
// an error its change is as durable as the store's other data. presence.ErrUnavailable
// says that the store cannot be reached. All calls are safe to repeat, except a Change
// without a key.
//
// The store publishes a change as Level.Update, and a saved record as Record.Update.
type Store interface {
	// Change counts a change of the page.
	Change(ctx context.Context, page string, c Change) error
	// Levels returns the levels of pages, in the order of pages, and the user's own
	// changes of each page.
	Levels(ctx context.Context, user User, pages []string) ([]Level, []Own, error)
	// Authors returns together the page's level and the own changes of those users who have changed the page since its
	// Level.By was since. It may return further users. Users missing in the result have not changed the page since
	// then.
	Authors(ctx context.Context, page string, since int64, users []User) (Level, map[User]Own, error)
	// Notes returns the notes of pages, in the order of pages.
	Notes(ctx context.Context, pages []string) ([]Note, error)
	// Records returns the records of users, in the order of users. A user who never
	// followed a page has the zero Record.
	Records(ctx context.Context, users []User) ([]Record, error)
	// Save replaces old, which Records returned, with r, and returns r's new version. It
	// returns ErrConflict if another record was saved meanwhile.
	Save(ctx context.Context, user User, old, r Record) (presence.Version, error)
}
