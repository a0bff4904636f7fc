package websocket

import (
	"bytes"
	"net/http"
	"net/url"
	"strings"
)

var lineEnd = []byte("\r\n")

// ReadUpgrade reads a request for a WebSocket at a path, as browsers write it, and returns the bytes that follow it. It
// returns nil for all else, which net/http has to read: another request, a part of one, and whatever is unusual, even
// if it is valid. So nobody has to agree with this reader on what a request is: what it returns is what net/http makes
// of the same bytes, and only where there is no doubt. sent is not kept.
func ReadUpgrade(sent []byte, path string) (r *http.Request, rest []byte) {
	end := bytes.Index(sent, []byte("\r\n\r\n"))
	if end < 0 {
		return nil, nil
	}

	// A copy, since headerOf changes it and net/http needs what the client wrote.
	head := bytes.Clone(sent[:end+len(lineEnd)])
	first, fields, _ := bytes.Cut(head, lineEnd)

	target, query, ok := readTarget(string(first), path)
	if !ok {
		return nil, nil
	}

	h, ok := readFields(fields)
	if !ok || !isUsual(h) {
		return nil, nil
	}

	host := h["Host"][0]
	delete(h, "Host") // as net/http does

	r = &http.Request{
		Method:     http.MethodGet,
		URL:        &url.URL{Path: path, RawQuery: query},
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     h,
		Body:       http.NoBody,
		Host:       host,
		RequestURI: target,
	}

	return r, sent[end+len("\r\n\r\n"):]
}

// readTarget reads the first line of a GET of path, with or without a query.
func readTarget(line, path string) (target, query string, ok bool) {
	target, isGet := strings.CutPrefix(line, "GET ")
	target, isHTTP := strings.CutSuffix(target, " HTTP/1.1")
	after, isPath := strings.CutPrefix(target, path)
	if !isGet || !isHTTP || !isPath {
		return "", "", false
	}

	if after == "" {
		return target, "", true
	}

	query, isQuery := strings.CutPrefix(after, "?")
	ok = isQuery && query != "" && consists(query, func(c byte) bool { return '!' <= c && c <= '~' && c != '#' })

	return target, query, ok
}

// readFields reads lines of header fields, and changes their names to net/http's spelling. It accepts each name once.
func readFields(fields []byte) (h http.Header, ok bool) {
	n := bytes.Count(fields, lineEnd)
	for rest := fields; len(rest) > 0; {
		line, after, _ := bytes.Cut(rest, lineEnd)
		name, value, found := bytes.Cut(line, []byte(":"))
		if !found || !spell(name) || !consists(value, inValue) {
			return nil, false
		}
		rest = after
	}

	h = make(http.Header, n)
	values := make([]string, 0, n) // one array for all
	for line := range strings.SplitSeq(strings.TrimSuffix(string(fields), "\r\n"), "\r\n") {
		name, value, _ := strings.Cut(line, ":")
		values = append(values, strings.Trim(value, " \t"))
		h[name] = values[len(values)-1 : len(values) : len(values)]
	}

	return h, len(h) == n
}

// spell changes a name to net/http's spelling. A name of other bytes than letters, digits and hyphens is unusual.
func spell(name []byte) (ok bool) {
	upper := true // at the beginning of a word
	for i, c := range name {
		isLetter := 'a' <= c|0x20 && c|0x20 <= 'z'
		isDigit := '0' <= c && c <= '9'
		if !isLetter && !isDigit && c != '-' {
			return false
		}

		if isLetter && upper {
			name[i] = c &^ 0x20
		} else if isLetter {
			name[i] = c | 0x20
		}
		upper = c == '-'
	}

	return len(name) > 0
}

// isUsual reports whether the fields are those of an upgrade, and of nothing that HTTP would have to treat in any other
// way than a request without a body.
func isUsual(h http.Header) bool {
	for _, name := range []string{"Content-Length", "Transfer-Encoding", "Trailer", "Expect"} {
		if h[name] != nil {
			return false
		}
	}

	// Browsers send both; net/http adds one that is missing.
	if h["Pragma"] != nil && h["Cache-Control"] == nil {
		return false
	}

	upgrade, host := h["Upgrade"], h["Host"]
	if len(upgrade) == 0 || !strings.EqualFold(upgrade[0], "websocket") || len(host) == 0 {
		return false
	}

	// Any other word, such as close, means something to net/http.
	for _, line := range h["Connection"] {
		for word := range strings.SplitSeq(line, ",") {
			word = strings.TrimSpace(word)
			if !strings.EqualFold(word, "upgrade") && !strings.EqualFold(word, "keep-alive") {
				return false
			}
		}
	}

	return host[0] != "" && consists(host[0], inHost)
}

func inValue(c byte) bool { return ' ' <= c && c <= '~' || c == '\t' }

func inHost(c byte) bool {
	isLetter := 'a' <= c|0x20 && c|0x20 <= 'z'
	isDigit := '0' <= c && c <= '9'

	return isLetter || isDigit || strings.IndexByte("-.:[]", c) >= 0
}

// consists reports whether every byte of text is one of a kind.
func consists[T string | []byte](text T, of func(c byte) bool) bool {
	for i := range len(text) {
		if !of(text[i]) {
			return false
		}
	}

	return true
}
