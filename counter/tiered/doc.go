// Package tiered keeps counters in PostgreSQL with Redis as a cache tier in front: a counter.Store over a
// counterredis.Store and a counterpg.Store. A [Beside] uses both without that, for regions; see the end. Everything
// else is about a [Store].
//
// # Where a counter is
//
// The rule of a key decides. Exact counters are in PostgreSQL alone. Any other counter that was used has a field in its
// bucket in Redis:
//
//   - A state: the counter is resident. Redis has the truth, and PostgreSQL gets it later.
//   - "-": the counter does not exist.
//   - No field: the counter is not resident. Its row has the truth, and it cannot be changed before it has a field.
//
// A row of another kind than the rule's refuses the change with counter.ErrKind. To make a counter resident, a process
// notes the bucket's ticket (its generation, and how many counters were evicted from it), reads the row and stores the
// state. Redis takes it only if the ticket is still the same and no other process was faster. So a row that was read
// before its counter was loaded, changed and evicted again is never stored. Many members are stored under another key
// in parts, which is renamed at the end.
//
// # Checkpoints
//
// What is in Redis is persisted in checkpoints. A change marks its counter as dirty, and adds to journals: members that
// joined or left, completed time buckets, counts of dimensions, and its idempotency key. A checkpoint renames the list
// of dirty counters and that of idempotency keys, so its cost does not depend on their number. The first change of a
// counter after that preserves the counter's state and journals as they were; so does the drain. So the values that are
// persisted, and the idempotency keys of the changes that led to them, belong to one moment, while changes go on. Only
// time buckets of uniques may be newer: their registers only grow, and are merged into those in PostgreSQL in any
// order. They leave Redis when they are complete and persisted.
//
// A checkpoint is written in one transaction, with members, registers, history, ledger entries, idempotency keys and
// the number of the checkpoint, one row for each changed counter. Then Redis drops it. Counts of dimensions are added
// to those in PostgreSQL; a reader adds the counts in Redis unless the version of the row shows that it has them.
// Before the commit the process checks that Redis still has the whole checkpoint: a Redis that lost its data meanwhile
// would have reported counters as not existing.
//
// Any process may persist. It holds the row of headcount_front meanwhile; the others skip their turn. If it dies, the
// checkpoint is still in Redis: the next process finds it by its number and writes it again, or only drops it if
// PostgreSQL has it.
//
// # Redis that loses its data
//
// Everything in Redis belongs to a generation, whose number is in PostgreSQL and in each bucket. A bucket also has the
// run of the server on which it was last checked. A call that finds a bucket without a generation, or of another run,
// changes nothing: its process checks all buckets while it holds headcount_front. If all are of the generation and
// newer than the last persisted checkpoint, nothing that was persisted is missing, and they continue. The last versions
// may be lost, so counters that change from now on get a greater incarnation. Otherwise a new generation begins: all
// buckets are emptied, also those that kept their data, and serve calls once PostgreSQL has the generation's number. If the
// process dies before that, the next one begins another. Writes for the old generation are refused. A resident counter
// of an older generation is read with the incarnation of the new one, so it is newer than what was lost. For a day, an
// idempotency key that Redis does not have is looked up in PostgreSQL, if that had any.
//
// # Redis that had no PostgreSQL
//
// A bucket with counters and without a generation was never persisted: it is adopted, not emptied. One process copies
// the counters and the idempotency keys into PostgreSQL; then the first generation begins. Nothing changes meanwhile:
// processes with PostgreSQL find no generation, and others are kept away by the cluster fact "postgres", which changes
// from none to behind only while no other process runs. The names of members in such a Redis are unknown. PostgreSQL
// has their hashes instead (counter.Nameless) until they leave or a call names them.
//
// # Faults
//
//   - PostgreSQL is unavailable: exact counters fail with counter.ErrUnavailable. Resident counters go on. Others
//     can be neither changed nor read; a read that may lag says so of each (counter.Reading.Away). For a day after Redis
//     lost its data, changes with an idempotency key fail, because only PostgreSQL knows whether they are replays.
//   - Redis is unavailable: changes fail. Reads that may lag are answered from PostgreSQL, and are stale.
//   - Redis loses its data: changes since the last persisted checkpoint are lost with it, and so are their idempotency
//     keys. One master of a Cluster is enough. While PostgreSQL is unavailable, too, no call is answered.
//   - Redis comes back with older data: the same, if it is older than the last checkpoint. If it is newer, values are
//     at least those of the last checkpoint; a watcher may see a lost value until the counter changes again. After a
//     failover or a restart, PostgreSQL is needed once to find this out.
//   - PostgreSQL comes back with older data, as in a failover to an asynchronous replica: later checkpoints are
//     persisted. What Redis had dropped of the lost ones is missing until the counter changes again, and is lost if it
//     leaves Redis before that.
//   - A process dies: nothing that was acknowledged is lost.
//   - Rules of two processes give one new counter different kinds: both may come into being. The one in PostgreSQL
//     stays.
//
// # Bounds
//
// While PostgreSQL is unavailable, dirty counters, members that moved and idempotency keys wait in Redis: at most
// 262,144 in a bucket; beyond that, changes of the bucket fail. A process holds one page of a checkpoint, or of a set
// that is being loaded, at a time.
//
// # Beside each other
//
// Each region has its own Redis, which package regions replicates, and all share one PostgreSQL. A Beside has exact
// counters in PostgreSQL and all others in Redis. Nothing moves between the two, so there are neither checkpoints nor
// generations, and each may be unavailable without the other. In both modes a batch of exact counters looks for its
// idempotency key in Redis and stores it there. So batches share one space of idempotency keys in each region, and
// those of exact counters share one in all regions.
package tiered
