// Package hot spreads hot sums: a sum that many processes change at the same time is not one
// number in Redis any more, but 16 parts in as many hash slots, and so on all masters of a
// Cluster. A [Store] stands in front of a store in Redis, with PostgreSQL behind it or without,
// and is a counter.Store itself.
//
// # When
//
// One process has one write of a key under way, so a key is hot only where many processes
// change it. The version of a sum grows by one with each write, of whatever process, so the
// answers to its own writes tell a process how many all of them make in a second. Over
// Config.Rate the sum is spread; under a tenth of that for Config.Cool it is folded.
//
// # Parts
//
// A part has what was added to it since it was opened, and by how many changes: two numbers
// that only a change of the part moves. It has no history, no ledger, and no life of its own.
// The record of the sum says what of each part is in the sum already. So
//
//	value = value of the record + Σ (part − what the record has of it)
//
// and the same of the sequences of versions. Gathering reads the parts, and moves both the
// record's value and what it has of the parts in one script: the value is the master value,
// which all reads that may lag get, and which is told to who watches. A gathering that comes
// late, or twice, finds a part with a smaller sequence than the record has and leaves it
// alone. So nothing is counted twice, whoever gathers, however often.
//
// Only plain additions go to parts. All else is made on the record, as if the sum were not spread:
// additions with an identity (the record and the identity are in one slot, and stay there when the
// sum is spread or folded, so a repetition always finds it), with dimensions, of batches, and
// adjustments, which so are in the ledger. A reset and a DELETE need the whole value: they are refused with
// counter.ErrSpread, the sum is folded, and they are made then. A sum gains in a step of time
// when it is gathered. All of that needs no more of a store than a record that says how it is spread.
//
// # There and back
//
// The record goes through phases, and carries an epoch, which is greater each time:
//
//		whole ─1─► opening ─2,3─► open ─4─► closing ─5,6─► folded ─7,8─► (forgotten) ─1─► opening …
//
//	 1. The record says "opening", with a new epoch. The bucket notes the key among its hot ones.
//	 2. Each part is opened in the epoch, empty.
//	 3. The record says "open". From here on parts are added to. A part takes only what names its
//	    epoch, while it is open.
//	 4. The record says "closing".
//	 5. Each part is closed. It keeps its numbers, and takes nothing any more: whoever still adds
//	    to it is told so, and adds to the record.
//	 6. The record gathers, for the last time, and says "folded", in one script.
//	 7. The parts end by themselves, a day later: until then they refuse what is late.
//	 8. The bucket forgets the key.
//
// Each step can be repeated, and comes to nothing when it is late: the epoch says so. A process may die
// after any of them, also in the midst of 2, 5 and 7. Any other process finds in the record
// where it stands, and goes on. In every phase the sum above is the value, and a change is made in
// one place.
//
// # Who
//
// The owner of a key's bucket gathers, and folds; it looks every two seconds which keys of its
// buckets are hot. All steps may be made by several at once, so ownership needs no fence: it
// only saves work. When a process that adds to a sum sees for a second that nobody gathers, it
// does so itself. Whoever notices that a sum is hot spreads it.
//
// # Faults
//
//   - A part that is not there, or that a server has brought back from before its restart, takes nothing:
//     the process adds to the record instead, and folds the sum. What such a part had gained beyond what the sum has
//     of it is lost, as the settings of that server say; what the sum has stays.
//   - Redis loses its memory with PostgreSQL behind it: the row has the record as it was gathered last, with what
//     it has of the parts. Parts that are still there are counted on, others have nothing more.
//   - A part of the value would need more than 17 digits: the sum is folded, and judged as a whole. A sum with more
//     is not spread.
//
// # Bounds
//
// A process knows at most 1,000 hot sums; others are added to by their records. It watches the rates of
// 4,096 keys at a time.
package hot
