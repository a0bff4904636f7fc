package presenceredis

import (
	"strconv"

	"headcount/presence"
)

// All keys begin with prefix. scripts/README.md describes them.
const prefix = "hc:"

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

func partitionKey(p int) string { return prefix + "{p" + strconv.Itoa(p) + "}:" }

func ownerKey(p int) string { return partitionKey(p) + "o" }
func dirtyKey(p int) string { return partitionKey(p) + "d" }
func seenKey(p int) string  { return partitionKey(p) + "s" }

func memberKey(p, shard int) string { return partitionKey(p) + "m:" + strconv.Itoa(shard) }

// shardOf returns which of n shards has the user, as resize.lua does. From n to n+1
// shards only users of one shard move, and only to the new one (linear hashing).
func shardOf(u presence.User, n int) int {
	size := within(n)
	i := int((uint64(u)>>32 + uint64(u)&0xffffffff) % uint64(size))
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

func bucketKey(b int) string { return prefix + "{b" + strconv.Itoa(b) + "}:" }

func stateKey(b int) string               { return bucketKey(b) + "s" }
func fenceKey(b int) string               { return bucketKey(b) + "f" }
func runKey(b int, process string) string { return bucketKey(b) + "w:" + process }
func readyKey(b int) string               { return bucketKey(b) + "r" }
func endpointsKey(b int) string           { return bucketKey(b) + "e" }
func logKey(b int) string                 { return bucketKey(b) + "l" }
func emptiesKey(b int) string             { return bucketKey(b) + "z" }
func tokenKey(b int) string               { return bucketKey(b) + "t" }
func pagePrefix(b int) string             { return bucketKey(b) + "c:" }

func minutesKey(b int, page string) string { return bucketKey(b) + "x:" + page }

func visitsKey(b int, hour int64, page string) string {
	return bucketKey(b) + "y:" + strconv.FormatInt(hour, 10) + ":" + page
}

func historyKey(b int, page string) string { return bucketKey(b) + "h:" + page }
func onceKey(b int, hash string) string    { return bucketKey(b) + "i:" + hash }
func recordKey(b int, user string) string  { return bucketKey(b) + "u:" + user }

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

// channel returns the bucket's channel. Its name has the number of the database, because
// pub/sub does not know databases.
func channel(b, db int) string { return bucketKey(b) + "n/" + strconv.Itoa(db) }
