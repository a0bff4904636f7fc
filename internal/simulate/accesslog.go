package simulate

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"regexp"
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
	maxLine     = 16 << 10  // bytes; longer lines count as bad
	maxRequests = 2_000_000 // a log with more is refused, because it would not fit in memory
)

// readLog reads a log. It counts bad lines and leaves them out.
func readLog(r io.Reader) (requests []request, lines, bad int, err error) {
	// A line that does not fit in this buffer is too long.
	br := bufio.NewReaderSize(r, maxLine)

	seen := map[string]string{} // keeps each text once, however often it occurs

	for {
		line, err := br.ReadSlice('\n')
		if len(line) == 0 && err == io.EOF {
			return requests, lines, bad, nil
		}

		lines++
		long := errors.Is(err, bufio.ErrBufferFull)
		// Without this the rest of a line that is too long would count as further lines.
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

		// Refused and not truncated, because a part of a log has other visits than the whole.
		if len(requests) == maxRequests {
			return nil, lines, bad, fmt.Errorf("the log has more than %d requests: replay a part of it", maxRequests)
		}

		// Equal texts share one clone; each text is a part of the whole line, which would stay in memory with it.
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

// logLine is a line of the common or combined format:
//
//	address identity user [time] "request" status bytes
//	address identity user [time] "request" status bytes "referer" "agent"
//
// In quotes a backslash hides what follows it.
var logLine = regexp.MustCompile(`^([^ ]+) .*? \[(.*?)\] "((?:[^"\\]|\\.)*)" [0-9]{3} (?:[0-9]+|-)` +
	`(?: "(?:[^"\\]|\\.)*" ?"((?:[^"\\]|\\.)*)".*)?$`)

// parseLine reads a line of a log.
//
// The page is the path of the request as it stands in the log. The query is left out: it more often says how a visitor
// came (utm_source) than which page the visitor wanted. Percent escapes stay, as in a browser's location.pathname, so
// that the replay and a page's own script name the same page. Invalid UTF-8 becomes U+FFFD, which no page may contain.
func parseLine(line string) (request, error) {
	m := logLine.FindStringSubmatch(line)
	if m == nil {
		return request{}, errLine
	}

	at, err := time.Parse("02/Jan/2006:15:04:05 -0700", m[2])
	page, ok := pageOf(m[3])
	if err != nil || !ok {
		return request{}, errLine
	}

	return request{address: m[1], agent: m[4], page: page, at: at}, nil
}

// pageOf takes the path out of `GET /path?query HTTP/1.1`. The protocol may be
// missing, as in HTTP/0.9, and the path may contain spaces.
func pageOf(asked string) (string, bool) {
	method, target, ok := strings.Cut(asked, " ")
	if !ok || method == "" {
		return "", false
	}

	// The last occurrence, because the path itself may contain the text.
	if i := strings.LastIndex(target, " HTTP/"); i >= 0 {
		target = target[:i]
	}
	if _, after, ok := strings.Cut(target, "://"); ok && !strings.HasPrefix(target, "/") { // as in requests to proxies
		_, path, _ := strings.Cut(after, "/")
		target = "/" + path
	}

	path, _, _ := strings.Cut(target, "?")
	return strings.ToValidUTF8(path, "\uFFFD"), path != ""
}
