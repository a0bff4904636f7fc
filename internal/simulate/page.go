package simulate

import (
	"unicode"
	"unicode/utf8"
)

// validPage reports whether the server must accept a join of the page. It follows the contract and does not call the
// server's own code, because a checker that did would repeat the server's mistakes.
func validPage(page string) bool {
	switch page {
	case "", "*", "-", ".", "..":
		return false
	}

	n := utf8.RuneCountInString(page)
	size := len(page)
	if n > 128 || !utf8.ValidString(page) {
		return false
	}

	for i, r := range page {
		joiner := r == '\u200c' || r == '\u200d' // Unicode's zero-width ones, not allowed at either end
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
