// Package hot shards busy sums: a sum that many processes change at once is not one number in Redis any more, but 16
// shards in as many hash slots, and so on all masters of a Cluster. A [Store] wraps a store in Redis, with or without
// PostgreSQL behind it, and is a counter.Store itself.
//
// The version that a write returns tells a process how often all processes together change a sum. Above Config.Rate the
// process splits the sum. The sum stays split, but a process adds to shards only while the sum is busy.
//
// # Shards
//
// A shard has the sum of what was added to it, and the number of additions. The record of the sum has what it contains
// of each shard:
//
//	value = value of the record + Σ (shard − what the record has of it)
//
// The sequences of versions add up in the same way. To gather is to read the shards and to move the value and these
// numbers of the record in one script. A script that is late or repeated finds newer numbers in the record and changes
// nothing, so nothing counts twice, whichever process gathers. Reads that may lag, and watchers, get the record.
//
// Only plain additions go to shards. All other changes go to the record as if the sum were not sharded: additions with
// an idempotency key (in the record's slot, so a repetition finds the key) or with dimensions, batches, and
// adjustments. A reset, a DELETE and numbers of more than 17 digits need the whole value: the record refuses them with
// counter.ErrSharded, and the sum is merged first.
//
// # Steps
//
// Any process may make any step. A step that is late or repeated changes nothing, so a process may die at any moment.
//
//   - Split: the record begins an epoch, which is greater each time. Then the shards are opened. A process that finds a
//     shard that was never open in the epoch opens it, as long as the record contains nothing of any shard.
//   - Gather: a process that has added to shards gathers, unless another one has done so meanwhile. What dead processes
//     have added is gathered by the owner of the bucket, which has a list of its sharded sums.
//   - Merge: each shard is closed: it keeps its numbers and takes no more additions. Then the record gathers for the
//     last time and ends the epoch. A closed shard stays for a day.
//
// # Why it is so
//
//   - Without epochs, and without closed shards, an addition or an opening that arrives after the merge would be
//     acknowledged and never gathered. The merged record keeps its epoch, or old shards might be counted again in the
//     next one.
//   - A shard has the run of its server, and an addition compares it. A server that comes back with older shards would
//     otherwise count up again what the record has already. Such a shard, or a missing one, takes no additions: they go
//     to the record, and the sum is merged. What the server kept beyond the record still counts.
//   - Without the list in each bucket, what a dead process has added would never be gathered and persisted.
//
// If Redis loses its data with PostgreSQL behind it, it gets the record as it was persisted, with what it has of the
// shards.
//
// A process knows at most 1,000 sharded sums; others are changed through their records. It observes the rates of 4,096
// keys at a time.
package hot
