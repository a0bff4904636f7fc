// Package regions shares counters between regions, each of which has its own Redis. A [Store] stands in front of the
// store in Redis of one region and is a counter.Store itself; its links tell the other regions what changed here.
//
// # What is shared
//
// The record of a counter in Redis has the total of all regions as this one knows it. So reads, aggregates, changes
// and updates are what they are without other regions. Beside the record stands what of it came from elsewhere.
//
//   - A sum has a part of each life of each region: a number that only this region moves, with the sequence of the
//     counter's version. Of two tellings of one part the greater sequence holds. The total is the sum of all parts, less
//     what resets have taken away.
//   - A set (kind members) is each region's own. The parts are the sizes of the others' sets, of their newest lives.
//   - A unique is one: registers are merged, and the greater wins.
//   - Exact counters are not told. They are in one PostgreSQL for all regions (package tiered), or a region's own without one.
//   - Limits, ledgers, identities and lists of what gained most are a region's own.
//   - What was gained in steps of time, and counted under dimensions, is a region's own, too. Who asks for it asks all
//     regions, and adds up; what a region does not tell within a second is missing, and the answer is stale.
//
// A merge takes the greater of what was known and what is told, of each part by itself. So it is commutative,
// associative and idempotent: tellings may be lost, repeated, late and out of order. Package shares has this as
// plain arithmetic, scripts/counter_merge.lua does the same in Redis, and a test compares the two.
//
// # What ends things
//
//   - A reset of a sum takes away each part as it is known here: the base of a part is its value at one of its
//     sequences, and the base with the greater sequence holds. A change that the reset did not know of stays, in
//     whichever region it was made; and two resets at once take nothing away twice.
//   - A reset of a set or unique gives it a greater number ("emptied"). What stands under a smaller number is
//     dropped where that is heard: members also, who joined meanwhile in a region that was cut off.
//   - DELETE gives the key a greater number ("died"), under which nothing is known of it. Who hears that drops the counter
//     with its members, steps, dimensions and ledger, also what it had gained meanwhile, but for what the shards of a
//     sharded sum have not given to it yet: that is its next life's. The number is
//     remembered for 30 days; a region that was cut off for longer may bring the counter back.
//   - An adjustment is an addition.
//
// These numbers are times in milliseconds, but always greater than the one known before, so a region whose clock is
// wrong can reset and delete what it knows of.
//
// # Versions
//
// The version of a counter is its region's own: its record's. Each merge that changes the value moves it like a
// change, so no version goes back in a region, but versions of two regions cannot be compared.
//
// # The log and the links
//
// A change also puts its counter into the log of its bucket, in the same script: each counter once, at the position of its
// last change. The other region's Redis keeps, for each bucket, the number of the log and the position up to which it
// has it; the script that merges a batch of the log moves the position. Each process with a gateway has a link to each other
// region, as package replication describes it, and serves the buckets that it owns. A region does not pass on what it
// receives: every region needs a link to every other.
//
// A log has 4,096 counters of a bucket at most, and ends with the run of its server. A peer that is further behind, or has
// another log, or none, is sent the whole bucket, a page in each round, and has no position until the end. A page that
// was not acknowledged is sent again. What changes meanwhile follows from the log. What a whole bucket brings is passed
// on, because the receiver may have lost what it had sent to others; so is a batch of the log that does not follow the
// receiver's position. That has an end: what follows in a log is not passed on.
//
// # Loss of data
//
// A region whose Redis came back empty has no positions of the others' logs, and is told all that they know, also what
// they know of itself. Parts of a sum are kept by life: the new life's part begins at 0, and what the lost life
// had given counts on, as far as any other region had heard of it. Registers come back alike. The members of a set
// are known to their region alone: they are lost, and so is the size that others had noted of them. Whoever still counts the
// lost set when it tells of the counter is told of the new one. The incarnation of a counter's versions is its region's life of
// it, and is made greater than any that others remember.
//
// A server that comes back with an older memory (a failover, a snapshot) finds that others know more of its parts than it does.
// What they know counts as a former life's, and what was added since the server came back is lost with the rest. Where it
// has gone on beyond what they know, its number holds, and what it had lost is missing. The log warns when a region tells all
// of a log that is shorter than a peer has it.
//
// # Faults
//
//   - A link is cut: each region counts on, with what it last knew of the others. Nothing is left out of totals and
//     nothing is stale: what was counted stays counted. Totals may always lag by the links, so answers say "exact":false.
//   - A process dies: another gateway owns its buckets, and goes on from the positions that the other region has.
//   - Rules give one key different kinds in two regions: neither takes the other's. The log says so.
//   - A region has another name than --peer says: nothing is told to it, and the log says so.
//
// # Bounds
//
// A round has about 16,384 counters, and 256 of one bucket; each 256 bytes of them count as one more. A counter has 100 parts: a
// life beyond is not counted. A part that would lead a total out of 64 bits is not taken until it is told again, with the
// next change of the counter there, and the total has room. A region's own part has the bound of 64 bits by itself.
// Beside a counter stand about 50 bytes for each region that changed it, and 110 while it is in the log.
package regions
