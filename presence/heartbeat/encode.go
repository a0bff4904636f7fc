package heartbeat

import (
	"encoding/binary"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/presence"
	"headcount/presence/seal"
)

var le = binary.LittleEndian

// Encoder packs messages for one receiver into datagrams, as few as possible. Their pages
// have at most MaxPage bytes. One goroutine at a time may use it.
type Encoder struct {
	signer   *seal.Signer
	header   []byte
	sequence uint64
	emit     func([]byte)
	now      func() time.Time

	buf    []byte // the current datagram
	record int    // where the open record begins; 0: no record is open
	kind   byte   // of the open record
}

// NewEncoder returns an Encoder for datagrams from one incarnation of a sender to the
// receiver named to. The sender's name has at most MaxName bytes. The first datagram has the
// number after sequence. A second Encoder for the same sender and receiver must get the
// Sequence of the first one.
func NewEncoder(from Source, to string, keys *seal.Keys, sequence uint64) *Encoder {
	e := &Encoder{signer: keys.Signer(), sequence: sequence, now: time.Now, buf: make([]byte, 0, MaxDatagram)}

	h := make([]byte, offName, offName+1+len(from.Gateway))
	h[0] = magic0
	h[1] = magic1
	h[2] = version
	id := e.signer.ID()
	copy(h[offKey:], id[:])
	le.PutUint64(h[offIncarnation:], from.Incarnation)
	le.PutUint64(h[offReceiver:], xxhash.Sum64String(to))

	h = append(h, byte(len(from.Gateway)))
	h = append(h, from.Gateway...)
	h = append(h, flagClock)
	h[offHeader] = byte(len(h))
	// The header is the same for all datagrams, except for what begin and flush fill in.
	e.header = h

	return e
}

// Sequence returns the number of the last datagram.
func (e *Encoder) Sequence() uint64 { return e.sequence }

// Beats packs beats and calls emit with every datagram, which emit must not retain. table
// is the hash of the sender's ring. Joins and leaves come first. The receiver gets the same
// ops and users in as many beats as needed; its beats with users have no stream.
func (e *Encoder) Beats(beats []*Beat, table uint64, emit func(datagram []byte)) {
	e.begin(ofGateway, table, emit)

	for _, b := range beats {
		e.ops(b)
	}

	// Alive users of all beats share records: a record has nothing but users.
	for _, b := range beats {
		for _, u := range b.Alive {
			// A datagram is filled up to its last 8 bytes: users are nearly all that gateways send.
			if e.kind != recordAlive || e.room() < 8 {
				e.makeRoom(recordHead + 8)
				e.open(recordAlive)
			}
			e.buf = le.AppendUint64(e.buf, uint64(u))
		}
	}

	e.flush()
}

// ops packs the beat's ops into as many records as needed.
func (e *Encoder) ops(b *Beat) {
	var scratch [2 * MaxPage]byte
	count := 0 // offset of the number of ops in the open record; 0: no record is open
	page := ""

	begin := func(first uint64, size int) {
		// The last number is room for the end of the record, which is written when the record is full.
		e.makeRoom(recordHead + 3*binary.MaxVarintLen64 + 2 + size + binary.MaxVarintLen64)
		e.open(recordOps)
		e.buf = binary.AppendUvarint(e.buf, uint64(b.Partition))
		e.buf = binary.AppendUvarint(e.buf, b.Stream)
		e.buf = binary.AppendUvarint(e.buf, first)
		count = len(e.buf)
		e.buf = append(e.buf, 0, 0)
	}

	end := func() {
		e.buf = binary.AppendUvarint(e.buf, b.Whole)
		e.close()
	}

	// A stream without ops has a record, too: the owner has to learn that this gateway has no users.
	if len(b.Ops) == 0 && b.First > 0 {
		begin(b.First, 0)
	}

	for i := range b.Ops {
		op := &b.Ops[i]

		var body []byte
		fits := false
		if count > 0 {
			body = appendOp(scratch[:0], op, page)
			fits = varintSize(len(body))+len(body)+binary.MaxVarintLen64 <= e.room()
		}

		// The first op of a record names its page, because the datagram before may be lost.
		if !fits {
			body = appendOp(scratch[:0], op, "")
			if count > 0 {
				end()
			}
			begin(b.First+uint64(i), binary.MaxVarintLen64+len(body))
		}

		e.buf = binary.AppendUvarint(e.buf, uint64(len(body)))
		e.buf = append(e.buf, body...)
		le.PutUint16(e.buf[count:], le.Uint16(e.buf[count:])+1)
		page = op.Page
	}

	if count > 0 {
		end()
	}
}

// appendOp appends an op without its length. before is the page of the op before it in
// the record, or empty.
func appendOp(b []byte, op *Op, before string) []byte {
	b = append(b, byte(op.Kind))
	b = le.AppendUint64(b, uint64(op.User))

	if before != "" && op.Page == before {
		b = append(b, 0)
	} else {
		b = binary.AppendUvarint(b, uint64(len(op.Page))+1)
		b = append(b, op.Page...)
	}

	// Rounded up, so that a short grace does not become none.
	grace := max(op.Grace, 0)
	ms := uint64(grace / time.Millisecond)
	if grace%time.Millisecond > 0 {
		ms++
	}
	return binary.AppendUvarint(b, ms)
}

// Replies packs replies as Beats packs beats. If a reply takes several datagrams, the last
// one has the acknowledgement.
func (e *Encoder) Replies(replies []*Reply, table uint64, emit func(datagram []byte)) {
	e.begin(ofNode, table, emit)
	for _, r := range replies {
		e.reply(r)
	}

	e.flush()
}

// replyHead bounds the bytes of a reply without its counts and users.
const replyHead = recordHead + 4*binary.MaxVarintLen64 + 1 + 2 + 2

func (e *Encoder) reply(r *Reply) {
	counts, unknown := r.Counts, r.Unknown
	size := replyHead + 8*len(unknown)
	for i := range counts {
		size += countSize(&counts[i])
	}

	if size <= e.capacity() {
		e.makeRoom(size) // do not split a reply that fits into one datagram
	}

	for {
		minSize := replyHead
		if len(counts) > 0 {
			minSize += countSize(&counts[0])
		} else if len(unknown) > 0 {
			minSize += 8
		}

		e.makeRoom(minSize)

		room := e.room() - replyHead
		n := 0 // counts in this record
		m := 0 // unknown users in it
		for n < len(counts) && countSize(&counts[n]) <= room {
			room -= countSize(&counts[n])
			n++
		}
		// Users follow when all counts are sent, so a part ends in the middle of one list only.
		if n == len(counts) {
			m = min(len(unknown), room/8)
		}

		// The acknowledgement comes with the last part, since the gateway releases connections by it.
		last := n == len(counts) && m == len(unknown)
		e.replyRecord(r, last, counts[:n], unknown[:m])
		if last {
			return
		}

		counts = counts[n:]
		unknown = unknown[m:]
	}
}

// replyRecord appends a record with a part of a reply. Only the last acknowledges and asks.
func (e *Encoder) replyRecord(r *Reply, last bool, counts []presence.Count, unknown []presence.User) {
	acked := uint64(0)
	flags := byte(0)
	if last {
		acked = r.Acked
		if r.Reset {
			flags |= flagReset
		}
		if r.Ask {
			flags |= flagAsk
		}
	}

	e.open(recordReply)
	e.buf = binary.AppendUvarint(e.buf, uint64(r.Partition))
	e.buf = binary.AppendUvarint(e.buf, r.Stream)
	e.buf = binary.AppendUvarint(e.buf, acked)
	e.buf = append(e.buf, flags)

	e.buf = le.AppendUint16(e.buf, uint16(len(counts)))
	// Each count has its length before it, so that a later release can add fields.
	for i := range counts {
		var scratch [2 * MaxPage]byte
		body := appendCount(scratch[:0], &counts[i])
		e.buf = binary.AppendUvarint(e.buf, uint64(len(body)))
		e.buf = append(e.buf, body...)
	}

	e.buf = le.AppendUint16(e.buf, uint16(len(unknown)))
	for _, u := range unknown {
		e.buf = le.AppendUint64(e.buf, uint64(u))
	}

	// Each part has Counted: it holds for the pages of that part, whether the other parts arrive or not.
	e.buf = binary.AppendUvarint(e.buf, r.Counted)
	e.close()
}

// countSize returns the size of a count with its length.
func countSize(c *presence.Count) int {
	var scratch [2 * MaxPage]byte
	n := len(appendCount(scratch[:0], c))

	return varintSize(n) + n
}

func appendCount(b []byte, c *presence.Count) []byte {
	flags := byte(0)
	at := int64(0)
	if c.Stale {
		flags |= flagStale
	}
	if !c.Updated.IsZero() {
		flags |= flagTime
		at = c.Updated.Unix()
	}

	without := c.Without
	if len(without) > maxWithout {
		without = "" // too many silent regions for a datagram
	}

	if without != "" {
		flags |= flagWithout
	}

	b = append(b, flags)
	b = binary.AppendUvarint(b, uint64(len(c.Page)))
	b = append(b, c.Page...)
	b = binary.AppendUvarint(b, uint64(max(c.Users, 0)))
	b = binary.AppendVarint(b, at)
	b = binary.AppendUvarint(b, c.Version.Incarnation)
	b = binary.AppendUvarint(b, c.Version.Sequence)

	if without != "" {
		b = binary.AppendUvarint(b, uint64(len(without)))
		b = append(b, without...)
	}

	return b
}

// begin starts datagrams of one type.
func (e *Encoder) begin(what byte, table uint64, emit func([]byte)) {
	e.emit = emit
	e.header[3] = what
	le.PutUint64(e.header[offTable:], table)
	// The buffer can be used again, because emit retains nothing.
	e.buf = append(e.buf[:0], e.header...)
	e.record = 0
	e.kind = 0
}

// room returns how many bytes still fit into the current datagram.
func (e *Encoder) room() int { return MaxDatagram - seal.Size - len(e.buf) }

// capacity returns how many bytes fit into an empty datagram.
func (e *Encoder) capacity() int { return MaxDatagram - seal.Size - len(e.header) }

// makeRoom begins a new datagram unless n bytes fit into the current one.
func (e *Encoder) makeRoom(n int) {
	if e.room() < n {
		e.flush()
	}
}

// open ends the open record and begins another.
func (e *Encoder) open(kind byte) {
	e.close()
	e.record = len(e.buf)
	e.kind = kind

	// close fills in the length.
	e.buf = append(e.buf, kind, 0, 0)
}

func (e *Encoder) close() {
	if e.kind != 0 {
		le.PutUint16(e.buf[e.record+1:], uint16(len(e.buf)-e.record-recordHead))
	}

	e.record = 0
	e.kind = 0
}

// flush signs and emits the datagram unless it is empty, and begins another.
func (e *Encoder) flush() {
	e.close()
	if len(e.buf) == len(e.header) {
		return
	}

	e.sequence++
	le.PutUint16(e.buf[offLength:], uint16(len(e.buf)+seal.Size))
	le.PutUint64(e.buf[offTime:], uint64(e.now().UnixMilli()))
	le.PutUint64(e.buf[offSequence:], e.sequence)

	// room has left room for the signature.
	e.buf = e.signer.Sign(e.buf, e.buf)
	e.emit(e.buf)

	e.buf = append(e.buf[:0], e.header...)
}

func varintSize(n int) int {
	size := 1
	for ; n >= 0x80; n >>= 7 {
		size++
	}

	return size
}
