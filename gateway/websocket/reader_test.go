package websocket

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"headcount/internal/testkit"
)

// masked returns the frame of a client.
func masked(first byte, payload string) string { return string(testkit.ClientFrame(first, payload)) }

// First bytes of fragments.
const (
	firstPart = Text & 0x7f
	nextPart  = 0x00
	lastPart  = 0x80
)

// readAll reads data in pieces of step bytes, and returns a line for each frame, message and error.
func readAll(data string, step int) (lines []string) {
	var r Reader
	var held []byte
	for at := 0; at < len(data); at += step {
		held = append(held, data[at:min(at+step, len(data))]...)

		// A piece may contain several frames, and a part of one.
		for {
			f, n, err := r.Next(held)
			if err != nil {
				return append(lines, fmt.Sprintf("%d %s", err.Code, err.Reason))
			}

			if n == 0 {
				break
			}

			held = held[n:]
			if f.Kind != 0 {
				lines = append(lines, fmt.Sprintf("%#x %q", f.Kind, f.Payload))
			}

			f.Release()
			if f.Kind == Close {
				return lines
			}
		}
	}

	return lines
}

var long = strings.Repeat("x", MaxMessage)

// closes returns the close frame of a client.
func closes(code uint16, reason string) string {
	return masked(Close, string(binary.BigEndian.AppendUint16(nil, code))+reason)
}

// breach returns the line of an error, as readAll writes it.
func breach(err *Error) []string { return []string{fmt.Sprintf("%d %s", err.Code, err.Reason)} }

var streams = map[string]struct {
	in   string
	want []string
}{
	"text":             {masked(Text, "hello"), []string{`0x81 "hello"`}},
	"empty text":       {masked(Text, ""), []string{`0x81 ""`}},
	"binary, no UTF-8": {masked(Binary, "\xff"), []string{`0x82 "\xff"`}},
	"the longest":      {masked(Text, long), []string{`0x81 "` + long + `"`}},
	// RFC 6455 requires the shortest form of a length.
	"1 in 8 bytes": {
		"\x81\xff\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00", breach(errLongForm),
	},
	"65,535 in 8 bytes": {
		"\x81\xff\x00\x00\x00\x00\x00\x00\xff\xff\x00\x00\x00\x00", breach(errLongForm),
	},
	"65,536 in 8 bytes": {
		"\x81\xff\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00", breach(errMessageBig),
	},
	"125 in 2 bytes":      {"\x81\xfe\x00\x7d\x00\x00\x00\x00", breach(errLongForm)},
	"126 in 2 bytes":      {masked(Text, long[:126]), []string{`0x81 "` + long[:126] + `"`}},
	"a ping's in 2 bytes": {"\x89\xfe\x00\x01\x00\x00\x00\x00", breach(errLongForm)},
	"one byte too long":   {masked(Text, long+"x")[:8], breach(errMessageBig)},
	"far too long": {
		"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00", breach(errMessageBig),
	},
	"a length below zero": {"\x82\xff\x80\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00", breach(errLength)},
	"fragments": {
		masked(firstPart, "a") + masked(nextPart, "") + masked(nextPart, "b") + masked(lastPart, "c"),
		[]string{`0x81 "abc"`},
	},
	"binary fragments": {
		masked(Binary&0x7f, "\xff") + masked(lastPart, "\xfe"), []string{`0x82 "\xff\xfe"`},
	},
	"control frames in between": {
		masked(firstPart, "a") + masked(Ping, "p") + masked(Pong, "q") + masked(lastPart, "b"),
		[]string{`0x89 "p"`, `0x8a "q"`, `0x81 "ab"`},
	},
	"a character in two": {masked(firstPart, "\xc3") + masked(lastPart, "\xa9"), []string{`0x81 "é"`}},
	"the longest in fragments": {
		masked(firstPart, long[1:]) + masked(nextPart, "x") + masked(lastPart, ""), []string{`0x81 "` + long + `"`},
	},
	"too long in fragments": {
		masked(firstPart, long[1:]) + masked(lastPart, "xx")[:6], breach(errMessageBig),
	},
	"two messages": {
		masked(firstPart, "a") + masked(lastPart, "b") + masked(firstPart, "c") + masked(lastPart, "d"),
		[]string{`0x81 "ab"`, `0x81 "cd"`},
	},
	"bad UTF-8":                   {masked(Text, "a\xff"), breach(errText)},
	"bad UTF-8 in fragments":      {masked(firstPart, "\xc3") + masked(lastPart, "x"), breach(errText)},
	"half a character at the end": {masked(Text, "\xe2\x82"), breach(errText)},
	"a surrogate":                 {masked(Text, "\xed\xa0\x80"), breach(errText)},
	"reserved bit 1":              {masked(Text|0x40, "x")[:2], breach(errReserved)},
	"reserved bit 2":              {masked(Ping|0x20, "")[:2], breach(errReserved)},
	"reserved bit 3":              {masked(Close|0x10, "")[:2], breach(errReserved)},
	"opcode 3":                    {masked(0x83, "")[:2], breach(errOpcode)},
	"opcode 15":                   {masked(0x8f, "")[:2], breach(errOpcode)},
	"no mask":                     {"\x81\x01", breach(errUnmasked)},
	"a ping in fragments":         {masked(Ping&0x7f, "")[:2], breach(errControl)},
	"the longest ping":            {masked(Ping, long[:125]), []string{`0x89 "` + long[:125] + `"`}},
	"a longer ping":               {masked(Ping, long[:126])[:8], breach(errControl)},
	"a longer close":              {masked(Close, long[:126])[:8], breach(errControl)},
	"nothing to continue":         {masked(lastPart, "x")[:2], breach(errFragment)},
	"continued after the end": {
		masked(firstPart, "") + masked(lastPart, "") + masked(nextPart, "")[:2],
		[]string{`0x81 ""`, breach(errFragment)[0]},
	},
	"a message within another": {masked(firstPart, "x") + masked(Text, "y")[:2], breach(errFragment)},
	"close":                    {masked(Close, ""), []string{`0x88 ""`}},
	"close with a reason":      {closes(1000, "bye"), []string{`0x88 "\x03\xe8bye"`}},
	"close in between":         {masked(firstPart, "x") + closes(1001, ""), []string{`0x88 "\x03\xe9"`}},
	"close with half a code":   {masked(Close, "\x03"), breach(errCloseCode)},
	"close, bad UTF-8":         {closes(1000, "\xff"), breach(errCloseText)},
	"close 3000":               {closes(3000, ""), []string{`0x88 "\v\xb8"`}},
	"close 1014":               {closes(1014, ""), []string{`0x88 "\x03\xf6"`}},
	"close 0":                  {closes(0, ""), breach(errCloseCode)},
	"close 4999":               {closes(4999, ""), []string{`0x88 "\x13\x87"`}},
	"close 999":                {closes(999, ""), breach(errCloseCode)},
	"close 1004":               {closes(1004, ""), breach(errCloseCode)},
	"close 1005":               {closes(1005, ""), breach(errCloseCode)},
	"close 1015":               {closes(1015, ""), breach(errCloseCode)},
	"close 2999":               {closes(2999, ""), breach(errCloseCode)},
	"close 5000":               {closes(5000, ""), breach(errCloseCode)},
}

func TestReader(t *testing.T) {
	for name, tc := range streams {
		t.Run(name, func(t *testing.T) {
			for _, step := range []int{1, 2, 3, 7, len(tc.in)} {
				// However the data is split, the reader returns the same.
				if got := readAll(tc.in, step); !slices.Equal(got, tc.want) {
					t.Fatalf("in pieces of %d bytes: got %q, want %q", step, got, tc.want)
				}
			}

			// Without its last byte a frame is not reported.
			last := tc.want[len(tc.want)-1]
			if got := readAll(tc.in[:len(tc.in)-1], len(tc.in)); slices.Contains(got, last) {
				t.Fatalf("without the last byte the reader already returns %q", got)
			}
		})
	}
}

// After the reader has ended a connection, only the close frame of the client counts.
func TestSkip(t *testing.T) {
	for name, tc := range map[string]struct {
		in     string
		closed bool
	}{
		"close":                   {masked(Close, "\x03\xe8"), true},
		"close without a mask":    {"\x88\x02\x03\xe8", true},
		"messages before":         {masked(Text, "x") + masked(Ping, "\x88\x80") + masked(Close, ""), true},
		"a long message before":   {masked(Binary, strings.Repeat("\x88\x80", 40_000)) + masked(Close, ""), true},
		"a breach before":         {masked(0xff, "\x88\x80") + masked(Close, ""), true},
		"no close":                {masked(Text, "\x88\x80\x88\x80"), false},
		"half a close":            {masked(Close, "\x03\xe8")[:7], false},
		"close of a false length": {"\x88\xfe\xff\xff" + strings.Repeat("x", 4+125), true},
		"longer than anybody sees": {
			"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00" + strings.Repeat("\x88\x80", 5000), false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, step := range []int{1, 5, 4096, len(tc.in)} {
				var r Reader
				var held []byte
				closed := false

				for at := 0; at < len(tc.in) && !closed; at += step {
					held = append(held, tc.in[at:min(at+step, len(tc.in))]...)
					for len(held) > 0 {
						var n int
						n, closed = r.Skip(held)
						if n == 0 || closed {
							break
						}
						held = held[n:]
					}

					const maxHead = 14 // bytes before the payload of a frame
					// What a client sends now is dropped, so little of it is kept.
					if len(held) > maxHead+maxControl+step {
						t.Fatalf("%d bytes are kept, want %d at most", len(held), maxHead+maxControl+step)
					}
				}

				if closed != tc.closed {
					t.Fatalf("in pieces of %d bytes closed is %v, want the opposite", step, closed)
				}
			}
		})
	}
}

func TestUnmask(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "text")
		key := [4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "key"))

		got := slices.Clone(text)
		unmask(key, got)

		for i := range text {
			text[i] ^= key[i%4]
		}

		if !bytes.Equal(got, text) {
			t.Fatalf("got %x, want %x", got, text)
		}
	})
}

// Frames of all kinds are read without an allocation. Fragments go into pooled buffers.
func TestReadingAllocatesNothing(t *testing.T) {
	in := []byte(masked(Text, `{"type":"heartbeat"}`) + masked(Pong, "") + masked(firstPart, "a") +
		masked(lastPart, "b"))

	data := make([]byte, len(in))
	// The data is unmasked in place, so each run needs its own copy.
	allocs := testing.AllocsPerRun(1000, func() {
		copy(data, in)
		var r Reader
		for rest := data; len(rest) > 0; {
			f, n, err := r.Next(rest)
			if err != nil || n == 0 {
				t.Fatal(n, err)
			}

			f.Release()
			rest = rest[n:]
		}
	})

	if allocs >= 1 { // the collector may empty the pool once in a while
		t.Errorf("%.2f allocations a frame, want none", allocs)
	}
}
