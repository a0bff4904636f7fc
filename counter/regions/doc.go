// Package regions shares counters between regions, each of which has its own Redis. A [Store] wraps the store in
// Redis of one region and is a counter.Store itself. Its links replicate the changes to the other regions.
//
// # What is shared
//
// The record of a counter in Redis has the total of all regions, as far as this region knows it. So reads, aggregates,
// changes and updates are the same as without other regions. The parts of the other regions are stored beside the
// record.
//
//   - A sum has a part for each incarnation of each region: a number that only this region changes, with the sequence of
//     the counter's version. Of two values of one part the one with the greater sequence is newer. The total is the sum
//     of all parts, less what resets subtracted.
//   - A set (kind members) belongs to its region. Its parts are the sizes of the other regions' sets, of their newest
//     incarnations.
//   - A unique is one HyperLogLog: registers are merged, the greater value wins.
//   - Exact counters are not replicated. They are in one PostgreSQL for all regions (package tiered), or belong to their
//     region if there is none.
//   - Limits, ledgers, idempotency keys and top lists belong to their region.
//   - Time buckets and dimensions belong to their region, too. A question about them is sent to all regions and the answers
//     are added up; if a region does not answer within a second, the answer is stale.
//
// The merge of a part takes the newer value, independently of all other parts. So it is commutative, associative and
// idempotent: batches may be lost, repeated, late and out of order. scripts/counter_merge.lua does it in
// Redis, and a test compares it with a model that has the merge as plain arithmetic.
//
// # Resets and deletes
//
//   - A reset of a sum subtracts each part as this region knows it: the base of a part is its value at one of its
//     sequences, and the base with the greater sequence wins. An increment that the reset did not know stays, whichever
//     region made it, and two resets at once subtract nothing twice.
//   - A reset of a set or unique gives it a greater number ("emptied"). A region that receives a greater number drops its
//     members or registers, including those added while it was disconnected.
//   - DELETE gives the key a greater number ("died"). A region that receives it drops the counter with its members, time
//     buckets, dimensions and ledger, including increments made meanwhile. Only what the shards of a sum have not
//     delivered yet remains, as the value of the next incarnation. The number is remembered for 30 days; a region that
//     was disconnected for longer may bring the counter back.
//   - An adjustment is an addition.
//
// These numbers are times in milliseconds, but always greater than the one known before. So a region whose clock is
// wrong can still reset and delete.
//
// # Versions
//
// The version of a counter belongs to its region. A merge that changes the value changes the version like any other
// change. So versions never go back within a region, and versions of two regions cannot be compared.
//
// # The log and the links
//
// The script of a change also puts the counter into the log of its bucket: each counter once, at the position of its
// last change. The other region's Redis keeps, for each bucket, the number of the log and the position up to which it
// has the log; the script that merges a batch moves the position. Each process with a gateway has a link to each
// other region, as package replication describes it, and serves the buckets that it owns. A region does not forward
// what it receives, so every region needs a link to every other.
//
// A log has at most 4,096 counters of a bucket, and ends with the run of its server. A peer that is further behind,
// or has another log or none, is sent the whole bucket, a page in each round, and has no position until the end. A
// page that was not acknowledged is sent again; changes made meanwhile follow from the log. What a whole bucket
// changes at the receiver is forwarded, because the receiver may have lost what it had sent to others; so is a batch
// that does not continue the log at the receiver's position. This ends, because batches that continue a log are not
// forwarded.
//
// # Loss of data
//
// A region whose Redis came back empty has no positions, so its peers send it everything they know, including its own
// parts. Its next change begins a new incarnation with a part of its own; the parts of the lost incarnations still
// count, as far as any other region had received them. Registers come back in the same way. Members of a set were
// known to their region only: they are lost, and the other regions drop the size of the lost set when they receive
// the new incarnation. An incarnation is greater than any that other regions know.
//
// A server that comes back with older data (a failover, a snapshot) receives newer values of its own parts. They
// become the parts of a former incarnation; changes made since the server came back are lost. If it has already gone
// on beyond what the others know, its own value wins, and what it had lost is missing. The log warns when a region
// sends a whole bucket whose log is shorter than the one the peer has.
//
// # Faults
//
//   - A link is cut: each region goes on counting with the last known parts of the others. Nothing is removed from totals
//     and nothing is stale. Totals may always lag, so answers say "exact":false.
//   - A process dies: another gateway gets its buckets and goes on from the positions in the other region's Redis.
//   - Rules give one key different kinds in two regions: neither merges the other's counter, and the log says so.
//   - A region has another name than --peer says: it is sent nothing, and the log says so.
//
// # Bounds
//
// A round has about 16,384 counters, and 256 of one bucket; each 256 bytes count as a further one. A counter has at
// most 100 parts; parts of further incarnations do not count. A part that would make the total overflow 64 bits is
// not merged until the counter changes there again and the total has room. A region's own part must fit in 64 bits by
// itself. A counter needs about 50 bytes for each region that changed it, and 110 while it is in the log.
package regions
