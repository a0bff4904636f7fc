// Package heartbeat holds the messages between a gateway and the presence node
// that owns a partition. Within one process messages go through memory, between
// processes as datagrams. Every message may be lost, repeated, delayed or
// overtaken, and the receiver still reaches the same state.
//
// For each partition a gateway numbers its joins and leaves in a stream: 1, 2, 3, …
// The node applies them strictly in order, and acknowledges a number when all ops up
// to it are in the store. The gateway repeats ops that are not acknowledged. A node
// that does not know a stream (it took the partition over, or forgot a gateway that
// was silent for long) asks for a new stream, which begins at 1 again. A heartbeat
// itself is the list of live users. It is not acknowledged; a node that does not know
// a listed user asks for the user's joins.
//
// A stream begins with the joins of all users that the gateway has, and says where
// these joins end. So a node that took over a partition without knowing its users
// finds out when it knows all of them. A gateway without users in the partition says
// so too.
package heartbeat

import (
	"time"

	"headcount/presence"
)

// Source is one life of one gateway: a gateway that restarts is another source.
type Source struct {
	Gateway     string
	Incarnation uint64 // see presence.NewIncarnation
}

// Kind is what an Op does. The values are part of the datagram format: new ones may
// be added, and none may change.
type Kind uint8

const (
	Join  Kind = 1 // the user has at least one live connection on the page here
	Leave Kind = 2 // the user has no connection any more and stays for Grace; 0: leaves at once
)

// Op is one join or leave. It is absolute for (source, user, page): repeating
// it changes nothing.
type Op struct {
	Kind  Kind
	User  presence.User
	Page  string
	Grace time.Duration // Leave only: the stay lasts this much longer
}

// Beat is what a gateway tells the owner of one partition.
type Beat struct {
	Source    Source
	Partition int
	Stream    uint64 // grows with every new stream of this source and partition
	First     uint64 // number of Ops[0] in the stream, or of the next op when Ops is empty; 0: the beat does not belong to the stream
	// Whole is 1 + the number of the last op that tells of what the gateway had when
	// the stream began; 0: the stream has not told of all of that yet.
	Whole uint64
	Ops   []Op            // at most MaxOps
	Alive []presence.User // users with a live connection here
}

// Reply is what the owner of a partition answers a gateway.
type Reply struct {
	Partition int
	Stream    uint64
	Acked     uint64           // all ops up to this number are in the store
	Counts    []presence.Count // counts that include the joins just acknowledged, of their pages and sites
	Unknown   []presence.User  // live users whom the owner does not know: send their joins again
	Reset     bool             // the owner does not know the stream: begin a new one
	// Ask asks the gateway to send Whole and all ops of the stream that are not
	// acknowledged, at once. A gateway whose stream is another one begins a new stream.
	Ask bool
}

// MaxOps is the most ops in flight on one stream, and so in one Beat. Further ops
// wait in the gateway, where joins and leaves of one user and page replace each
// other.
const MaxOps = 256
