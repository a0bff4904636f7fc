// Package region shares counters between regions, each of which has its own store of rows and owners of its own. It
// replicates what a region knows of its counters ([share.Share]) to the other regions.
//
// # Who owns what
//
//   - The rows of a region's counters belong to its own owners, as without other regions. The head of a counter has the
//     total of all regions, so reads, watchers and changes are what they are without others. Beside it, the owner keeps
//     what it knows of the other regions (package owner, shares.go).
//   - An inbox is what one region has written into the store of another one: a store of rows of its own, in the same
//     Redis, with claims and numbers of its own. Only the process of the sending region that owns a partition at home
//     claims and writes the partition there. The receiving region reads it.
//   - Exact counters, limits, ledgers, idempotency keys and top lists belong to their region, and are not shared. So do
//     time buckets and dimensions; a question about these is sent to all regions, and [Store] adds up the answers.
//
// # What crosses which boundary
//
//  1. An owner that has committed a change says which counters changed. They go into a backlog of each link, which has
//     each counter once ([Region.Shared]).
//  2. A link asks the owner for the shares of these counters, so they are as of one commit, and commits them into the
//     inbox (package replication decides when).
//  3. The other process receives the publication, reads the shares, and has its owner merge them. That is one commit
//     of the head with its new total and of what is known of others. It is published like any change.
//
// A share is the whole knowledge of a region about a counter, and merging takes the newer of each part of it. So shares
// may be lost, repeated, late and out of order, two processes may send the same partition, and the fence and the
// position of an inbox are there for economy alone.
//
// A merge is not sent on, because every region sends its own changes to all others. There are three exceptions: the
// sender does not know of a deletion, a reset, or a newer value of its own part; something is learned about this
// region's own parts; and the share came from a repair: it may bring what this region had sent to others and then lost,
// or lack registers of a unique that this region has. A repair is a publication, or whatever is read without one.
//
// # Backlogs
//
// A link and a receiver each have a backlog of every partition: the counters that have changed, or, when it cannot say
// which, all of them. That is so after each claim of the partition at home, when too many have changed, and when the
// inbox has lost something. The link then pages through all counters and deletions of the partition, reads what the
// inbox has of them, and writes what differs, marked as a repair.
//
// An inbox that lost its newest commits has a smaller number than its sender remembers. The sender finds that out by
// its next commit or, without one, by a row that has the number of the commit which wrote it, read every 2 s.
//
// # Faults
//
//   - A link is cut: each region goes on with what it knows of the others. After the cut the backlog is sent, or the
//     partition is compared if there is too much. Everything has arrived within 5 s.
//   - A commit into an inbox has no answer: the link claims the partition again, which keeps the commit from arriving
//     later, and sends the same counters once more.
//   - A process dies, or a partition moves: the new owner compares the partition with every inbox.
//   - A process that was overtaken at home still writes an inbox: what it writes is older at most, and merging ignores
//     that. The new owner takes the inbox back after 1.5 s.
//   - A store lost its newest commits: its owners write those at home again, and have new epochs, so everything is
//     compared. What the inboxes in it lost, their senders notice.
//   - A store comes back empty: the inboxes have lost everything, so all others send everything they know, also this
//     region's own parts. Members of its own sets are lost, and the others learn of that. The name of the region is a
//     row that its owner writes again.
//   - A store comes back older and nobody remembers what it lost: others know more of the region's own parts. These
//     parts stay, and the region goes on in a new life (package share). If it has already gone on beyond what others
//     know, its own value counts.
//   - Rules give one key different kinds in two regions, or a total would overflow 64 bits: the share is not merged,
//     and the log says so. It is tried again when the counter changes there.
//   - A peer has another name than the settings say, or its first process has not started: it is sent nothing.
//
// # Bounds
//
// A backlog names 4,096 counters of a partition; if there are more, it has all of them. A round has about 16,384
// counters, 256 and 1 MB of one partition. A counter has at most 100 parts. A deletion is remembered for 30 days.
package region
