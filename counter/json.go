package counter

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
	for r.at < len(r.s) && isSpace(r.s[r.at]) {
		r.at++
	}
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

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
	// A zero byte in the text looks to peek like its end.
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

	var few [8]string // so that the names of most objects need no memory
	seen := few[:0]
	for more := true; more; {
		name, err := r.name(seen)
		if err != nil {
			return err
		}
		seen = append(seen, name)

		err = member(name)
		if err == nil {
			more, err = r.next('}', "want a comma or } in an object")
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// name reads the name of a member and its colon. It is not one of those that the object has already.
func (r *reader) name(seen []string) (string, error) {
	name, err := r.string()
	if err != nil {
		return "", err
	}

	if slices.Contains(seen, name) {
		return "", fmt.Errorf("%q appears twice; remove one", name)
	}
	if len(seen) == 64 { // more than any valid object has, so the search above stays short
		return "", r.fault("too many members in one object")
	}
	if !r.take(':') {
		return "", r.fault("want a colon after %q", name)
	}

	return name, nil
}

// next reads what follows an element: a comma, after which there is another one, or the end.
func (r *reader) next(end byte, want string) (more bool, err error) {
	if r.take(',') {
		return true, nil
	}
	if r.take(end) {
		return false, nil
	}

	return false, r.fault("%s", want)
}

// list calls element for each element of a list; element must read the value.
func (r *reader) list(element func(i int) error) error {
	if !r.take('[') {
		return r.fault("want a list, […]")
	}
	if r.take(']') {
		return nil
	}

	more := true
	for i := 0; more; i++ {
		err := element(i)
		if err == nil {
			more, err = r.next(']', "want a comma or ] in a list")
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// string reads a string. One without escapes is a slice of the input, without a copy.
func (r *reader) string() (string, error) {
	if r.peek() != '"' {
		return "", r.fault("want a string in quotes")
	}

	start := r.at
	isPlain := true
	for i := start + 1; i < len(r.s); i++ {
		switch c := r.s[i]; {
		case c == '"':
			r.at = i + 1
			return r.unquote(r.s[start:r.at], isPlain)
		case c == '\\':
			// The next byte belongs to the escape, so a quote there does not end the string.
			isPlain = false
			i++
		case c < ' ':
			r.at = i
			return "", r.fault("a string has a control character that is not escaped")
		}
	}

	return "", r.fault("a string has no end")
}

// unquote returns the text of a string in quotes. A plain one has no escapes.
func (r *reader) unquote(quoted string, isPlain bool) (text string, err error) {
	if isPlain {
		text = quoted[1 : len(quoted)-1]
		if !utf8.ValidString(text) {
			return "", r.fault("a string is not valid UTF-8")
		}
		return text, nil
	}

	// encoding/json replaces half a surrogate pair, so that different texts would become the same.
	if err := presence.CheckUnicode([]byte(quoted)); err != nil {
		return "", r.fault("%w", err)
	}
	if err := json.Unmarshal([]byte(quoted), &text); err != nil {
		return "", r.fault("a string has a bad escape")
	}

	return text, nil
}

func (r *reader) bool() (bool, error) {
	r.space()
	// Neither text begins like the other one, so the order of the map does not matter.
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
	// The whole literal is read, so that 1.5 is refused and not taken for 1.
	end := r.at
	for end < len(r.s) && strings.IndexByte(" \t\r\n,]}", r.s[end]) < 0 {
		end++
	}
	text := r.s[r.at:end]
	if !isInteger(text) {
		return 0, errNumber
	}

	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s does not fit 64 bits", text[:min(len(text), 40)])
	}
	r.at = end

	return n, nil
}

// isInteger reports whether text is an integer as JSON has it: digits without a leading 0.
func isInteger(text string) bool {
	digits := strings.TrimPrefix(text, "-")
	hasLeadingZero := len(digits) > 1 && digits[0] == '0'

	return digits != "" && !hasLeadingZero && strings.Trim(digits, "0123456789") == ""
}
