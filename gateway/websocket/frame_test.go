package websocket

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// Frames have the form of RFC 6455.
func TestAppendFrame(t *testing.T) {
	// The head has three forms, by the length of the payload.
	for n, head := range map[int]int{0: 2, 125: 2, 126: 4, 65535: 4, 65536: 10} {
		payload := strings.Repeat("x", n)
		b := AppendFrame([]byte("before"), Text, []byte(payload))[len("before"):]

		if b[0] != 0x81 || len(b) != head+n || string(b[head:]) != payload {
			t.Errorf("a frame of %d bytes has a head of %d, want %d", n, len(b)-n, head)
		}
	}

	// A close frame has at most 125 bytes, so the reason is cut off, at the end of a character.
	long := AppendClose(nil, 1008, strings.Repeat("é", 100))
	if len(long) > 127 || !utf8.Valid(long[4:]) {
		t.Errorf("the close frame has %d bytes, want 127 at most and valid UTF-8: %q", len(long), long)
	}
}
