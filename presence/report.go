package presence

import (
	"cmp"
	"strings"
	"time"
)

// Report is a process's report about itself for a dashboard.
type Report struct {
	Stats
	// Top has the pages with the most users of each site and its public pages with the most
	// users, in the buckets that the process distributes, most users first.
	Top []PageUsers
}

// Stats are the figures of a process. Totals count since its start. The part about a role
// that the process does not have is nil.
type Stats struct {
	Process ProcessStats
	Gateway *GatewayStats
	Node    *NodeStats
	Peers   []PeerStats // only a dispatcher has peers; at most MaxPeers
}

// MaxPeers bounds Stats.Peers in a report from another process.
const MaxPeers = 1000

// ProcessStats are the operating system's figures about a process.
type ProcessStats struct {
	Memory int64         // resident bytes; 0: not available
	CPU    time.Duration // total time used
}

// GatewayStats are the figures of a gateway.
type GatewayStats struct {
	Connections int64 // open WebSockets and event streams
	Watched     int64 // topics that clients or unread sums need
	Deliveries  int64 // total of counts written to subscribers
	Messages    int64 // total of messages received from clients
}

// NodeStats are the figures of a presence node.
type NodeStats struct {
	Users      int64 // users present on any page, in the partitions that the node owns
	Partitions int64 // partitions whose actor runs
	Changes    int64 // total of partition changes written to the store
}

// PeerStats are the figures of a peer, which is another region.
type PeerStats struct {
	Name    string
	Lag     time.Duration // age of the oldest change that the peer does not have
	Silence time.Duration // time since the peer's last greeting
	LeftOut bool          // totals leave this peer out
}

// TopPages bounds the pages of one site in Report.Top, and once more its public pages.
const TopPages = 100

// Compare orders pages by users, most first, then by name.
func (p PageUsers) Compare(o PageUsers) int {
	return cmp.Or(cmp.Compare(o.Users, p.Users), strings.Compare(p.Page, o.Page))
}
