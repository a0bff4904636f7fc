package simulate

import (
	"unicode"
	"unicode/utf8"
)

// validPage says whether the server must accept a join of the page. The rule is
// written out here, from the contract, because a checker that asked the server's
// own code would agree with its mistakes.
func validPage(page string) bool {
	switch page {
	case "", "*", "-", ".", "..":
		return false
	}

	// The contract counts code points; only the position of a joiner is in bytes.
	n := utf8.RuneCountInString(page)
	size := len(page)
	if n > 128 || !utf8.ValidString(page) {
		return false
	}

	for i, r := range page {
		joiner := r == '\u200c' || r == '\u200d'
		visible := r != utf8.RuneError && unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S)
		switch {
		case r == ' ':
		case joiner:
			if i == 0 || i+utf8.RuneLen(r) == size {
				return false
			}
		case !visible:
			return false
		}
	}

	return true
}
