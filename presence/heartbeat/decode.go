package heartbeat

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/presence"
	"headcount/presence/seal"
)

// replayWidth is how many later datagrams of one sender may overtake a datagram.
const replayWidth = 1024

// DecoderConfig tunes a Decoder. The callbacks own the messages that they get.
type DecoderConfig struct {
	Name       string           // of the receiver, as its senders know it; required
	Partitions int              // P; default presence.DefaultPartitions
	Keys       *seal.Keys       // required
	Now        func() time.Time // as Config.Now
	OnBeat     Beats            // nil: beats are ignored
	OnReply    Replies          // nil: replies are ignored
	OnTable    Tables           // called for every datagram whose sender has a ring; may be nil
	OnProbe    Probes           // nil: probes and answers are ignored
}

// Decoder parses datagrams. One goroutine at a time may use it.
type Decoder struct {
	cfg    DecoderConfig
	self   uint64
	signer *seal.Signer
	guard  *seal.Guard

	// The messages of the current datagram, whose size bounds them.
	beats   []*Beat
	replies []*Reply
	alive   []presence.User
	parts   []int32 // the partitions of alive
	number  []int32 // number of alive users by partition; all zero between datagrams
	seen    []int32 // partitions whose number is not zero
	age     time.Duration
}

// NewDecoder returns a Decoder.
func NewDecoder(cfg DecoderConfig) (*Decoder, error) {
	if cfg.Partitions == 0 {
		cfg.Partitions = presence.DefaultPartitions
	}

	if size := len(cfg.Name); size < 1 || size > MaxName {
		return nil, fmt.Errorf("heartbeat: %w: a name of %d bytes; it has 1 to %d", seal.ErrConfig, size, MaxName)
	}
	if cfg.Partitions < 1 || cfg.Partitions > math.MaxInt32 {
		return nil, fmt.Errorf("heartbeat: %w: %d partitions", seal.ErrConfig, cfg.Partitions)
	}

	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	// A user takes 8 bytes, so a datagram has no more.
	const maxUsers = MaxDatagram / 8

	return &Decoder{
		cfg:    cfg,
		self:   xxhash.Sum64String(cfg.Name),
		signer: cfg.Keys.Signer(),
		guard:  seal.NewGuard(replayWidth, cfg.Now()),
		alive:  make([]presence.User, 0, maxUsers),
		parts:  make([]int32, 0, maxUsers),
		number: make([]int32, cfg.Partitions),
		seen:   make([]int32, 0, maxUsers),
	}, nil
}

// Decode calls the callbacks with the messages in the datagram, or returns the reason for
// refusing it. It does not retain the datagram.
func (d *Decoder) Decode(datagram []byte) error {
	body, what, source, err := d.open(datagram)
	if err != nil {
		return err
	}

	// Of every datagram, wanted or not, because each one shows the ring of its sender.
	if table := le.Uint64(datagram[offTable:]); table != 0 && d.cfg.OnTable != nil {
		d.cfg.OnTable.Disagree(source.Gateway, table)
	}
	if !d.wants(what) {
		return nil
	}

	// No beat or reply is delivered unless the whole datagram is well-formed.
	err = d.records(body, what, source)
	if err == nil {
		for _, b := range d.beats {
			d.cfg.OnBeat.ReceiveBeat(b)
		}

		// Only now the users that are alive: they may have joined by these ops.
		d.split(source)
		for _, r := range d.replies {
			d.cfg.OnReply.ReceiveReply(r)
		}
	}

	// The callbacks own the messages by now, so nothing here may keep them in memory.
	clear(d.beats)
	clear(d.replies)
	d.beats = d.beats[:0]
	d.replies = d.replies[:0]
	d.alive = d.alive[:0]

	return err
}

// wants reports whether there is a listener for datagrams of the kind. Kinds of later releases are ignored.
func (d *Decoder) wants(what byte) bool {
	switch what {
	case ofGateway:
		return d.cfg.OnBeat != nil
	case ofNode:
		return d.cfg.OnReply != nil
	case ofProbe, ofAnswer:
		return d.cfg.OnProbe != nil
	default:
		return false
	}
}

// open checks the header and the signature of a datagram, and returns its records.
func (d *Decoder) open(p []byte) (body []byte, what byte, source Source, err error) {
	if err := checkFormat(p); err != nil {
		return nil, 0, source, err
	}

	signed := p[:len(p)-seal.Size]
	// Until here only the form was checked. The guard comes last, so a forged datagram uses up no number.
	if err := d.signer.Verify(seal.ID(p[offKey:]), signed, p[len(signed):]); err != nil {
		return nil, 0, source, err
	}

	header := int(p[offHeader])
	name := int(p[offName])
	// A longer header is that of a later release, and is read as far as it is known.
	if name > MaxName || header < offName+1+name || header > len(signed) {
		return nil, 0, source, ErrMalformed
	}
	// Otherwise a datagram could be recorded and sent to another process, whose guard has not seen it.
	if le.Uint64(p[offReceiver:]) != d.self {
		return nil, 0, source, ErrMisdirected
	}

	now := d.cfg.Now()
	at := int64(le.Uint64(p[offTime:]))
	source.Incarnation = le.Uint64(p[offIncarnation:])
	source.Gateway, err = d.guard.Admit(now, p[offName+1:offName+1+name],
		source.Incarnation, at, le.Uint64(p[offSequence:]))
	if err != nil {
		return nil, 0, source, err
	}

	// A sender that does not know the time of the cluster says nothing about the age.
	d.age = 0
	if flags := p[offName+1+name : header]; len(flags) > 0 && flags[0]&flagClock != 0 {
		d.age = max(now.Sub(time.UnixMilli(at)), 0)
	}

	return signed[header:], p[3], source, nil
}

// checkFormat reports what shows, before the signature is verified, that p is no datagram of this version.
func checkFormat(p []byte) error {
	if len(p) > MaxDatagram {
		return ErrOversized
	}
	if len(p) < 3 {
		return ErrTruncated
	}
	if p[0] != magic0 || p[1] != magic1 {
		return ErrMagic
	}
	if p[2] != version {
		return ErrVersion
	}

	// The version comes first, because another one may have another header.
	if len(p) < offName+1+seal.Size {
		return ErrTruncated
	}
	length := int(le.Uint16(p[offLength:]))
	if len(p) < length {
		return ErrTruncated
	}
	if len(p) > length {
		return ErrMalformed
	}

	return nil
}

// recordOf names the kind of a record and the kind of the datagram it is in. A reader skips every combination that it
// does not know, which a later release may send.
type recordOf struct{ datagram, record byte }

// records parses all records. It skips those that do not belong in a datagram of that
// type.
func (d *Decoder) records(p []byte, what byte, source Source) error {
	for len(p) > 0 {
		if len(p) < recordHead {
			return ErrMalformed
		}

		kind := p[0]
		n := int(le.Uint16(p[1:]))
		p = p[recordHead:]
		// The signature is right, so this is a fault of the sender: none of its messages is taken.
		if n > len(p) {
			return ErrMalformed
		}

		r := reader{p: p[:n]}
		p = p[n:]

		var err error
		switch (recordOf{what, kind}) {
		case recordOf{ofGateway, recordAlive}:
			err = d.readAlive(r.p)
		case recordOf{ofGateway, recordOps}:
			err = d.readOps(&r, source)
		case recordOf{ofNode, recordReply}:
			err = d.readReply(&r)
		case recordOf{ofProbe, recordProbe}, recordOf{ofAnswer, recordProbe}:
			err = d.readProbe(&r, what, source)
		}

		if err != nil {
			return err
		}
	}

	return nil
}

func (d *Decoder) readAlive(p []byte) error {
	if len(p)%8 != 0 {
		return ErrMalformed
	}

	for ; len(p) > 0; p = p[8:] {
		d.alive = append(d.alive, presence.User(le.Uint64(p)))
	}

	return nil
}

func (d *Decoder) readProbe(r *reader, what byte, source Source) error {
	number := r.uint64()
	if r.bad {
		return ErrMalformed
	}

	d.cfg.OnProbe.ReceiveProbe(source.Gateway, what == ofAnswer, number)
	return nil
}

// split delivers the alive users as beats, one for each partition.
func (d *Decoder) split(source Source) {
	if len(d.alive) == 0 {
		return
	}

	d.parts = d.parts[:0]
	d.seen = d.seen[:0]
	for _, u := range d.alive {
		part := int32(u.Partition(d.cfg.Partitions))
		d.parts = append(d.parts, part)
		d.number[part]++
		if d.number[part] == 1 {
			d.seen = append(d.seen, part)
		}
	}

	// The beats share one array: a datagram with users of many partitions costs two allocations.
	users := make([]presence.User, len(d.alive))
	beats := make([]Beat, len(d.seen))
	at := int32(0)
	for i, part := range d.seen {
		n := d.number[part]
		beats[i] = Beat{Source: source, Partition: int(part), Alive: users[at : at+n : at+n], Age: d.age}
		d.number[part] = at // from here on the index of the partition's next user
		at += n
	}

	for i, u := range d.alive {
		part := d.parts[i]
		users[d.number[part]] = u
		d.number[part]++
	}

	for i := range beats {
		d.number[d.seen[i]] = 0
		d.cfg.OnBeat.ReceiveBeat(&beats[i])
	}
}

// minOpSize is the fewest bytes of an op: its length, kind, user, page and grace.
const minOpSize = 1 + 1 + 8 + 1 + 1

func (d *Decoder) readOps(r *reader, source Source) error {
	partition := r.uvarint()
	stream := r.uvarint()
	first := r.uvarint()
	n := int(r.uint16())
	// Before anything is allocated: the number may promise more ops than there are bytes.
	if r.bad || n > len(r.p)/minOpSize {
		return ErrMalformed
	}
	if partition >= uint64(d.cfg.Partitions) {
		return ErrPartitions
	}

	b := &Beat{
		Source:    source,
		Partition: int(partition),
		Stream:    stream,
		First:     first,
		Ops:       make([]Op, 0, n),
		Age:       d.age,
	}

	page := "" // an op without a page is about the page of the op before
	paged := false

	for range n {
		o := r.sized()
		op := Op{Kind: Kind(o.byte()), User: presence.User(o.uint64())}
		if size := o.uvarint(); size > 0 {
			if size > uint64(MaxPage)+1 {
				return ErrMalformed
			}
			page = string(o.bytes(size - 1))
			paged = true
		}

		op.Page = page
		grace := o.uvarint()
		if o.bad || !paged || grace > uint64(math.MaxInt64/time.Millisecond) {
			return ErrMalformed
		}
		// The two processes have different numbers of partitions, so nothing of it can be right.
		if op.User.Partition(d.cfg.Partitions) != b.Partition {
			return ErrPartitions
		}

		if op.Kind != Join && op.Kind != Leave {
			// Later ops must wait until this process knows the kind.
			if len(b.Ops) > 0 {
				d.beats = append(d.beats, b)
			}
			return nil
		}

		op.Grace = time.Duration(grace) * time.Millisecond
		b.Ops = append(b.Ops, op)
	}

	if len(r.p) > 0 { // older senders do not send Whole
		b.Whole = r.uvarint()
	}

	if r.bad {
		return ErrMalformed
	}

	d.beats = append(d.beats, b)
	return nil
}

// minCountSize is the fewest bytes of a count: its length, flags and five varints.
const minCountSize = 1 + 1 + 5

func (d *Decoder) readReply(r *reader) error {
	partition := r.uvarint()
	stream := r.uvarint()
	acked := r.uvarint()
	flags := r.byte()
	n := int(r.uint16())
	// As in readOps, before anything is allocated.
	if r.bad || n > len(r.p)/minCountSize {
		return ErrMalformed
	}
	if partition >= uint64(d.cfg.Partitions) {
		return ErrPartitions
	}

	a := &Reply{
		Partition: int(partition),
		Stream:    stream,
		Acked:     acked,
		Reset:     flags&flagReset != 0,
		Ask:       flags&flagAsk != 0,
	}

	if n > 0 {
		a.Counts = make([]presence.Count, n)
	}
	for i := range a.Counts {
		wellFormed := readCount(r, &a.Counts[i])
		if !wellFormed {
			return ErrMalformed
		}
	}

	n = int(r.uint16())
	if r.bad || n > len(r.p)/8 {
		return ErrMalformed
	}

	if n > 0 {
		a.Unknown = make([]presence.User, n)
	}
	for i := range a.Unknown {
		a.Unknown[i] = presence.User(r.uint64())
	}

	if len(r.p) > 0 { // older senders do not send Counted
		a.Counted = r.uvarint()
	}

	if r.bad {
		return ErrMalformed
	}

	d.replies = append(d.replies, a)
	return nil
}

func readCount(r *reader, c *presence.Count) bool {
	o := r.sized()
	flags := o.byte()
	size := o.uvarint()
	if size > uint64(MaxPage) {
		return false
	}

	c.Page = string(o.bytes(size))
	users := o.uvarint()
	at := o.varint()

	c.Version = presence.Version{Incarnation: o.uvarint(), Sequence: o.uvarint()}
	c.Stale = flags&flagStale != 0

	if flags&flagWithout != 0 {
		c.Without = string(o.bytes(o.uvarint()))
	}
	if flags&flagTime != 0 {
		c.Updated = time.Unix(at, 0).UTC()
	}

	c.Users = int64(users)

	// A number of 64 bits has become negative.
	return !o.bad && c.Users >= 0
}

// reader reads fields from the front of p. Reading past the end makes it bad, and from
// then on it returns zeros.
type reader struct {
	p   []byte
	bad bool
}

func (r *reader) fail() {
	r.p = nil
	r.bad = true
}

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.p)) {
		r.fail()
		return nil
	}

	b := r.p[:n]
	r.p = r.p[n:]
	return b
}

// sized reads a part that begins with its length.
func (r *reader) sized() reader {
	p := r.bytes(r.uvarint())
	// The rest of the part is skipped with it: later releases may have added fields.
	return reader{p, r.bad}
}

func (r *reader) byte() byte {
	if b := r.bytes(1); b != nil {
		return b[0]
	}

	return 0
}

func (r *reader) uint16() uint16 {
	if b := r.bytes(2); b != nil {
		return le.Uint16(b)
	}

	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.bytes(8); b != nil {
		return le.Uint64(b)
	}

	return 0
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.p)
	if n <= 0 {
		r.fail()
		return 0
	}

	r.p = r.p[n:]
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.p)
	if n <= 0 {
		r.fail()
		return 0
	}

	r.p = r.p[n:]
	return v
}
