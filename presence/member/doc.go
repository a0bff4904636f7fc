// Package member makes a process a member of its region's cluster, whatever its roles.
// It keeps the process's lease and follows the leases of the others (membership.go),
// derives from them who owns which partitions and buckets, and routes messages to the
// owners (routing.go). It says whether the process can do its roles (readiness.go),
// and hands over when the process leaves (handover.go).
//
// A process with a store of its own is a cluster of one. It has no network and
// waits for no other process.
//
// # Membership
//
// Every process renews a lease in the store every 0.9 s; a lease lasts 2.7 s. The
// same call returns all processes that have a lease, and compares the cluster
// facts. A process that has been missing for 1.5 s, while the store answered all the
// time, is gone. After an outage of the store no process counts as missing at once:
// the others may not have renewed their leases yet.
//
// A starting process only watches for 1.7 s before it puts its roles into its lease. A
// process that was killed and is back before its lease ended has watched while it
// waited for that lease, so it has its roles at once, and its partitions stay with it.
//
// # Ownership
//
// Consistent hashing with bounded loads assigns partitions to presence nodes and
// buckets to dispatchers. Each process derives this table by itself. Every datagram
// carries the hash of its sender's table, and a process that receives another hash
// renews its lease at once, but only once between two regular renewals.
//
// # Fencing
//
// A node claims a partition with an epoch above all earlier ones, which is written
// to the partition and to every bucket. Every write checks the epoch, even for
// pages that the new owner never wrote. From time to time a node proves its claims
// with an empty write, so a node that lost a partition finds out even when it has
// nothing to write. After the store lost data a node claims its partitions again,
// except those that another process has claimed since.
//
// # Leaving
//
// A gateway drains its clients. A leaving process then renews its lease without
// roles, and goes on working while the others take over. A node that hands over lets
// no session expire: the gateways report all their users to the next owners, and the
// graces that run or have just ended.
package member
