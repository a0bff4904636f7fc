package presence

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
	"unique"

	"github.com/cespare/xxhash/v2"
)

// Kind is the kind of a topic, which determines the meaning and the form of its values. It is
// one word of lower case letters. Stores, feeds, dispatchers and hubs treat all kinds alike.
// Only the publisher of a kind knows its values, and the registries: kinds.go of presencemem
// and presenceredis, which read values, and kinds.go of gateway, which delivers them.
type Kind struct{ word shared }

// KindOf returns the kind with the given name.
func KindOf(name string) Kind { return Kind{share(name)} }

// String returns the kind's name.
func (k Kind) String() string { return k.word.String() }

// Site is one of the sites that a cluster serves. Its name has lower case letters, digits
// and hyphens. The zero value is DefaultSite, whose name is empty.
type Site struct{ word shared }

// SiteOf returns the site with the given name.
func SiteOf(name string) Site { return Site{share(name)} }

// String returns the site's name as stores and topics have it. See also Name.
func (n Site) String() string { return n.word.String() }

// DefaultSite is the only site unless others are set up. Its stored data does not mention
// a site.
var DefaultSite Site

// shared is a short string that very many topics have in common. It takes one word of
// memory instead of two, and equal strings share their bytes. The zero value is empty.
type shared struct{ handle unique.Handle[string] }

func share(s string) shared {
	// So that the zero value and the shared empty string are equal.
	if s == "" {
		return shared{}
	}
	return shared{unique.Make(s)}
}

func (s shared) String() string {
	if s == (shared{}) {
		return ""
	}

	return s.handle.Value()
}

// Topic identifies a value that is published. Topics are comparable.
type Topic struct {
	Site Site
	Kind Kind
	Key  string // within the site, for instance of a page or a user; no control characters
}

// Update is the newest value of a topic. The value is absolute, so a receiver that
// missed updates needs only the last one.
//
// A stale update may lack something. It never replaces an update that the receiver has: if
// its version is not newer, it only says that the receiver's update is stale too.
type Update struct {
	Topic
	Version Version // zero: nothing was ever published
	Stale   bool
	Value   string // in the form of its kind, without control characters; empty: no value
}

// Newer reports whether u replaces o as the update of the same topic.
func (u Update) Newer(o Update) bool { return u.Version.Compare(o.Version) > 0 }

// ErrTopic is wrapped by every error about an invalid topic or update.
var ErrTopic = errors.New("bad topic")

// Bounds of the text of a topic and of a value, in bytes.
const (
	maxWord  = 64 // of Site and of Kind
	maxKey   = 4 * MaxPageLength
	maxValue = 1024
)

// String returns the topic as processes and stores write it: "kind/site/key". ParseTopic
// parses this form.
func (t Topic) String() string { return t.Kind.String() + "/" + t.Site.String() + "/" + t.Key }

// ParseTopic parses what String wrote.
func ParseTopic(s string) (Topic, error) {
	kind, rest, ok := strings.Cut(s, "/")
	// The key comes last, because it alone may have slashes.
	site, key, more := strings.Cut(rest, "/")

	t := Topic{Site: SiteOf(site), Kind: KindOf(kind), Key: key}
	if !ok || !more {
		return t, fmt.Errorf("%w: %q is not kind/site/key", ErrTopic, Excerpt(s))
	}

	return t, t.Check()
}

// Check returns nil if the topic is valid, or else the reason why not. It does not check
// whether the key fits the kind.
func (t Topic) Check() error {
	// The default site has no name. Every kind has one.
	if t.Kind == (Kind{}) || !word(t.Kind.String()) {
		return fmt.Errorf("%w: %q: %q is not a valid kind", ErrTopic, Excerpt(t.Key), Excerpt(t.Kind.String()))
	}
	if !word(t.Site.String()) {
		return fmt.Errorf("%w: %q: %q is not a valid site", ErrTopic, Excerpt(t.Key), Excerpt(t.Site.String()))
	}
	if t.Key == "" || !printable(t.Key, maxKey) {
		return fmt.Errorf("%w: %q is not a valid key", ErrTopic, Excerpt(t.Key))
	}

	return nil
}

// Check returns nil if the update is valid, or else the reason why not.
func (u Update) Check() error {
	if err := u.Topic.Check(); err != nil {
		return err
	}
	// Whoever puts it into JSON escapes nothing but quotes and backslashes.
	if !printable(u.Value, maxValue) {
		return fmt.Errorf("%w: %q: %q is not a valid value", ErrTopic, Excerpt(u.Key), Excerpt(u.Value))
	}

	return nil
}

func word(s string) bool {
	if len(s) > maxWord {
		return false
	}

	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}

	return true
}

// printable reports whether s is UTF-8 without control characters, of at most maxLen
// bytes. In JSON only its quotes and backslashes need escaping.
func printable(s string, maxLen int) bool {
	if len(s) > maxLen || !utf8.ValidString(s) {
		return false
	}

	for i := range len(s) {
		if s[i] < ' ' || s[i] == 0x7F {
			return false
		}
	}

	return true
}

// Bucket returns the topic's bucket among b buckets, the unit of distribution. The
// bucket does not depend on the kind: topics of all kinds with the same key are in
// one bucket, so that one script of a store may write all of them.
func (t Topic) Bucket(b int) int { return Bucket(t.Name(), b) }

// Name returns the qualified name of the topic's subject, such as a page, by which stores
// know it.
func (t Topic) Name() string { return t.Site.Qualify(t.Key) }

// TopicOf returns the topic of a kind about the subject with the qualified name.
func TopicOf(kind Kind, name string) Topic {
	site, key := SplitName(name)
	return Topic{Site: site, Kind: kind, Key: key}
}

// Bucket returns the bucket, among b buckets, of the topics about the subject with the
// qualified name.
func Bucket(name string, b int) int { return int(xxhash.Sum64String(name) % uint64(b)) }
