// Package httppolicy holds the HTTP rules that are the same for every route: which
// clients are accepted, from which origin and how often, in which form a client
// wants its answer, and how errors are written.
package httppolicy

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// A preference is how much a client wants a media type: the quality, and how exactly
// the client named the type (2 type/subtype, 1 type/*, 0 */*).
type preference struct {
	quality float64
	exact   int
}

func (p preference) compare(o preference) int {
	return cmp.Or(cmp.Compare(p.quality, o.quality), cmp.Compare(p.exact, o.exact))
}

// WantsHTML reports whether r wants a page for people rather than JSON.
func WantsHTML(r *http.Request) bool { return wantsHTML(strings.Join(r.Header["Accept"], ", ")) }

// WantsGzip reports whether r accepts gzip and does not prefer no encoding to it.
func WantsGzip(r *http.Request) bool {
	return wantsGzip(strings.Join(r.Header["Accept-Encoding"], ", "))
}

// WantsBrotli reports whether r names brotli and prefers neither gzip nor no encoding to it.
func WantsBrotli(r *http.Request) bool {
	return wantsBrotli(strings.Join(r.Header["Accept-Encoding"], ", "))
}

// wantsHTML reports whether an Accept header prefers text/html to application/json
// and to */*. It compares the qualities, and if they are equal, how exactly each type
// was named. A browser's header prefers HTML. No header, "*/*" and equal preferences
// mean JSON. Parameters other than q are ignored.
func wantsHTML(accept string) bool {
	if accept == "" {
		return false
	}

	var html, json, anything bestMatch
	for value, quality := range qualities(accept) {
		switch {
		case equalFold(value, "text/html"):
			html.offer(preference{quality, 2})
		case equalFold(value, "text/*"):
			html.offer(preference{quality, 1})
		case equalFold(value, "application/json"):
			json.offer(preference{quality, 2})
		case equalFold(value, "application/*"):
			json.offer(preference{quality, 1})
		case value == "*/*", value == "*": // old Java clients send "*"
			html.offer(preference{quality, 0})
			json.offer(preference{quality, 0})
			anything.offer(preference{quality, 0})
		}
	}

	return html.quality > 0 && html.compare(json.preference) > 0 && html.compare(anything.preference) > 0
}

// bestMatch keeps the most exact preference that matches one type. Of equally exact
// ones it keeps the one with the greatest quality.
type bestMatch struct {
	preference
	known bool
}

func (b *bestMatch) offer(p preference) {
	better := p.exact > b.exact || p.exact == b.exact && p.quality > b.quality
	if !b.known || better {
		b.preference = p
		b.known = true
	}
}

// wantsGzip reports whether an Accept-Encoding header accepts gzip, and does
// not prefer no encoding to it.
func wantsGzip(acceptEncoding string) bool {
	is := readEncodings(acceptEncoding)
	return is.gzip > 0 && is.gzip >= is.identity
}

// wantsBrotli reports whether an Accept-Encoding header names brotli, and prefers nothing to it. An asterisk is no
// name: some clients that send one know gzip alone.
func wantsBrotli(acceptEncoding string) bool {
	is := readEncodings(acceptEncoding)
	return is.brotli > 0 && is.brotli >= is.gzip && is.brotli >= is.identity
}

// encodings are the qualities of the encodings of an Accept-Encoding header; -1: the header does not name it.
type encodings struct{ brotli, gzip, identity float64 }

func readEncodings(acceptEncoding string) encodings {
	is := encodings{-1, -1, -1}
	anything := -1.

	for value, quality := range qualities(acceptEncoding) {
		switch {
		case equalFold(value, "br"):
			// An encoding that is named twice counts with the greater quality.
			is.brotli = max(is.brotli, quality)
		case equalFold(value, "gzip"), equalFold(value, "x-gzip"):
			is.gzip = max(is.gzip, quality)
		case equalFold(value, "identity"):
			is.identity = max(is.identity, quality)
		case value == "*":
			anything = max(anything, quality)
		}
	}

	// An asterisk stands for what the header does not name, but brotli has to be named.
	if is.gzip < 0 {
		is.gzip = anything
	}

	return is
}

// qualities yields the elements of an Accept header without their parameters, each
// with its quality. The default quality is 1. An element whose
// quality cannot be read is left out.
func qualities(list string) iter.Seq2[string, float64] {
	return func(yield func(string, float64) bool) {
		for list != "" {
			var element string
			element, list = cutUnquoted(list, ',')
			value, params := cutUnquoted(element, ';')
			value = strings.TrimSpace(value)

			quality := 1.0
			// Empty elements of a list mean nothing (RFC 9110, 5.6.1.2).
			ok := value != ""
			for params != "" && ok {
				var param string
				param, params = cutUnquoted(params, ';')
				name, weight, _ := strings.Cut(param, "=")
				if equalFold(strings.TrimSpace(name), "q") {
					quality, ok = parseQuality(strings.TrimSpace(weight))
				}
			}

			if ok && !yield(value, quality) {
				return
			}
		}
	}
}

// cutUnquoted cuts s around the first sep that is not in a quoted string.
func cutUnquoted(s string, sep byte) (before, after string) {
	quoted := false
	for i := 0; i < len(s); i++ {
		if s[i] == '"' {
			quoted = !quoted
			continue
		}

		if quoted {
			if s[i] == '\\' { // and the next character says nothing
				i++
			}
			continue
		}

		if s[i] == sep {
			return s[:i], s[i+1:]
		}
	}

	return s, ""
}

// parseQuality reads a qvalue. It also accepts ".5", which some clients send, and more than three digits.
func parseQuality(s string) (float64, bool) {
	quality, err := strconv.ParseFloat(s, 64)
	return quality, err == nil && quality >= 0 && quality <= 1
}

// equalFold compares s with an ASCII word without regard to case. Unlike
// strings.EqualFold it matches no letters beyond ASCII.
func equalFold(s, word string) bool { return len(s) == len(word) && strings.EqualFold(s, word) }

// gzipWriters keeps writers for reuse, since a new one costs hundreds of kilobytes.
var gzipWriters = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // fails only for an unknown level
	return w
}}

// Gzip appends src, compressed, to dst. Any goroutine may call it; the
// same src always yields the same bytes.
func Gzip(dst, src []byte) []byte {
	buf := bytes.NewBuffer(dst)
	w := gzipWriters.Get().(*gzip.Writer)
	w.Reset(buf)
	w.Write(src) // a Buffer takes everything
	w.Close()

	w.Reset(nil) // the pool must not keep the answer
	gzipWriters.Put(w)

	return buf.Bytes()
}
