// Package link carries calls to the owners in other processes. A pair of processes has one connection each way, on
// which many calls are under way at once.
//
// # Frames
//
//	length of the rest, 4 bytes, big-endian | payload | signature, 16 bytes
//
// The signature is HMAC-SHA256, truncated, over the direction (1 byte, 'c' from the client and 's' from the server),
// the number of the frame in this direction (8 bytes, from 0) and the payload. Both sides derive its key when the
// connection is made. So frames cannot be forged, repeated, left out or turned back. After a bad frame the connection
// ends.
//
// # Payloads
//
//	client: id (uvarint) | what is asked (1 byte) | its body
//	server: id (uvarint) | how it ended (1 byte)  | an answer, or a text for people
//
// The id is one that the client chose for the call. Answers come in any order.
package link

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"

	"headcount/internal/rows"
)

const (
	fromClient = 'c'
	fromServer = 's'

	signature = 16       // bytes
	maxFrame  = 16 << 20 // bytes of a payload: more than the largest batch takes
)

var (
	errForged = errors.New("the signature of a frame is wrong")
	errLong   = errors.New("a frame is too long")
)

// writer writes frames of one direction. One goroutine at a time may use it.
type writer struct {
	to     *bufio.Writer
	signer signer
}

// reader reads frames of one direction. One goroutine at a time may use it.
type reader struct {
	from   *bufio.Reader
	signer signer
}

func newWriter(to io.Writer, key []byte, direction byte) *writer {
	return &writer{to: bufio.NewWriterSize(to, 64<<10), signer: newSigner(key, direction)}
}

func newReader(from io.Reader, key []byte, direction byte) *reader {
	return &reader{from: bufio.NewReaderSize(from, 64<<10), signer: newSigner(key, direction)}
}

// write writes a frame, which is sent at the next flush or before.
func (w *writer) write(payload []byte) error {
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(payload)+signature))

	// A bufio.Writer returns its first error again from all later calls, so one check at the end is enough.
	_, _ = w.to.Write(length[:])
	_, _ = w.to.Write(payload)
	_, err := w.to.Write(w.signer.sign(payload))

	return err
}

func (w *writer) flush() error { return w.to.Flush() }

// read returns the payload of the next frame, in newly allocated memory.
func (r *reader) read() ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(r.from, length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	// The length is not signed, so it is checked before memory is taken for it.
	if n < signature || n > maxFrame+signature {
		return nil, errLong
	}

	frame := make([]byte, n)
	if _, err := io.ReadFull(r.from, frame); err != nil {
		return nil, err
	}
	payload := frame[:n-signature]
	if !hmac.Equal(r.signer.sign(payload), frame[n-signature:]) {
		return nil, errForged
	}

	return payload, nil
}

// signer signs, or verifies, the frames of one direction.
type signer struct {
	mac    hash.Hash // nil: frames are not signed
	head   [9]byte   // the direction and the number of the next frame
	number uint64
	sum    [sha256.Size]byte
}

// newSigner returns the signer of a direction. Without a key signatures are zeros.
func newSigner(key []byte, direction byte) signer {
	s := signer{}
	s.head[0] = direction
	if len(key) > 0 {
		s.mac = hmac.New(sha256.New, key)
	}

	return s
}

// sign returns the signature of the next frame. It is valid until the next call.
func (s *signer) sign(payload []byte) []byte {
	if s.mac == nil {
		return s.sum[:signature]
	}

	// The number is not sent. Both sides count, so after a missing frame every signature is wrong.
	binary.BigEndian.PutUint64(s.head[1:], s.number)
	s.number++

	s.mac.Reset()
	s.mac.Write(s.head[:])
	s.mac.Write(payload)

	return s.mac.Sum(s.sum[:0])[:signature]
}

// Types of requests.
const (
	askCall    = 1 // make a call; the answer is that of the owner
	askRelease = 2 // give up partitions; the answer is empty
	askNothing = 3 // a ping; the empty answer comes at once
	askProbe   = 4 // can the process named in the body be reached? The answer is 1 byte, 1: yes
)

// Outcomes of requests.
const (
	ended            = 0
	endedNotOwner    = 1
	endedOld         = 2
	endedBusy        = 3
	endedUnavailable = 4
	endedRefused     = 5 // the other process cannot make such a call, and repeating it is no use
	endedMoved       = 6 // not the owner; the text is the name of the process that is
)

// noID is the id of frames whose answers nothing waits for.
const noID = 0

// message is a payload without its body.
type message struct {
	id   uint64
	what byte
}

func (m message) appendTo(b []byte) []byte { return append(binary.AppendUvarint(b, m.id), m.what) }

// parse splits a payload into the message and its body.
func parse(payload []byte) (message, []byte, error) {
	id, n := binary.Uvarint(payload)
	if n <= 0 || n == len(payload) {
		return message{}, nil, fmt.Errorf("a frame of %d bytes is malformed", len(payload))
	}

	return message{id: id, what: payload[n]}, payload[n+1:], nil
}

// A request to release has the partitions, one byte each, and the name of the process that asks:
//
//	number of partitions (1 byte) | partitions | name
func appendRelease(b []byte, to string, partitions []int) []byte {
	b = append(b, byte(len(partitions)))
	for _, id := range partitions {
		b = append(b, byte(id))
	}

	return append(b, to...)
}

func parseRelease(b []byte) (to string, partitions []int, err error) {
	if len(b) == 0 || len(b) <= int(b[0]) {
		return "", nil, errors.New("a request to release is malformed")
	}

	n := int(b[0])
	for _, id := range b[1 : 1+n] {
		if id >= rows.Partitions {
			return "", nil, errors.New("there is no such partition")
		}
		partitions = append(partitions, int(id))
	}

	return string(b[1+n:]), partitions, nil
}
