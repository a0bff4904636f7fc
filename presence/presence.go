// Package presence has the types and contracts of the domain: pages, users, counts and
// versions, and the interfaces of the stores. It imports no other package of Headcount,
// so every layer can import it.
package presence

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Defaults of the two hash spaces. They are cluster facts: every process of a
// region must use the same values.
const (
	DefaultPartitions = 271 // P, the unit of ownership: partition = user mod P
	DefaultBuckets    = 64  // B, the unit of distribution: bucket = hash(page) mod B
)

// HoldTimeout is how long a gateway waits for the store to have a hold. No process carries
// out a hold that has waited longer: the client may have asked for the opposite since.
const HoldTimeout = 3 * time.Second

// HoldChange takes, renews or ends a user's hold on a page.
type HoldChange struct {
	User User
	Page string
	On   bool // take or renew
	// Asked is when a gateway received the call for it. Of two changes of one hold the one asked for later decides,
	// whatever the order in which the owner receives them.
	Asked time.Time
}

// User is the keyed 64-bit hash of a user id. Ids themselves never leave the
// gateway.
type User uint64

// Partition is the user's partition of p. The hash is uniform already, so the
// remainder is enough.
func (u User) Partition(p int) int { return int(uint64(u) % uint64(p)) }

// Version orders the counts of one page: first by incarnation, which grows whenever the
// history of the count was lost, then by sequence. A page that nobody ever joined has the
// zero Version.
type Version struct {
	Incarnation uint64 // unix milliseconds, or one more than the highest known
	Sequence    uint64
}

// Compare returns -1, 0 or 1 as v is older than, the same as or newer than o.
func (v Version) Compare(o Version) int {
	return cmp.Or(cmp.Compare(v.Incarnation, o.Incarnation), cmp.Compare(v.Sequence, o.Sequence))
}

// String returns the external form, "incarnation-sequence".
func (v Version) String() string { return string(v.append(make([]byte, 0, 41))) } // two numbers of 64 bits

func (v Version) append(b []byte) []byte {
	b = strconv.AppendUint(b, v.Incarnation, 10)
	b = append(b, '-')

	return strconv.AppendUint(b, v.Sequence, 10)
}

// ParseVersion parses what String wrote.
func ParseVersion(s string) (Version, error) {
	inc, seq, ok := strings.Cut(s, "-")
	if !ok {
		return Version{}, fmt.Errorf("version %q: want incarnation-sequence", s)
	}

	incarnation, err := strconv.ParseUint(inc, 10, 64)
	if err != nil {
		return Version{}, fmt.Errorf("version %q: incarnation: %w", s, err)
	}
	sequence, err := strconv.ParseUint(seq, 10, 64)
	if err != nil {
		return Version{}, fmt.Errorf("version %q: sequence: %w", s, err)
	}

	return Version{incarnation, sequence}, nil
}

// Count says how many distinct users are present on Page. It is an absolute
// value: of two counts of one page, the one with the greater Version is valid.
type Count struct {
	Page    string    // a qualified name, see Site.Qualify
	Users   int64     // never negative
	Updated time.Time // last change of the total; zero when nobody ever joined
	Version Version
	Stale   bool // the count may be outdated or lack users, see Update
	// Without has the names of the silent regions that Users leaves out, separated by
	// commas, in the order of the store.
	Without string
}

// Part is what one region contributes to a count.
type Part struct {
	Region string
	Users  int64
}

// Newer reports whether c replaces o as the count of the same page.
func (c Count) Newer(o Count) bool { return c.Version.Compare(o.Version) > 0 }

// AppendJSON appends the external form of a count:
// {"page":"p","count":715,"updated_at":"2030-10-10T12:11:42Z","version":"1-2"}.
// The page must have passed CheckReadable.
func (c Count) AppendJSON(b []byte) []byte {
	b = append(b, '{')
	b = c.AppendMembers(b)

	return append(b, '}')
}

// AppendMembers appends the external form without the braces, for frames that have
// further members.
func (c Count) AppendMembers(b []byte) []byte {
	b = append(b, `"page":`...)
	b = AppendString(b, KeyOf(c.Page))
	b = append(b, `,"count":`...)
	b = strconv.AppendInt(b, c.Users, 10)
	b = append(b, `,"updated_at":`...)
	b = AppendTime(b, c.Updated)
	b = append(b, `,"version":"`...)
	b = c.Version.append(b)
	b = append(b, '"')

	// A count that leaves a region out is not the present one of the whole either.
	if c.Stale || c.Without != "" {
		b = append(b, `,"stale":true`...)
	}

	if c.Without != "" {
		b = append(b, `,"stale_regions":[`...)
		for i, name := range strings.Split(c.Without, ",") {
			if i > 0 {
				b = append(b, ',')
			}
			b = AppendString(b, name)
		}
		b = append(b, ']')
	}

	return b
}

// AppendTime appends the external form of a time: UTC in whole seconds, or null for the
// zero time.
func AppendTime(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return append(b, "null"...)
	}

	b = append(b, '"')
	b = t.UTC().AppendFormat(b, time.RFC3339) // package time has a fast path for this layout

	return append(b, '"')
}

// Seconds returns a time in unix seconds, as stores and updates have it; 0 for the zero time.
func Seconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}

	return t.Unix()
}

// TimeOf returns the time, in UTC, that Seconds returned as seconds.
func TimeOf(seconds int64) time.Time {
	// 0 is the zero time in all stores, and nothing is older.
	if seconds <= 0 {
		return time.Time{}
	}

	return time.Unix(seconds, 0).UTC()
}

// Moment is a time whose JSON is the external form, as AppendTime writes it.
type Moment struct{ time.Time }

// MarshalJSON implements json.Marshaler.
func (m Moment) MarshalJSON() ([]byte, error) { return AppendTime(nil, m.Time), nil }

// MarshalJSON is AppendJSON for encoding/json.
func (c Count) MarshalJSON() ([]byte, error) { return c.AppendJSON(nil), nil }

// AppendString appends s as a JSON string. Pages are valid UTF-8 without
// control characters, so only the quote and the backslash need escaping.
func AppendString(b []byte, s string) []byte {
	b = append(b, '"')
	// Byte by byte, since no byte of a longer code point is a quote or a backslash.
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			b = append(b, '\\')
		}
		b = append(b, s[i])
	}

	return append(b, '"')
}
