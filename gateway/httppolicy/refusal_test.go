package httppolicy

import (
	"slices"
	"testing"
)

// A Content-Length is found in upper and lower case, and however the bytes are split.
func TestReceivedSeesLengths(t *testing.T) {
	for text, want := range map[string]bool{
		"PUT / HTTP/1.1\r\nContent-Length: 5\r\n":          true,
		"PUT / HTTP/1.1\r\nCONTENT-LENGTH:5\r\n":           true,
		"PUT / HTTP/1.1\r\ncontent-\r\ncontent-length: 5":  true,
		"PUT / HTTP/1.1\r\nX: coconcontent-length":         true,
		"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n": false,
		"content-lengt": false,
		"":              false,
	} {
		for _, size := range []int{1, 2, 7, len(text) + 1} {
			var r received
			for piece := range slices.Chunk([]byte(text), size) {
				r.note(piece)
			}

			if got := r.length.Load(); got != want {
				t.Errorf("%q in pieces of %d bytes: found is %v, want the opposite", text, size, got)
			}
		}
	}
}
