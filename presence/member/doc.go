// Package member is one process of a region's cluster, whatever its roles. A
// member keeps the process's lease and sees which other processes have one
// (membership.go). From the leases it derives the owners of partitions and buckets,
// and carries messages to them (routing.go). It says whether the process can do its
// roles (readiness.go), and hands over when the process leaves (handover.go).
//
// A process with a store of its own is a cluster of one. It has no network and
// waits for no other process.
//
// # Membership
//
// Every process renews a lease in the store every 0.9 s; a lease lasts 2.7 s. The
// same call returns all processes that have a lease, and compares the cluster
// facts. A process that was missing for 1.5 s, while the store answered all the
// time, is gone. After an outage of the store no process is missed at once: the
// others may not have renewed yet.
//
// A starting process watches for 1.7 s before it has roles in its lease. A process that
// was killed and is back before its lease ended has them at once: it has watched while
// it waited, and its partitions never leave it.
//
// # Ownership
//
// Consistent hashing with bounded loads makes a table of the live processes:
// partitions to presence nodes, buckets to dispatchers. Each process derives the
// table by itself. The hash of the table travels in every datagram, and a process
// that sees another hash renews its lease at once, if it has not done so since its
// last regular renewal.
//
// # Fencing
//
// A node claims a partition with an epoch above all earlier ones, which is written
// to the partition and to every bucket. Every write checks the epoch, even for
// pages that the new owner never wrote. From time to time a node proves its claims
// with an empty write, so a node that lost a partition finds out even when it has
// nothing to write. After a loss of data a node claims its partitions again, but for
// those with a newer claim of another process.
//
// # Leaving
//
// A gateway drains its clients. A leaving process then renews its lease without
// roles, goes on working while the others take over, and ends. The gateways tell the
// next owners of everybody who is here, and of graces that run or have just ended: an
// owner that hands over ends nobody's presence.
package member
