// Package region shares this region's part of all counts with its peers, the
// other regions, and decides which of them are silent.
//
// Every region counts its own users in its own Redis and keeps a copy of what
// the other regions count. A region is the only one that writes its own part,
// and no region passes on the part of a third one. Package pncounter says what a
// copy makes of what it is told, scripts/merge.lua does the same in Redis, and a
// differential test on real servers compares the two.
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
// Every script that changes a page also puts the page into the log of its
// bucket: a sorted set that has each page once, at the place of its last change.
// So the pages bound what waits for a peer, however long the peer is away, and a
// link costs as much as pages changed, not as often as they changed. The log
// costs about 110 bytes a page, and nothing without peers. A region that had no
// peers begins its log with one walk over its keys.
//
// The peer's Redis keeps the cursor: for each bucket, the number of the log and
// the place up to which the peer has it. One script moves the cursor together
// with the pairs, so the two cannot disagree and no digest is needed. A lost
// batch, a peer that was restored or emptied, and a replicator that died look
// alike: the cursor is where it is, and the log goes on from there. Comparing all
// cursors every 2 s costs 3 KB a second, whatever the number of pages.
//
// # Links
//
// A process has one link to each peer. It serves the buckets whose dispatcher
// the process is, so a link fails over together with its buckets. The dispatcher
// tells the link of changes through memory. The first change goes at once; then a
// round goes every 200 ms, as one pipeline with a script per bucket and at most
// 500 pages each. A round that fails is halved. Greetings and comparisons run in
// a goroutine of their own, so no change waits for them. Each peer has its own
// link and its own connections, so one peer's trouble stays its own.
//
// # Loss of data
//
// A bucket that is rebuilt begins a new log with a number above all incarnations
// before. The log is told only when the bucket is complete. When a peer has all
// of it, pairs below the log's floor are void at that peer: users who left
// meanwhile do not stay for ever, and no user who stayed is missed in between. A
// peer that knows higher incarnations says so (clocks were set back, or
// everything was lost); then the log and its pairs are raised above them. A
// region that lost its own data marks its counts stale until the peers have told
// theirs again, for 5 s at most.
//
// # Forgetting
//
// A page that is empty in all regions is forgotten with its pairs after the
// store's RememberFor. Its entry in the log is swept later, and the place of the
// entry is remembered: a peer whose cursor is before that place may have missed
// that the page was empty, so the log is raised, which voids whatever it does not
// name. Pages of a region that never comes back stay in Redis and do not count.
//
// # Silence
//
// Every process greets every peer once a second by writing a word into the
// peer's Redis. A region looks whether the words in its own Redis changed, by its
// own monotonic clock; the clocks of two regions are never compared. The process
// that dispatches bucket 0 decides which regions are left out and writes the
// decision to Redis; the owners of the buckets apply it. Because totals are
// summed when they are read, that is one field per bucket: the versions of all
// its pages grow by the same step and the bucket is read again.
//
// A greeting also compares the region's name, the number of partitions and
// buckets, the seed of the hash and the format with the facts of the peer's
// cluster. A region has an identity in its Redis. If another identity used the
// same name within the last 3 s, the region is refused and tries again every 2 s.
package region
