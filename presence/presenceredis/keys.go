package presenceredis

import (
	"strconv"

	"headcount/presence"
)

// All keys in Redis. The hash tag in braces puts all keys of a partition, of a bucket or
// of the cluster into one slot, so that one script may use them. PAGE is a qualified name
// (presence.Site.Qualify).
//
//	hc:{p17}:o       hash: owner, epoch, generation, last change (claim.lua)
//	hc:{p17}:d       string: pages whose count may not have been written yet (members.lua)
//	hc:{p17}:m:5     hash: members, user and page -> end of the hold (members.lua,
//	                 resize.lua says how many hashes there are)
//	hc:{p17}:s       zset: users who departed, and when (members.lua)
//	hc:{b5}:s        hash: generation, rebuild, publications (fence.lua)
//	hc:{b5}:f        string: per partition its epoch (fences.lua)
//	hc:{b5}:w:ID     string: number of a process's last run of counts.lua
//	hc:{b5}:r        set: partitions that are complete
//	hc:{b5}:e        set: endpoints (read.lua)
//	hc:{b5}:l        zset: pages by their last change in this region (counts.lua)
//	hc:{b5}:c:PAGE   string: counts of a page (page.lua)
//	hc:{b5}:z        zset: pages without users, since when (page.lua)
//	hc:{b5}:x:PAGE   string: minutes of a page (remember.lua)
//	hc:{b5}:y:7:PAGE hash: arrivals on a page in an hour since the Unix epoch
//	hc:{b5}:h:PAGE   hash: changes of a page (change.lua)
//	hc:{b5}:i:HASH   string: an idempotency key of a change that was counted
//	hc:{b5}:u:USER   hash: the follows of a user (save.lua)
//	hc:{b5}:t        string: random, part of the generation
//	hc:{b5}:n/0      channel of the bucket, with the number of the database
//	hc:{c}:facts     hash: the facts that all processes must agree on (renew.lua)
//	hc:{c}:leases    hash: processes
//	hc:{c}:mark:ID   string: a process's newest number (mark.lua); on a Cluster also hc:{b5}: and hc:{n5}:
//	hc:{c}:regions   hash: greetings of other regions (hello.lua)
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

// shardOf returns which of n shards has the user, as shards.lua does. From n to n+1
// shards only users of one shard move, and only to the new one (linear hashing).
func shardOf(u presence.User, n int) int {
	size := 1
	for size < n {
		size *= 2
	}
	i := int((uint64(u)>>32 + uint64(u)&0xffffffff) % uint64(size))
	if i >= n {
		i -= size / 2
	}
	return i
}

// neighbour returns the shard from which the last of n shards was split.
func neighbour(n int) int {
	size := 1
	for size < n {
		size *= 2
	}
	return n - 1 - size/2
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
