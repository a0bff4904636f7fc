// Package websocket is the server's side of RFC 6455 without input or output: it
// checks handshakes, writes frames and reads frames. It keeps no memory for a
// connection between two messages.
package websocket

import (
	"encoding/binary"
	"unicode/utf8"
)

// Opcodes of RFC 6455, with the FIN bit, as they stand in a frame's first byte.
const (
	Text   = 0x81
	Binary = 0x82
	Close  = 0x88
	Ping   = 0x89
	Pong   = 0x8a
)

// Status codes of close frames.
const (
	StatusProtocolError   = 1002
	StatusInvalidPayload  = 1007
	StatusPolicyViolation = 1008
	StatusTooBig          = 1009
	StatusServiceRestart  = 1012
)

// maxControl is the longest payload of a control frame, in bytes.
const maxControl = 125

// AppendFrame appends an unmasked frame, as servers send it. The same bytes may go to
// every client.
func AppendFrame(b []byte, opcode byte, payload []byte) []byte {
	b = append(b, opcode)
	switch n := len(payload); {
	case n < 126:
		b = append(b, byte(n))
	case n <= 0xffff:
		b = append(b, 126)
		b = binary.BigEndian.AppendUint16(b, uint16(n))
	default:
		b = append(b, 127)
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	return append(b, payload...)
}

// AppendClose appends a close frame. A reason of more than 123 bytes is cut.
func AppendClose(b []byte, code int, reason string) []byte {
	// Until the rest is valid UTF-8 again, so that no code point is cut in two.
	for len(reason) > maxControl-2 || !utf8.ValidString(reason) {
		reason = reason[:len(reason)-1]
	}
	payload := binary.BigEndian.AppendUint16(make([]byte, 0, maxControl), uint16(code))
	return AppendFrame(b, Close, append(payload, reason...))
}
