package websocket

import (
	"encoding/binary"
	"math"
	"sync"
	"unicode/utf8"
)

// MaxMessage is the longest message that is read, in bytes over all its fragments.
const MaxMessage = 4096

// Error is a client's violation of the protocol, or of the bound on messages. The
// caller must close the connection with its code.
type Error struct {
	Code   int // StatusProtocolError, StatusInvalidPayload or StatusTooBig
	Reason string
}

func (e *Error) Error() string { return "websocket: " + e.Reason }

// Errors of Reader.Next.
var (
	errReserved   = &Error{StatusProtocolError, "reserved bits are set"}
	errUnmasked   = &Error{StatusProtocolError, "a client's frame is not masked"}
	errOpcode     = &Error{StatusProtocolError, "the opcode is unknown"}
	errControl    = &Error{StatusProtocolError, "a control frame is fragmented or over 125 bytes"}
	errFragment   = &Error{StatusProtocolError, "a fragment is out of place"}
	errLength     = &Error{StatusProtocolError, "the length has its highest bit set"}
	errLongForm   = &Error{StatusProtocolError, "the length is in a longer form than it needs"}
	errCloseCode  = &Error{StatusProtocolError, "the close frame has no valid code"}
	errCloseText  = &Error{StatusInvalidPayload, "the reason of the close frame is invalid UTF-8"}
	errText       = &Error{StatusInvalidPayload, "invalid UTF-8"}
	errMessageBig = &Error{StatusTooBig, "message over 4096 bytes"}
)

// Frame is a control frame, a whole message, or a fragment of a message.
type Frame struct {
	Kind    byte   // Text or Binary for a whole message, Ping, Pong, Close, or 0 for a part of a message
	Payload []byte // valid until Release, or until the data given to Next are overwritten
	parts   *parts // holds the payload of a message that came in fragments
}

// Release gives up the payload, which must not be used any more.
func (f *Frame) Release() {
	if f.parts != nil {
		pool.Put(f.parts)
		f.parts = nil
		f.Payload = nil
	}
}

// Reader reads the frames of one client. The zero Reader is ready for the first frame.
// One goroutine at a time may use it. It holds a buffer only in the middle of a
// fragmented message.
type Reader struct {
	parts *parts // the fragments so far; nil between two messages
	skip  uint64 // remaining bytes of a payload that Skip skips
}

// parts holds the fragments of a message until it is whole.
type parts struct {
	kind byte
	n    int
	text [MaxMessage]byte
}

var pool = sync.Pool{New: func() any { return new(parts) }}

// head is a frame's head.
type head struct {
	size    int // of the head itself, in bytes
	payload uint64
}

// parseHead reads the head at the beginning of b. ok is false while the head is not
// whole.
func parseHead(b []byte) (h head, ok bool) {
	if len(b) < 2 {
		return head{}, false
	}

	h.size = 2
	h.payload = uint64(b[1] & 0x7f)
	switch h.payload {
	case 126:
		h.size = 4
	case 127:
		h.size = 10
	}

	long := h.size
	if b[1]&0x80 != 0 {
		h.size += 4
	}

	if len(b) < long {
		return h, false
	}

	switch long {
	case 4:
		h.payload = uint64(binary.BigEndian.Uint16(b[2:]))
	case 10:
		h.payload = binary.BigEndian.Uint64(b[2:])
	}

	return h, len(b) >= h.size
}

// tooLong reports whether a shorter form of the length exists, which RFC 6455, section 5.2, demands then.
func (h head) tooLong() bool {
	const mask = 4 // bytes of it, behind the length

	// Frames without a mask have been refused already.
	switch h.size {
	case 4 + mask:
		return h.payload < 126
	case 10 + mask:
		return h.payload <= math.MaxUint16
	default:
		return false
	}
}

// Next reads the frame at the beginning of data, and unmasks it in place. n is the
// frame's length, or 0 while the frame is not whole. Next returns an error even before
// the frame is whole. After an error the caller must continue with Skip, from the
// beginning of the same frame.
func (r *Reader) Next(data []byte) (f Frame, n int, err *Error) {
	if len(data) < 2 {
		return Frame{}, 0, nil
	}

	if err := r.check(data[0], data[1]); err != nil {
		return r.fail(err)
	}

	h, whole := parseHead(data)
	if !whole {
		return Frame{}, 0, nil
	}

	if err := r.checkLength(data[0], h); err != nil {
		return r.fail(err)
	}

	// checkLength has bounded the payload, so this does not overflow.
	n = h.size + int(h.payload)
	if len(data) < n {
		return Frame{}, 0, nil
	}

	// The capacity ends with the frame, so that nobody appends over the next one.
	payload := data[h.size:n:n]
	unmask([4]byte(data[h.size-4:h.size]), payload)
	f, err = r.take(data[0], payload)
	if err != nil {
		return r.fail(err)
	}

	return f, n, nil
}

// checkLength returns an error if no valid frame with this first byte has that head.
func (r *Reader) checkLength(first byte, h head) *Error {
	control := first&0x08 != 0
	if control && h.payload > maxControl {
		return errControl
	}
	if h.payload>>63 != 0 {
		return errLength
	}
	if h.tooLong() {
		return errLongForm
	}

	// A control frame may come between two fragments, and does not count.
	before := 0 // bytes of the message in earlier fragments
	if r.parts != nil && !control {
		before = r.parts.n
	}
	if h.payload > MaxMessage-uint64(before) {
		return errMessageBig
	}

	return nil
}

// check returns an error if no valid frame begins with these two bytes.
func (r *Reader) check(first, second byte) *Error {
	control := first&0x08 != 0
	opcode := first & 0x0f
	if first&0x70 != 0 {
		return errReserved
	}

	unknown := opcode > Pong&0x0f || !control && opcode > Binary&0x0f
	if unknown {
		return errOpcode
	}
	if second&0x80 == 0 {
		return errUnmasked
	}

	if control {
		if first&0x80 == 0 {
			return errControl
		}

		return nil
	}

	// A continuation needs a message that has begun, and any other frame needs none.
	continues := opcode == 0
	if continues != (r.parts != nil) {
		return errFragment
	}

	return nil
}

// take returns the frame with the given first byte and payload.
func (r *Reader) take(first byte, payload []byte) (Frame, *Error) {
	final := first&0x80 != 0

	if first == Close {
		return Frame{Kind: Close, Payload: payload}, checkClose(payload)
	}
	if first&0x08 != 0 {
		return Frame{Kind: first, Payload: payload}, nil
	}

	if r.parts == nil {
		if final {
			return message(Frame{Kind: first, Payload: payload})
		}

		// Only a message in fragments needs memory; any other is read in place.
		r.parts = pool.Get().(*parts)
		r.parts.kind = first | 0x80
		r.parts.n = 0
	}

	p := r.parts
	p.n += copy(p.text[p.n:], payload)
	if !final {
		return Frame{}, nil
	}

	f, err := message(Frame{Kind: p.kind, Payload: p.text[:p.n], parts: p})
	if err == nil {
		r.parts = nil // the frame owns p now
	}

	return f, err
}

// message checks a whole message.
func message(f Frame) (Frame, *Error) {
	if f.Kind == Text && !utf8.Valid(f.Payload) {
		return Frame{}, errText
	}

	return f, nil
}

// checkClose checks the payload of a close frame: it is empty, or a code that may be
// sent and a reason.
func checkClose(payload []byte) *Error {
	if len(payload) == 0 {
		return nil
	}
	if len(payload) == 1 {
		return errCloseCode
	}

	if !mayBeSent(int(binary.BigEndian.Uint16(payload))) {
		return errCloseCode
	}
	if !utf8.Valid(payload[2:]) {
		return errCloseText
	}
	return nil
}

// mayBeSent reports whether a close frame may have the code. 1004 is reserved; 1005 and 1006 must never be sent.
func mayBeSent(code int) bool {
	ofProtocol := 1000 <= code && code <= 1014 && (code < 1004 || code > 1006)
	ofApplication := 3000 <= code && code <= 4999

	return ofProtocol || ofApplication
}

// fail gives up the message under way and its buffer.
func (r *Reader) fail(err *Error) (Frame, int, *Error) {
	if r.parts != nil {
		pool.Put(r.parts)
		r.parts = nil
	}

	return Frame{}, 0, err
}

// Skip skips frames of any kind, up to the client's close frame; closed says that the
// close frame has arrived. Skip is for a connection on which the server has sent its
// close frame. n is how many bytes were skipped; they may end inside a frame.
func (r *Reader) Skip(data []byte) (n int, closed bool) {
	if r.skip > 0 {
		n = int(min(r.skip, uint64(len(data))))
		r.skip -= uint64(n)
		return n, false
	}

	h, whole := parseHead(data)
	if !whole {
		return 0, false
	}

	if data[0]&0x0f == Close&0x0f {
		// Skip waits for the whole frame: closing a connection with unread bytes would
		// reset it.
		n = h.size + int(min(h.payload, maxControl))
		if len(data) < n {
			return 0, false
		}

		return n, true
	}

	r.skip = h.payload
	return h.size, false
}

// unmask takes the mask off the payload.
func unmask(key [4]byte, payload []byte) {
	k := uint64(binary.LittleEndian.Uint32(key[:]))
	// The key is repeated, so that eight bytes are unmasked at once.
	k |= k << 32

	for len(payload) >= 8 {
		binary.LittleEndian.PutUint64(payload, binary.LittleEndian.Uint64(payload)^k)
		payload = payload[8:]
	}

	// The rest begins at a multiple of four, where the key begins anew.
	for i := range payload {
		payload[i] ^= key[i%4]
	}
}
