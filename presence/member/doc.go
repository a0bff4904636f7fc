// Package member makes a process a member of its region's cluster, whatever its roles.
// It keeps the process's lease and follows the leases of the other processes
// (membership.go), derives from them which process owns which partitions and buckets, and
// routes messages to the owners (routing.go). It reports whether the process is ready for
// its roles (readiness.go), and hands over when the process leaves (handover.go).
//
// A process with a store of its own is a cluster of one. It has no network and
// waits for no other process.
//
// # Membership
//
// Every process renews a lease in the store every 0.9 s; a lease lasts 2.7 s. The same
// call returns all processes that have a lease, and compares the cluster facts. A process
// whose lease has been missing for 1.5 s, while the store answered every call, is gone.
// After an outage of the store the 1.5 s begin again, because the other processes may not
// have renewed their leases yet.
//
// A starting process only watches for 1.7 s before it puts its roles into its lease. A
// process that was killed and restarts before its lease has ended must wait for that end
// and watches meanwhile. So it takes its roles at once and keeps its partitions.
//
// # Ownership
//
// Consistent hashing with bounded loads assigns partitions to presence nodes and
// buckets to dispatchers. Each process derives this table by itself. Every datagram
// carries the hash of its sender's table. A process that receives another hash than its
// own renews its lease at once, but only once between two regular renewals.
//
// # Fencing
//
// A node claims a partition with an epoch above all earlier ones, which is written to the
// partition and to every bucket. Every write checks the epoch, even for pages that the new
// owner never wrote. From time to time a node checks its claims with an empty write, so
// that a node that lost a partition notices even when it has nothing to write. After the
// store lost data, a node claims its partitions again, except those that another process
// has claimed since.
//
// # Leaving
//
// A gateway drains its clients. A leaving process then renews its lease without roles,
// and keeps working while the others take over. A node that hands over lets no session
// expire, because the gateways report all their users to the next owners, together with
// the graces that are running or have just ended.
package member
