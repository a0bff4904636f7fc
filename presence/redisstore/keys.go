package redisstore

import (
	"strconv"

	"headcount/presence"
	"headcount/presence/unread"
)

// All names in Redis. Braces are the hash tag that puts all keys of a partition,
// of a bucket or of the cluster into one slot, so that one script may touch them.
//
//	hc:{p17}:o       hash: owner, epoch, generation, last change (claim.lua)
//	hc:{p17}:d       set: pages whose count may not have been written yet
//	hc:{p17}:m:5     hash: members, user and page -> end of the hold (members.lua)
//	hc:{b5}:s        hash: generation, rebuild, publications (fence.lua)
//	hc:{b5}:f        hash: partition -> epoch and last change (counts.lua)
//	hc:{b5}:r        set: partitions that are complete
//	hc:{b5}:e        set: endpoints (read.lua)
//	hc:{b5}:l        zset: pages by their last change in this region (counts.lua)
//	hc:{b5}:c:PAGE   hash: counts of a page (counts.lua)
//	hc:{b5}:h:PAGE   hash: changes of a page (change.lua)
//	hc:{b5}:i:HASH   string: an idempotency key of a change that was counted
//	hc:{b5}:u:USER   hash: what a user follows (save.lua)
//	hc:{b5}:t        string: random, part of the generation
//	hc:{b5}:n/0      channel of the bucket, with the number of the database
//	hc:{c}:facts     hash: what all processes must agree on (renew.lua)
//	hc:{c}:leases    hash: processes
//	hc:{c}:regions   hash: when other regions were heard (hello.lua)
const prefix = "hc:"

const (
	factsKey   = prefix + "{c}:facts"
	leasesKey  = prefix + "{c}:leases"
	regionsKey = prefix + "{c}:regions"
)

// shares is into how many hashes a partition's members are divided. Small hashes
// take a third of the memory: with 64 they stay small (512 members) up to 32,768
// members a partition, nearly nine million in all of 271.
const shares = 64

func partitionKey(p int) string { return prefix + "{p" + strconv.Itoa(p) + "}:" }

func ownerKey(p int) string { return partitionKey(p) + "o" }
func dirtyKey(p int) string { return partitionKey(p) + "d" }

func memberKey(p, share int) string { return partitionKey(p) + "m:" + strconv.Itoa(share) }

// share is the hash of a partition that has the user. The remainder by P is the
// partition, so it is the quotient that is spread.
func share(u presence.User, partitions int) int { return int(uint64(u) / uint64(partitions) % shares) }

func bucketKey(b int) string { return prefix + "{b" + strconv.Itoa(b) + "}:" }

func stateKey(b int) string     { return bucketKey(b) + "s" }
func fenceKey(b int) string     { return bucketKey(b) + "f" }
func readyKey(b int) string     { return bucketKey(b) + "r" }
func endpointsKey(b int) string { return bucketKey(b) + "e" }
func logKey(b int) string       { return bucketKey(b) + "l" }
func tokenKey(b int) string     { return bucketKey(b) + "t" }
func pagePrefix(b int) string   { return bucketKey(b) + "c:" }

func historyKey(b int, page string) string      { return bucketKey(b) + "h:" + page }
func onceKey(b int, hash string) string         { return bucketKey(b) + "i:" + hash }
func followsKey(b int, user unread.User) string { return bucketKey(b) + "u:" + user.String() }

// channel has the database in its name, because pub-sub knows no databases.
func channel(b, db int) string { return bucketKey(b) + "n/" + strconv.Itoa(db) }
