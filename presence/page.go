package presence

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// Site stands for the whole site: the distinct users present on any page. It
// can be read, watched and counted like a page, not joined.
const Site = "*"

// MaxPageLength is the longest page id, in code points.
const MaxPageLength = 128

// MaxPages is the number of distinct pages one connection may have joined or
// subscribed to, and one user may hold.
const MaxPages = 100

// ErrPage is in every error about a page id that cannot be.
var ErrPage = errors.New("bad page")

// Zero-width non-joiner and joiner, format characters that words of some
// scripts cannot do without.
const (
	zwnj = '\u200C'
	zwj  = '\u200D'
)

// CheckPage says why page cannot be joined, or nil. A page id is 1 to 128 code
// points of valid UTF-8: letters, marks, numbers, punctuation, symbols, the
// space U+0020, and inside also U+200C and U+200D. It is compared byte by byte:
// nothing is normalised, trimmed or folded.
func CheckPage(page string) error {
	switch page {
	case "":
		return fmt.Errorf("%w: it is empty; a page id has 1 to %d characters", ErrPage, MaxPageLength)
	case Site, "-", ".", "..":
		return fmt.Errorf("%w: %q is reserved; choose another id", ErrPage, page)
	}
	// A code point has at most four bytes: what is longer need not be counted.
	if len(page) > 4*MaxPageLength || utf8.RuneCountInString(page) > MaxPageLength {
		return fmt.Errorf("%w: it is longer than %d characters", ErrPage, MaxPageLength)
	}
	if !utf8.ValidString(page) {
		return fmt.Errorf("%w: it is not valid UTF-8", ErrPage)
	}
	for i, r := range page {
		switch {
		case r == utf8.RuneError:
			return fmt.Errorf("%w: it has the replacement character U+FFFD", ErrPage)
		case r == zwnj || r == zwj:
			if i == 0 || i+utf8.RuneLen(r) == len(page) {
				return fmt.Errorf("%w: %U may not be the first or last character", ErrPage, r)
			}
		case !unicode.IsPrint(r):
			return fmt.Errorf("%w: it has the character %U; only letters, marks, numbers, punctuation, symbols and the space U+0020 are allowed", ErrPage, r)
		}
	}
	return nil
}

// CheckReadable is CheckPage, but allows Site: what can be read and watched.
func CheckReadable(page string) error {
	if page == Site {
		return nil
	}
	return CheckPage(page)
}

// Bucket is the topic's bucket of b, the unit of distribution. The changes of a
// page are in the page's.
func Bucket(topic string, b int) int {
	return int(xxhash.Sum64String(strings.TrimPrefix(topic, changesMark)) % uint64(b))
}

// Excerpt is page made fit for a message or a log line of ours: valid UTF-8
// and no longer than a page id can be.
func Excerpt(page string) string {
	if len(page) > 4*MaxPageLength {
		page = page[:4*MaxPageLength]
	}
	page = strings.ToValidUTF8(page, "\uFFFD")
	if utf8.RuneCountInString(page) > MaxPageLength {
		page = string([]rune(page)[:MaxPageLength])
	}
	return page
}
