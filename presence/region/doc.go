// Package region replicates this region's part of all counts to its peers, the other
// regions, and decides which of them are silent.
//
// Every region counts its own users in its own Redis, and keeps a copy of the parts of
// the other regions. Only the region itself writes its part, and no region passes on
// the part of a third one. scripts/merge.lua merges batches. presencetest.Copy defines how,
// and a differential test on real servers compares the two.
//
// # Pairs
//
// For every page and region there is one pair: an incarnation, increments and
// decrements. A higher incarnation wins; within one incarnation the greater
// number of each wins. A total is summed when it is read or published: the
// region's own users, and the pairs of all regions that are not left out.
//
// # The log and the cursor
//
// Every script that changes a page also puts the page into the log of its bucket: a
// sorted set that has each page once, at the position of its last change. So the number
// of pages bounds what waits for a peer, however long the peer is away, and a link
// sends each changed page once, however often it changed. The log costs about 110 bytes
// a page, and nothing without peers. A region that had no peers begins its log with one
// scan of its keys.
//
// The peer's Redis keeps the cursor: for each bucket, the number of the log and the
// position up to which the peer has it. One script moves the cursor together with the
// pairs, so the two always agree. After a lost batch, a peer that was restored or
// emptied, or a replicator that died, replication goes on from the cursor. Comparing
// all cursors every 2 s costs 3 KB a second, whatever the number of pages.
//
// # Links
//
// A process has one link to each peer, as package replication describes it, with connections
// of its own, so that a failing peer does not affect the others. It serves the buckets of the
// process's dispatcher, so a link fails over together with its buckets. The dispatcher reports
// changes to the link through memory. A round is one pipeline with a script per bucket and at
// most 500 pages each.
//
// # Loss of data
//
// A bucket that is rebuilt begins a new log, whose number is above all earlier
// incarnations. The log is sent only when the bucket is complete. When a peer has all of
// it, pairs below the log's floor are void at that peer: users who left meanwhile do not
// stay for ever, and users who stayed are never missing. A peer that knows higher
// incarnations refuses the log (clocks were set back, or all data was lost); then the log
// and its pairs are raised above these incarnations. A region that lost its own data marks
// its counts stale until the peers have sent their parts again, for 5 s at most.
//
// # Forgetting
//
// A page that is empty in all regions is forgotten with its pairs after the store's
// RememberFor. Its entry is swept from the log later, and its position is remembered: a
// peer whose cursor is before that position may have missed that the page was empty, so
// the log is raised, which voids all pairs that it does not name. The pages of a region that
// never returns stay in Redis and do not count.
//
// # Silence
//
// Every process greets every peer once a second by writing a new word into the peer's
// Redis. A region watches whether the words in its own Redis change, by its own
// monotonic clock; the clocks of two regions are never compared. The process that
// dispatches bucket 0 decides which regions are left out and writes the decision to
// Redis; the owners of the buckets apply it. Because totals are summed when they are
// read, that changes one field per bucket: the versions of all its pages grow by the
// same step, and the bucket is read again. A region whose own Redis is away does not
// greet: its last counts are true no more.
//
// A greeting also compares the region's name, the number of partitions and
// buckets, the seed of the hash and the format with the facts of the peer's
// cluster. A region has an identity in its Redis. If another identity used the
// same name within the last 3 s, the region is refused and tries again twice a second.
package region
