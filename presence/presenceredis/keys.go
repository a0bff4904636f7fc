package presenceredis

import "headcount/presence"

// All keys begin with prefix. scripts/README.md describes them.
const prefix = "hc:"

// formatFact is the field of factsKey with the format of the data.
const formatFact = "format"

const (
	factsKey   = prefix + "{c}:facts"
	leasesKey  = prefix + "{c}:leases"
	regionsKey = prefix + "{c}:regions"
)

// perShard is the greatest average number of members in a shard, which is one of a
// partition's hashes. Small hashes take a third of the memory of large ones, and a key
// for each member would take as much as five members in a hash. Redis stores a hash
// compactly up to 512 fields by default, and up to 128 in some installations. With 48 on
// average, a shard that is due to be split has 96, and hardly ever more than 128.
const perShard = 48

// shardsFor returns how many shards that many members need.
func shardsFor(members int) int { return max(1, (members+perShard-1)/perShard) }

// shardOf returns which of n shards has the user, as resize.lua does. From n to n+1
// shards only users of one shard move, and only to the new one (linear hashing).
func shardOf(u presence.User, n int) int {
	size := within(n)
	i := int((uint64(u)>>32 + uint64(u)&0xffffffff) % uint64(size))
	// That shard has not been split off yet, so its users are still in the shard that it will come from.
	if i >= n {
		i -= size / 2
	}
	return i
}

// neighbour returns the shard from which the last of n shards was split.
func neighbour(n int) int { return n - 1 - within(n)/2 }

// within returns the smallest power of two that is at least n.
func within(n int) int {
	size := 1
	for size < n {
		size *= 2
	}
	return size
}

// Fields that Go reads; scripts/README.md has all.
const (
	levelField  = "level"  // of historyKey
	beforeField = "before" // of historyKey: unread.Level.Before
	noteField   = "note"   // of historyKey: the unread.Note
	byField     = "by:"    // of historyKey, followed by a user
	newestField = "new"    // of historyKey, followed by a number
	recordField = ""       // of recordKey: the record's version
	peerField   = "peer:"  // of stateKey, followed by a region
)
