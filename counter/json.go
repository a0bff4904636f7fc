package counter

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"headcount/presence"
)

var errNumber = errors.New("want a whole number written in digits, without quotes, point or exponent")

// reader parses strict JSON in one pass: object members must be known and unique, integers are literals of digits. Its
// errors are written for the author of the JSON. encoding/json accepts unknown and repeated members, floats for
// integers, and invalid UTF-8. One goroutine uses a reader.
type reader struct {
	s  string
	at int
}

func (r *reader) fault(format string, args ...any) error {
	return fmt.Errorf("at byte %d: "+format, append([]any{r.at}, args...)...)
}

func (r *reader) space() {
	for r.at < len(r.s) && (r.s[r.at] == ' ' || r.s[r.at] == '\n' || r.s[r.at] == '\r' || r.s[r.at] == '\t') {
		r.at++
	}
}

// peek returns the next byte after white space, or 0 at the end.
func (r *reader) peek() byte {
	r.space()
	if r.at == len(r.s) {
		return 0
	}
	return r.s[r.at]
}

// take skips c if it is the next byte after white space.
func (r *reader) take(c byte) bool {
	if r.peek() != c {
		return false
	}
	r.at++
	return true
}

// end returns an error if anything but white space is left.
func (r *reader) end() error {
	if r.peek() != 0 || r.at < len(r.s) {
		return r.fault("want nothing more after the object")
	}
	return nil
}

// object calls member with each name of an object; member must read the value.
func (r *reader) object(member func(name string) error) error {
	if !r.take('{') {
		return r.fault("want an object, {…}")
	}
	if r.take('}') {
		return nil
	}
	var few [8]string
	seen := few[:0]
	for {
		name, err := r.string()
		if err != nil {
			return err
		}
		for _, s := range seen {
			if s == name {
				return fmt.Errorf("%q appears twice; remove one", name)
			}
		}
		if len(seen) == 64 { // more than any valid object has, so the search above stays short
			return r.fault("too many members in one object")
		}
		seen = append(seen, name)
		if !r.take(':') {
			return r.fault("want a colon after %q", name)
		}
		if err := member(name); err != nil {
			return err
		}
		switch {
		case r.take(','):
		case r.take('}'):
			return nil
		default:
			return r.fault("want a comma or } in an object")
		}
	}
}

// list calls element for each element of a list; element must read the value.
func (r *reader) list(element func(i int) error) error {
	if !r.take('[') {
		return r.fault("want a list, […]")
	}
	if r.take(']') {
		return nil
	}
	for i := 0; ; i++ {
		if err := element(i); err != nil {
			return err
		}
		switch {
		case r.take(','):
		case r.take(']'):
			return nil
		default:
			return r.fault("want a comma or ] in a list")
		}
	}
}

// string reads a string. One without escapes is a slice of the input, without a copy.
func (r *reader) string() (string, error) {
	if r.peek() != '"' {
		return "", r.fault("want a string in quotes")
	}
	start, plain := r.at+1, true
	for i := start; i < len(r.s); i++ {
		switch c := r.s[i]; {
		case c == '"':
			r.at = i + 1
			if plain {
				if text := r.s[start:i]; utf8.ValidString(text) {
					return text, nil
				}
				return "", r.fault("a string is not valid UTF-8")
			}
			quoted := []byte(r.s[start-1 : i+1])
			if err := presence.CheckUnicode(quoted); err != nil {
				return "", r.fault("%w", err)
			}
			var text string
			if err := json.Unmarshal(quoted, &text); err != nil {
				return "", r.fault("a string has a bad escape")
			}
			return text, nil
		case c == '\\':
			plain = false
			i++
		case c < ' ':
			r.at = i
			return "", r.fault("a string has a control character that is not escaped")
		}
	}
	return "", r.fault("a string has no end")
}

func (r *reader) bool() (bool, error) {
	r.space()
	for text, is := range map[string]bool{"true": true, "false": false} {
		if strings.HasPrefix(r.s[r.at:], text) {
			r.at += len(text)
			return is, nil
		}
	}
	return false, r.fault("want true or false")
}

// integer reads a literal of digits that fits in 64 bits.
func (r *reader) integer() (int64, error) {
	r.space()
	start := r.at
	i := start
	for i < len(r.s) && strings.IndexByte(" \t\r\n,]}", r.s[i]) < 0 {
		i++
	}
	text := r.s[start:i]
	digits := strings.TrimPrefix(text, "-")
	if digits == "" || digits != "0" && digits[0] == '0' {
		return 0, errNumber
	}
	for j := range len(digits) {
		if digits[j] < '0' || digits[j] > '9' {
			return 0, errNumber
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s does not fit 64 bits", text[:min(len(text), 40)])
	}
	r.at = i
	return n, nil
}
