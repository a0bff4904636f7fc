// Package heartbeat holds the messages between a gateway and the presence node
// that owns a partition. Within one process they go through memory, between
// processes as datagrams; either way each may be lost, repeated, delayed or
// overtaken, and the receiver comes to the same end.
//
// Per partition a gateway numbers its joins and leaves in a stream: 1, 2, 3, …
// The node applies them strictly in order and acknowledges a number when all
// up to it are in the store. The gateway repeats what is not acknowledged. A
// node that does not know a stream (it took the partition over, or forgot a
// gateway that was silent for long) asks for a new one, which begins at 1
// again. Heartbeats proper, the list of users that are alive, are fire and
// forget; a node that is told of a user it does not know asks for the joins.
package heartbeat

import (
	"time"

	"headcount/presence"
)

// Source is one life of one gateway: a gateway that restarts is another source.
type Source struct {
	Gateway     string
	Incarnation uint64 // unix milliseconds of its start
}

// Kind is what an Op does. Values are part of the datagram format: they are
// only ever added to.
type Kind uint8

const (
	Join  Kind = 1 // the user has at least one live connection on the page here
	Leave Kind = 2 // it has none any more and stays for Grace; 0 is at once
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
	Stream    uint64          // grows with every new stream of this source and partition
	First     uint64          // number of Ops[0] in the stream
	Ops       []Op            // at most MaxOps
	Alive     []presence.User // users with a live connection here
}

// Reply is what the owner of a partition answers a gateway.
type Reply struct {
	Partition int
	Stream    uint64
	Acked     uint64           // all ops up to this number are in the store
	Counts    []presence.Count // counts that include the joins just acknowledged
	Unknown   []presence.User  // said to be alive, but not known: send their joins again
	Reset     bool             // the stream is not known: begin a new one
}

// MaxOps is the most ops in flight on one stream, hence in one Beat. What is
// beyond waits in the gateway, where joins and leaves of one user and page
// replace each other.
const MaxOps = 256
