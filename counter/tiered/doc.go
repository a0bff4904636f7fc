// Package tiered keeps counters in PostgreSQL with Redis in front: a
// counter.Store over a counterredis.Store and a counterpg.Store. A [Beside] has them beside each other, for regions that
// share counters, see the end; all else is about a [Store].
//
// # Who owns what
//
// The rule of a key says where its counter is. Exact counters are in PostgreSQL alone, and Redis knows nothing of them. Any
// other counter that was touched has a field in its bucket in Redis:
//
//   - a state: the counter is resident. Its truth is there, and PostgreSQL gets it later.
//   - "-": it does not exist.
//   - no field: it is not resident. Its truth is its row, and nobody may change it before there is a field.
//
// A row of another kind than the rule's refuses the change with counter.ErrKind. To make a counter resident, a process notes the bucket's ticket (its generation, and
// how many counters have left it), reads the row, and puts the state in, if nobody
// else has, and the ticket is still the same: a row read before a counter came, changed and
// left again is never put in. Many members are put into a key beside, in parts, and
// renamed at the end.
//
// # Checkpoints
//
// What is in Redis is persisted in checkpoints. A change notes its counter as dirty, and in journals the names of
// members that moved, steps of time that are over, what it counted under dimensions, and its identity. A checkpoint
// renames the list of dirty counters and that of identities, so it costs the same however many there are. Who changes
// one of its counters for the first time since then keeps the state of then beside it and sets its journals aside; who
// drains it does the same. So the values that are persisted, and the identities of who changed them, are of one moment,
// while changes go on. Only the steps of uniques are persisted as they are a little later: their registers grow and are
// merged into those that are there, in any order. They leave Redis when they are over and persisted.
//
// It goes into PostgreSQL in one transaction, with members, registers, history, resets, ledger entries, identities and
// the number of the checkpoint, one row for each counter that changed; then Redis forgets it. What was counted under
// dimensions is added to what is there; who reads adds what is in Redis unless the version of the row says that it is
// in already. Before the commit it is looked whether Redis still has all of the checkpoint: what lost its memory
// meanwhile would tell of counters as if they did not exist.
//
// Any process may persist. Who does holds the row of headcount_front; the others skip
// their turn. A process that dies on the way leaves the checkpoint in Redis: the next one finds it
// by its number, and writes it again, or only clears it away when it is in
// PostgreSQL already.
//
// # Redis that loses its memory
//
// All that is in Redis belongs to a generation, whose number is in PostgreSQL and in each
// bucket. A bucket also knows which run of which server it was found good on. A call
// that meets a bucket without a generation, or on another run, changes nothing: its process
// looks at all buckets while it holds headcount_front. When they are of the generation, and newer
// than the last persisted checkpoint, nothing that was persisted is missing, and they go on; the last versions may be lost, so what
// changes from now on gets a greater incarnation. Else a new
// generation begins: all buckets are emptied, also those that kept theirs. Who still persists or decides for the old generation is refused. A hot
// counter of an older generation is told with the incarnation of the new one: so it
// is newer than what was lost. For a day an identity that Redis does not know is looked
// for in PostgreSQL, if that had any.
//
// # Redis that had no PostgreSQL
//
// A bucket with counters and without a generation was never persisted: it is adopted and not emptied. One process at a time
// puts a copy of each counter, and the identities, into PostgreSQL; then the first generation begins. Nobody changes counters
// meanwhile: who has PostgreSQL finds no generation, and who has not is kept away by the cluster fact "postgres", which goes
// from none to behind only while no other process runs. A set that was in Redis alone has no names; its members stand in
// PostgreSQL by their hashes (counter.Nameless), until they leave or are named.
//
// # Faults
//
//   - PostgreSQL away: exact counters fail with counter.ErrUnavailable. Resident ones go on. A counter whose row
//     nobody has read cannot be changed, and a read of one fails until then, unless this process remembers it. For
//     a day after a Redis lost its memory, changes with an identity fail, because only PostgreSQL knows who is a
//     replay.
//   - Redis away: changes fail. Reads that may lag are answered with what is in PostgreSQL
//     or was last read from it, stale.
//   - Redis loses its memory: what was changed since the last checkpoint that was persisted is lost with
//     it; so are identities of that time. Of a Cluster one master
//     is enough. While PostgreSQL is away too, nothing is answered until it is back.
//   - Redis comes back with an older memory: the same, when it is older than the last checkpoint. When it is newer, values are at
//     least those of the last checkpoint; who looks at a counter may see what was lost until it changes again. A failover or a
//     restart needs PostgreSQL once, to find that out.
//   - A process dies: nothing that was acknowledged is lost.
//   - Rules of two processes that give one new counter different kinds: it may become both. The one in PostgreSQL stays.
//
// # Bounds
//
// Dirty counters, members that moved and identities wait in Redis, while PostgreSQL is away:
// at most 262,144 a bucket, beyond which changes of it fail. A process holds a page
// of a checkpoint at a time, and of a set that is loaded.
//
// # Beside each other
//
// Regions each have a Redis of their own, which package regions keeps alike, and share one PostgreSQL. A Beside has
// exact counters there and all others in Redis alone. Nothing goes from one to the other, so there are neither checkpoints nor
// generations, and each of the two may be away without the other. In both modes a batch of exact counters looks for its
// identity in Redis, and is noted there. So batches have one space of identities in each region, and those of exact
// counters one in all.
package tiered
