package presence

import (
	"bytes"
	"errors"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

var (
	errUTF8      = errors.New("it is not valid UTF-8")
	errSurrogate = errors.New(`a string has half of a surrogate pair, \ud800 to \udfff; escape both halves`)
)

// CheckUnicode refuses JSON with strings that are not valid Unicode. encoding/json would
// put U+FFFD into such strings, and so map different pages, keys or members to one.
func CheckUnicode(json []byte) error {
	if !utf8.Valid(json) {
		return errUTF8
	}

	for {
		// JSON has backslashes within strings alone, so nothing else has to be parsed.
		at := bytes.IndexByte(json, '\\')
		if at < 0 {
			return nil
		}

		json = json[at:]
		first := escaped(json)
		if !utf16.IsSurrogate(first) {
			json = json[min(2, len(json)):] // the second byte may be a backslash, too
			continue
		}

		// The other half has to follow at once.
		if utf16.DecodeRune(first, escaped(json[6:])) == utf8.RuneError {
			return errSurrogate
		}
		json = json[12:]
	}
}

// escaped returns the UTF-16 code unit of the escape \uXXXX at the beginning of text, or 0.
func escaped(text []byte) rune {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0
	}

	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return 0
	}

	return rune(unit)
}
