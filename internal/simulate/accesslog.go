package simulate

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// A request is one line of an access log: the parts that a visit needs.
type request struct {
	address string
	agent   string // empty in the common format
	page    string
	at      time.Time
}

var errLine = errors.New("not a line of an access log")

// Bounds of a log.
const (
	maxLine     = 16 << 10  // longer lines are bad ones
	maxRequests = 2_000_000 // a log with more is refused, because it would not fit in memory
)

// readLog reads a log. It counts bad lines and leaves them out.
func readLog(r io.Reader) (requests []request, lines, bad int, err error) {
	br := bufio.NewReaderSize(r, maxLine)
	seen := map[string]string{} // keeps each text once, however often it occurs
	for {
		line, err := br.ReadSlice('\n')
		if len(line) == 0 && err == io.EOF {
			return requests, lines, bad, nil
		}
		lines++
		long := errors.Is(err, bufio.ErrBufferFull)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = br.ReadSlice('\n')
		}
		if err != nil && err != io.EOF {
			return nil, lines, bad, fmt.Errorf("read line %d: %w", lines, err)
		}
		req, perr := parseLine(strings.TrimRight(string(line), "\r\n"))
		if long || perr != nil {
			bad++
			continue
		}
		if len(requests) == maxRequests {
			return nil, lines, bad, fmt.Errorf("the log has more than %d requests: replay a part of it", maxRequests)
		}
		for _, s := range []*string{&req.address, &req.agent, &req.page} {
			if _, ok := seen[*s]; !ok {
				t := strings.Clone(*s)
				seen[t] = t
			}
			*s = seen[*s]
		}
		requests = append(requests, req)
	}
}

// parseLine reads a line of the common or combined format:
//
//	address identity user [time] "request" status bytes
//	address identity user [time] "request" status bytes "referer" "agent"
//
// The page is the path of the request as it stands in the log. The query is left
// out: it more often says how a visitor came (utm_source) than which page the
// visitor wanted. Percent escapes stay, as in a browser's location.pathname, so that
// the replay and a page's own script name the same page. Invalid UTF-8 becomes
// U+FFFD, which no page may contain.
func parseLine(line string) (request, error) {
	bad := func(what string) (request, error) { return request{}, fmt.Errorf("%w: %s", errLine, what) }
	address, rest, ok := strings.Cut(line, " ")
	if !ok || address == "" {
		return bad("no address")
	}
	_, rest, ok = strings.Cut(rest, " [")
	if !ok {
		return bad("no time")
	}
	stamp, rest, ok := strings.Cut(rest, "] ")
	if !ok {
		return bad("no time")
	}
	at, err := time.Parse("02/Jan/2006:15:04:05 -0700", stamp)
	if err != nil {
		return bad("a time that is none")
	}
	asked, rest, ok := cutQuoted(rest)
	if !ok {
		return bad("no request")
	}
	page, ok := pageOf(asked)
	if !ok {
		return bad("the request has no path")
	}
	fields := strings.SplitN(strings.TrimPrefix(rest, " "), " ", 3)
	if len(fields) < 2 || len(fields[0]) != 3 || !digits(fields[0]) || fields[1] != "-" && !digits(fields[1]) {
		return bad("no status and size")
	}
	req := request{address: address, page: page, at: at}
	if len(fields) == 3 {
		if _, rest, ok = cutQuoted(fields[2]); !ok {
			return bad("the referer has no closing quote")
		}
		if req.agent, _, ok = cutQuoted(strings.TrimPrefix(rest, " ")); !ok {
			return bad("the user agent has no closing quote")
		}
	}
	return req, nil
}

// cutQuoted takes a quoted text off the front; a backslash hides what follows it.
// The text keeps its escapes.
func cutQuoted(s string) (text, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		return "", "", false
	}
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return s[1:i], s[i+1:], true
		}
	}
	return "", "", false
}

// pageOf takes the path out of `GET /path?query HTTP/1.1`. The protocol may be
// missing, as in HTTP/0.9, and the path may contain spaces.
func pageOf(asked string) (string, bool) {
	method, target, ok := strings.Cut(asked, " ")
	if !ok || method == "" {
		return "", false
	}
	if i := strings.LastIndex(target, " HTTP/"); i >= 0 {
		target = target[:i]
	}
	if _, after, ok := strings.Cut(target, "://"); ok && !strings.HasPrefix(target, "/") { // as proxies are asked
		_, path, _ := strings.Cut(after, "/")
		target = "/" + path
	}
	path, _, _ := strings.Cut(target, "?")
	return strings.ToValidUTF8(path, "\uFFFD"), path != ""
}

func digits(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}
