// Package heartbeat has the messages between a gateway and the presence node that owns a
// partition. They travel through memory within a process, and as datagrams between
// processes. Every message may be lost, repeated, delayed or reordered, and the receiver
// still reaches the same state.
//
// For each partition a gateway numbers its joins and leaves in a stream: 1, 2, 3, …
// The node applies them strictly in order, and acknowledges a number when all ops up
// to it are in the store. The gateway repeats ops that are not acknowledged. A node
// that does not know a stream, because it took the partition over or forgot a gateway
// that was silent for long, asks for a new stream, which begins at 1 again. The heartbeat
// itself is the list of live users. It is not acknowledged; a node that does not know a
// listed user asks for the user's joins.
//
// A stream begins with the joins of all users that the gateway has, and states where these
// joins end. So a node that took over a partition without its users can tell when it knows
// all of them. A gateway without users in the partition sends such a stream, too.
//
// A datagram is signed with the cluster's secret. The Decoder (decode.go) refuses a
// datagram that is forged, meant for another process, too old or replayed, by means of
// package seal.
package heartbeat

import (
	"time"

	"headcount/presence"
)

// Source is one incarnation of a gateway: a gateway that restarts is another source.
type Source struct {
	Gateway     string
	Incarnation uint64 // see presence.NewIncarnation
}

// Kind is what an Op does. The values are part of the datagram format: new ones may
// be added, and none may change.
type Kind uint8

const (
	Join  Kind = 1 // the user has at least one live connection on the page at this gateway
	Leave Kind = 2 // the user's last connection there has ended, and the user stays for Grace
)

// Op is one join or leave. It sets the state of (source, user, page), so repeating it
// changes nothing.
type Op struct {
	Kind  Kind
	User  presence.User
	Page  string
	Grace time.Duration // of a Leave: how much longer the user counts as present
}

// Beat is a message of a gateway to the owner of one partition.
type Beat struct {
	Source    Source
	Partition int
	Stream    uint64 // grows with every new stream of this source and partition
	// First is the number of Ops[0] in the stream, or of the next op when Ops is empty; 0: the beat does not belong to
	// the stream.
	First uint64
	// Whole is 1 + the number of the last op that reports the users whom the gateway had
	// when the stream began; 0: that op is not known yet.
	Whole uint64
	Ops   []Op            // at most MaxOps
	Alive []presence.User // users with a live connection here
	Age   time.Duration   // for how long the beat was under way: Alive, and joins, say who was live then
}

// Reply is the reply of a partition's owner to a gateway.
type Reply struct {
	Partition int
	Stream    uint64
	Acked     uint64           // all ops up to this number are in the store
	Counts    []presence.Count // of pages and their sites
	// Counted says that Counts include every join up to this number. A reply may acknowledge joins whose counts are in
	// another reply. 0: the node is of an older release and does not report it.
	Counted uint64
	Unknown []presence.User // live users whom the owner does not know: send their joins again
	Reset   bool            // the owner does not know the stream: begin a new one
	// Ask asks the gateway to send Whole and all ops of the stream that are not
	// acknowledged, at once. A gateway whose stream is another one begins a new stream.
	Ask bool
}

// MaxOps bounds the ops in flight on one stream, and so in one Beat. Further ops wait in
// the gateway, where joins and leaves of one user and page replace each other.
const MaxOps = 256
