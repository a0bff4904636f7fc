package presence

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// AllPages stands for the whole site: its distinct users on any page. Clients can read
// and watch it like a page, but cannot join it.
const AllPages = "*"

// MaxPageLength is the longest page id, in code points.
const MaxPageLength = 128

// MaxPages is the number of distinct pages one connection may have joined or
// subscribed to, and one user may hold.
const MaxPages = 100

// ErrPage is wrapped by every error about an invalid page id.
var ErrPage = errors.New("bad page")

// Zero-width non-joiner and joiner: format characters that some scripts need within words.
const (
	zwnj = '\u200C'
	zwj  = '\u200D'
)

func joins(r rune) bool { return r == zwnj || r == zwj }

// CheckPage returns nil if page can be joined, or else the reason why not. A page id is 1 to 128
// code points of valid UTF-8: letters, marks, numbers, punctuation, symbols and
// the space U+0020; U+200C and U+200D may not come first or last. Page ids are
// compared byte by byte: nothing is normalised, trimmed or folded.
func CheckPage(page string) error {
	switch page {
	case "":
		return fmt.Errorf("%w: it is empty; a page id has 1 to %d characters", ErrPage, MaxPageLength)
	case AllPages, "-", ".", "..":
		return fmt.Errorf("%w: %q is reserved; choose another id", ErrPage, page)
	}

	// A code point has at most four bytes, so a longer page need not be counted.
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
		case joins(r):
			first := i == 0
			last := i+utf8.RuneLen(r) == len(page)
			if first || last {
				return fmt.Errorf("%w: %U may not be the first or last character", ErrPage, r)
			}
		case !unicode.IsPrint(r):
			return fmt.Errorf("%w: it has the character %U; only letters, marks, numbers, punctuation, symbols "+
				"and the space U+0020 are allowed", ErrPage, r)
		}
	}

	return nil
}

// CheckReadable is CheckPage for pages that are read or watched. It also allows AllPages.
func CheckReadable(page string) error {
	if page == AllPages {
		return nil
	}

	return CheckPage(page)
}

// Excerpt returns page in a form that fits a message or a log line: valid UTF-8
// that is no longer than a page id can be.
func Excerpt(page string) string {
	if len(page) > 4*MaxPageLength {
		page = page[:4*MaxPageLength]
	}

	// The cut may have gone through a code point.
	page = strings.ToValidUTF8(page, "\uFFFD")
	if utf8.RuneCountInString(page) > MaxPageLength {
		page = string([]rune(page)[:MaxPageLength])
	}

	return page
}
