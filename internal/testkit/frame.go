package testkit

import "encoding/binary"

// ClientFrame returns a WebSocket frame as clients send it: masked. first is FIN, the
// reserved bits and the opcode.
func ClientFrame(first byte, payload string) []byte {
	frame := []byte{first}
	switch n := len(payload); {
	case n < 126:
		frame = append(frame, 0x80|byte(n))
	case n <= 0xffff:
		frame = binary.BigEndian.AppendUint16(append(frame, 0x80|126), uint16(n))
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 0x80|127), uint64(n))
	}

	mask := [4]byte{0x12, 0x34, 0x56, 0x78} // need not be random in tests
	frame = append(frame, mask[:]...)
	for i := range len(payload) {
		frame = append(frame, payload[i]^mask[i%4])
	}

	return frame
}
