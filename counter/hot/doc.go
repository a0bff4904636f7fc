// Package hot shards busy sums: a sum that many processes change at the same time is not one number in Redis any more, but
// 16 shards in as many hash slots, and so on all masters of a Cluster. A [Store] stands in front of a store in Redis, with
// PostgreSQL behind it or without, and is a counter.Store itself.
//
// A process sees by the versions that its own writes return how often all processes together change a sum. Above
// Config.Rate it splits the sum. The sum stays split, but a process adds to shards only while it sees that the sum is busy.
//
// # Shards
//
// A shard is what was added to it, and by how many changes. The record of the sum says what of each shard it has:
//
//	value = value of the record + Σ (shard − what the record has of it)
//
// and the same of the sequences of versions. A gathering reads the shards and moves both numbers of the record in one script.
// A gathering that is late or repeated finds that the record has more already, and changes nothing. So nothing is counted
// twice, whoever gathers. Reads that may lag, and watchers, get the record.
//
// Only plain additions go to shards. All else changes the record as if the sum were not split: additions with an identity
// (in the record's slot, so a repetition finds it), with dimensions, of batches, and adjustments. A reset, a DELETE and numbers
// of more than 17 digits need the whole value: the record refuses them with counter.ErrSharded, and the sum is merged first.
//
// # Steps
//
// Any process may make any step, and a step that is late or repeated changes nothing. So a process may die at any moment.
//
//   - Split: the record says that it is split, with an epoch that is greater each time. Then the shards are opened. Who finds
//     one that was never open in the epoch opens it, as long as the record has nothing of any shard.
//   - Gather: whoever has added gathers, unless another process has done so meanwhile. What a process that died has left the
//     owner of the bucket finds in the list of sharded sums that each bucket has.
//   - Merge: each shard is closed, so that it keeps its numbers and takes no more. Then the record gathers for the last time and
//     says that it is whole. A closed shard stays for a day.
//
// # What would be lost without
//
//   - Epochs, and closed shards that stay for a day: additions to, and openings of, shards that are late after a merge would be
//     acknowledged and never read. The merged record keeps its epoch, or old shards might be counted again in the next one.
//   - The run of the server in a shard, which a shard that takes an addition compares: a server that comes back with an older
//     shard would count up again what the record has already. Such a shard, or a missing one, takes nothing; the addition
//     goes to the record, and the sum is merged. What the server kept beyond the record still counts.
//   - The list in each bucket: what a process that died has left would never be gathered and persisted.
//
// Redis that loses its memory with PostgreSQL behind it gets the record as it was persisted, with what it has of the shards.
//
// A process knows at most 1,000 sharded sums; others are changed by their records. It watches the rates of 4,096 keys at a time.
package hot
