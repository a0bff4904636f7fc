package heartbeat

import (
	"headcount/presence"
	"headcount/presence/seal"
)

// The datagram format, version 1. Numbers are little-endian; a varint is an unsigned one of
// encoding/binary. A datagram has at most MaxDatagram bytes:
//
//	offset size
//	     0    2  magic: 0xC7 'h'
//	     2    1  version: 1
//	     3    1  type of the datagram: 1 of a gateway (beats), 2 of a node (replies),
//	             3 a probe, 4 the answer to a probe
//	     4    2  length of the whole datagram
//	     6    1  length of the header: where the records begin
//	     7    4  id of the key that signs; 0: not signed
//	    11    8  time of sending, unix milliseconds
//	    19    8  sequence number: 1, 2, 3, … from this sender to this receiver
//	    27    8  the sender's incarnation
//	    35    8  xxhash64 of the receiver's name
//	    43    8  hash of the sender's ring.Table; 0: it has none
//	    51  1+n  length of the sender's name, and the name: at most MaxName bytes
//	  52+n    1  flags: 1 the time of sending is that of the cluster, see seal.Clock;
//	             older senders go by their own clock, and have no flags
//	             records
//	   -16   16  HMAC-SHA256, truncated, of all before; zeros when not signed
//
//	record: kind (1), length of the body (2), body
//
//	kind 1, alive: users, 8 bytes each, to the end of the record. They may be of any
//	partitions.
//
//	kind 2, ops of one stream:
//	  varint partition, stream, number of the first op in the stream
//	  number of ops (2), then each of them:
//	    varint length of what follows of this op
//	    kind (1), user (8)
//	    varint 1 + length of the page id, page id; or 0: the page of the op before
//	    varint grace, milliseconds, rounded up
//	  varint 1 + number of the op that completes the stream, see Beat.Whole; 0: not said
//
//	kind 3, reply:
//	  varint partition, stream, acknowledged number
//	  flags (1): 1 reset, 2 ask
//	  number of counts (2), then each of them:
//	    varint length of what follows of this count
//	    flags (1): 1 stale, 2 it has a time, 4 regions are left out
//	    varint length of the page id, page id
//	    varint users; time of the last change in unix seconds (zigzag);
//	    incarnation, sequence of the version
//	    with flag 4: varint length of the names of those regions, and the names, see presence.Count.Without
//	  number of unknown users (2), users, 8 bytes each
//	  varint number of the last op whose join the counts include, see Reply.Counted; 0: not said
//
//	kind 4, probe, and its answer: 8 bytes that the prober chose
//
// The format only grows. A receiver skips unknown kinds of records and types of datagrams,
// and everything after the fields that it knows in the header, in a record (except alive),
// in an op or in a count. Ops are applied in order, so from the first op of an unknown kind
// on, the receiver ignores the ops of a record.
const (
	MaxDatagram = 1200 // fits every path of IPv6's least MTU, in a tunnel too
	MaxName     = 128
	MaxPage     = presence.MaxName

	magic0, magic1 = 0xC7, 'h'
	version        = 1

	ofGateway = 1
	ofNode    = 2
	ofProbe   = 3
	ofAnswer  = 4

	recordAlive = 1
	recordOps   = 2
	recordReply = 3
	recordProbe = 4

	flagClock   = 1 // of a header
	flagReset   = 1
	flagAsk     = 2
	flagStale   = 1
	flagTime    = 2
	flagWithout = 4

	maxWithout = 400 // bytes of presence.Count.Without

	offLength      = 4
	offHeader      = 6
	offKey         = 7
	offTime        = 11
	offSequence    = 19
	offIncarnation = 27
	offReceiver    = 35
	offTable       = 43
	offName        = 51
	recordHead     = 3
)

// Reasons to refuse a datagram. Further reasons are seal.ErrKey, ErrForged, ErrOld,
// ErrFuture, ErrReplayed and ErrSenders.
var (
	ErrOversized   = seal.NewRefusal("oversized", "datagram: too long")
	ErrMagic       = seal.NewRefusal("magic", "datagram: not a datagram of Headcount")
	ErrVersion     = seal.NewRefusal("version", "datagram: of another version")
	ErrTruncated   = seal.NewRefusal("truncated", "datagram: truncated")
	ErrMalformed   = seal.NewRefusal("malformed", "datagram: malformed")
	ErrMisdirected = seal.NewRefusal("misdirected", "datagram: sent to another process")
	ErrPartitions  = seal.NewRefusal("partitions", "datagram: the sender has another number of partitions")
)
