package presence

import (
	"cmp"
	"strings"
)

// Report is a process's report about itself for a dashboard. Processes send it to each other as JSON, also to and from
// processes of the previous release.
type Report struct {
	Stats
	// Top has the pages with the most users of each site and its public pages with the most
	// users, in the buckets that the process distributes, most users first. It is not nil.
	Top []PageUsers `json:"top"`
	// Away says that the process cannot reach the store, so Top may be old.
	Away bool `json:"away,omitempty"`
}

// TopList has the pages with the most users, the largest first.
type TopList struct {
	Pages []PageUsers
	Stale bool // it may be old, or may lack pages
}

// Stats are the figures of a process. Totals count since its start. The part about a role
// that the process does not have is nil.
type Stats struct {
	Process ProcessStats  `json:"process"`
	Gateway *GatewayStats `json:"gateway,omitempty"`
	Node    *NodeStats    `json:"node,omitempty"`
	Peers   []PeerStats   `json:"peers,omitempty"` // only a dispatcher has peers; at most MaxPeers
}

// MaxPeers bounds Stats.Peers in a report from another process.
const MaxPeers = 1000

// ProcessStats are the operating system's figures about a process.
type ProcessStats struct {
	Memory int64   `json:"memory"` // resident bytes; 0: not available
	CPU    float64 `json:"cpu"`    // total seconds used
}

// GatewayStats are the figures of a gateway.
type GatewayStats struct {
	Connections int64 `json:"connections"` // open WebSockets and event streams
	Watched     int64 `json:"watched"`     // topics that clients or unread sums need
	Deliveries  int64 `json:"deliveries"`  // total of counts written to subscribers
	Messages    int64 `json:"messages"`    // total of messages received from clients
}

// NodeStats are the figures of a presence node.
type NodeStats struct {
	Users      int64 `json:"users"`      // users present on any page, in the partitions that the node owns
	Partitions int64 `json:"partitions"` // partitions whose actor runs
	Changes    int64 `json:"changes"`    // total of partition changes written to the store
}

// PeerStats are the figures of a peer, which is another region.
type PeerStats struct {
	Name    string  `json:"name"`
	Lag     float64 `json:"lag"`      // age of the oldest change that the peer does not have, in seconds
	Heard   float64 `json:"heard"`    // seconds since the peer's last greeting
	LeftOut bool    `json:"left_out"` // totals leave this peer out
}

// TopPages bounds the pages of one site in Report.Top, and once more its public pages.
const TopPages = 100

// Compare orders pages by users, most first, then by name.
func (p PageUsers) Compare(o PageUsers) int {
	return cmp.Or(cmp.Compare(o.Users, p.Users), strings.Compare(p.Page, o.Page))
}
