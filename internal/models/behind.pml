/*
 * Write-behind: the owner of a partition commits to a fast store (Redis), and drains to a durable one (PostgreSQL).
 * What happens to acknowledged and to drained changes when the fast store loses its memory, rows are evicted from it,
 * the durable store is away, or the partition moves?
 *
 * Each action names its functions in brackets; a test holds that they exist.
 *
 * Sizes: two processes that own one partition in turn, one row, and the bounds below. A process may pause between any
 * two of its actions, end, and begin anew; a takeover has three steps. Answers of both stores get lost. The durable store
 * is away whenever it likes. The fast store loses everything once, at any moment.
 *
 * With -DFINE every call of a store is a step: a takeover has ten, and a process may do something between a call and its
 * answer. With -DTRACE the model follows a trace of a simulation in these steps, see trace.h and
 * internal/rows/rowstier/traces_test.go.
 *
 * Proved by assertions:
 * - A change is judged on everything that was acknowledged, if its owner still lives or it was drained.
 * - One of the stores has everything that was acknowledged, unless the fast store has just lost something.
 * - Versions grow, so none has two values.
 * - The number up to which commits were drained does not go back.
 * - The row in the durable store does not go back, except over what nobody acknowledged, or while the fast store says
 *   that a newer row is yet to be drained.
 * - Only the marks of drained commits are deleted.
 *
 * Left out: deletions, idempotency keys, the adoption of a fast store that was used alone, two fast stores, that one
 * list of names replaces many, and a fast store that loses only its newest commits, see package rowstier. A commit
 * reaches the fast store in the moment in which it is prepared. As in the simulations, a takeover itself is not lost;
 * when the fast store loses everything, no process that was replaced believes that it is the owner; and the clock is
 * past all epochs when the store is back, see ownership.pml.
 *
 * Planted faults, each of which must be found:
 * - NO_UPTO: a drain takes the marks of newer commits for its own.
 * - NO_MARKS: the next owner does not look at the marks.
 * - EVICTS_DIRTY: a dirty row is evicted.
 * - KEEPS_COMPLETE: after an eviction the store still calls itself complete.
 * - LOSS_UNSEEN: the number of the fast store is not compared with the drained one.
 * - DURABLE_UNFENCED: the durable store has no fence.
 * Four more were faults of the product:
 * - UNACKNOWLEDGED: nobody drains a commit whose answer was lost.
 * - LATE_CLAIM: a process that no longer owns the partition claims it in the durable store for the first time.
 * - HELD_ON: a process whose takeover has failed claims the durable store again, and drains what it knew before.
 * - UNCONFIRMED: nobody checks whether the fast store has lost something during a takeover.
 */
#ifdef TRACE
#define FINE
#define CLAIMS 30000
#define COMMITS 30000
#define LOSSES 250
#define PROCESSES 3
#define WORD short
#define SET int      /* numbers up to 29 */
#define SEQUENCES 64
#define UNKNOWN 32000
#define FORGOTTEN 32001 /* a takeover that had to forget what it knew is no renewal */
#else
#define PROCESSES 2
#define WORD byte
#define SET short
#define SEQUENCES 8
#define UNKNOWN 255
#define FORGOTTEN 254
#endif
#ifndef CLAIMS
#define CLAIMS 3
#endif
#ifndef COMMITS
#define COMMITS 2
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#define NOBODY 255
#define MAX(a, b) ((a) > (b) -> (a) : (b))

#include "trace.h"

#ifdef DURABLE_UNFENCED
#define DURABLE_FENCED false
#else
#define DURABLE_FENCED (durableHolder != me || P.isOutdated)
#endif
#ifdef UNCONFIRMED
#define HAS_CHANGED false
#else
#define HAS_CHANGED (P.former == FORGOTTEN && (epoch != P.claimed || number != P.found))
#endif
#ifdef LATE_CLAIM
#define IS_OVERTAKEN false
#else
#define IS_OVERTAKEN (epoch != P.epoch)
#endif

/* A version is an incarnation, which is an epoch, and a sequence. It stands for the value of the row. 0: no row. */
#define NEXT(version, epoch) (MAX(epoch, (version) / SEQUENCES) * SEQUENCES + (version) % SEQUENCES + 1)

/* Numbers of commits are also kept as bits. */
#define BIT(number) (1 << (number))
#define UPTO(number) ((2 << (number)) - 1)

/* CHOOSE: with -DFINE these steps have a choice in them, which d_step does not permit. */
#ifdef FINE
#define CHOOSE atomic
#else
#define CHOOSE d_step
#endif

/* What the fast store records about itself. Token 0: there is no record. */
typedef Record { bool complete; WORD syncedTo; WORD token }

/* The fast store. */
WORD epoch;
byte holder = NOBODY;
WORD number;
WORD row;
SET marks;         /* the commits whose names of changed rows it has */
Record state;

/* The durable store. */
byte durableHolder = NOBODY;  /* who made the newest claim of it; its epochs are not counted */
WORD durableNumber;
WORD durableRow, durableRowNumber;
WORD upTo;         /* what was drained: everything up to this commit of the fast store */
WORD token;        /* of the fast store that was drained last; 0: none was */
bool unconfirmed;  /* the fast store may not have that token yet */

/* What only the model knows. */
byte newest = NOBODY;  /* who made the newest claim */
WORD claims, tokens, commits; byte losses;
WORD top;              /* the greatest version that was ever in the fast store */
WORD acknowledged;     /* the greatest version that must not be missing */
bool isLost;           /* the fast store has lost it, and its owner has not written it again */

typedef Process {
	/* The owner of counters. */
	WORD mine; WORD has;  /* its epoch, and the newest commit it knows of; 0: it owns nothing */
	WORD knows = UNKNOWN; /* the row in its memory */
	bool commits;         /* a commit is under way: */
	WORD after; WORD number; WORD value; WORD base;  /* value 0: it changes nothing; base: what it was judged on */
	bool heals;           /* it writes again what the store may lack */
	bool isRepeated;      /* the fast store may have its earlier form */
	bool refused;

	/* A takeover. */
	byte step;            /* 0: there is none */
	WORD former; WORD claimed; WORD found;  /* the former epoch, the new one, and the number with it */
	Record is;
	bool isNew;           /* the fast store had no record, and has a token by now */
	bool hasDurable; WORD theirNumber; WORD theirUpTo; bool theirUnconfirmed; bool isEmpty;

	/* The tier's tenure. */
	WORD epoch;           /* 0: there is none */
	bool isRival;         /* another process has claimed the durable store after this one */
	Record state; bool stateChanged;
	bool isDirty; WORD dirty;
	bool isSending; WORD sending; WORD sendingUpTo;
	WORD drained; bool unconfirmed;
	bool isHeld; bool wasHeld; bool isOutdated; bool isWaiting; WORD durableNumber;  /* of its claim of the durable store */
	WORD newest;
	SET marks;            /* of commits that are not drained */
	SET gone;             /* of commits that are, to be deleted in the fast store */
	bool evicts
#ifdef FINE
	/* What is between two steps, and numbers of commits: that which wrote the row in memory, and the last one that was
	 * prepared. */
	; WORD knowsFrom; WORD tried;
	byte read;          /* the row was read, or is to be read in the durable store */
	byte answer;          /* of the fast store to a commit: it is on its way */
	bool hasSent;         /* the commit has the state as it is */
	SET goneSent;         /* the marks that it deletes */
	byte theirAnswer;     /* of the durable store to a drain */
	bool confirms; WORD taken;  /* it has claimed the durable store, and makes sure that it may */
	WORD theirToken;
	WORD changed          /* the row that the durable store has and the fast one may lack; 0: none */
#endif
}
Process processes[PROCESSES];

#define P processes[me]

#define IS_RENEWAL (P.former != 0 && P.former != FORGOTTEN)

/* The steps of a takeover. */
#define CLAIMED 1  /* in the fast store */
#define TAKEN 2    /* in the durable store, too */
#define READY 3    /* what both stores record about each other is known */
#ifdef FINE
#define BEGUN 4    /* the record of the fast store is read */
#define ITS_OWN 5  /* the durable store does not belong to another fast store */
#define REREAD 6   /* the record is read again, after the claim of the durable store */
#define NO_TOKEN 7 /* the fast store gets one */
#define WITHOUT 8  /* the durable store is away */
#define LISTED 9   /* the names of the rows that are not drained are read */
#define VALUED 10  /* these rows are read */
#define LOADED 11  /* what is not drained is known */
#define LACKING 12 /* what the fast store lacks is known */
#define FAILED 13
#define OVERTAKEN 14 /* the claim is refused */
#define RESTORED 15  /* the fast store lacks nothing */

#define HALF_READ 1  /* the fast store does not have the row, and may lack it */
#define WHOLE_READ 2
#endif

hidden WORD value;

/* The events of a trace, and what they say beside their process: a claim has FORMER, EPOCH, NUMBER and whether the answer
 * was SEEN; a commit has EPOCH, AFTER, NUMBER, the VALUE of the row, the TOKEN of a state in it, whether that IS_COMPLETE,
 * and the OUTCOME; a read has what was found, if the answer was seen. Epochs and tokens are numbered in their order. */
#define CLAIM 1        /* the owner claims the partition in the fast store */
#define COMMIT 2       /* its commit is prepared, and arrives or does not */
#define ANSWERED 3     /* the owner gets the answer to that */
#define ENDED 4        /* a takeover ends: OUTCOME */
#define READS_STATE 5
#define READS_DRAINED 6
#define TAKES 7        /* a takeover claims the durable store */
#define GIVES 8        /* it gives the fast store a token */
#define LISTS 9        /* it reads which rows are not drained */
#define READS_ROW 10
#define CONFIRMS 11    /* it makes sure that the fast store has not changed */
#define READS_CHANGED 12
#define RESTORES 13    /* it writes what the fast store has lost */
#define READS 14       /* the owner reads the row, in the fast store */
#define READS_ON 15    /* and in the durable one */
#define RELEASES 16
#define EVICTS 17
#define ENDS 18        /* a process ends */
#define LOSES 19       /* the fast store loses everything */
#define LATE 20        /* a claim of before arrives */
#define YIELDS 21      /* before a drain the fast store says that another process owns the partition */
#define HOLDS 22       /* a drain claims the durable store */
#define CHECKS 23      /* it makes sure that it may */
#define HAS_RIVAL 24   /* it learns who has the durable store */
#define SENDS 25       /* a drain is sent, and may not arrive */
#define DRAIN 26       /* it arrives */
#define DRAINED 27     /* its answer does */

/* Outcomes. */
#define LOST 1
#define FENCED 2
#define MADE 3
#define NEVER 4        /* the commit did not arrive */
#define HERE 5         /* the tier has refused it */
#define OWNS 6         /* of a takeover */
#define FAILS 7
#define YIELDED 8
#define MADE_AND_LOST 9 /* since then the fast store has lost everything */

#ifdef TRACE
#define FORMER event[2]
#define EPOCH event[3]
#define AFTER event[4]
#define NUMBER event[5]
#define VALUE event[6]
#define TO event[7]
#define TOKEN event[8]
#define IS_COMPLETE event[9]
#define OUTCOME event[10]
#define SEEN (event[10] == 1)
#define UNSEEN (event[10] == 0)
#define OUTCOME_IS(outcome) (event[10] == (outcome))
#define EVICTED 32000  /* a value */
#define FIRST(me) true
#define IS_WORTH_IT true
#define IS_LATE_OF(me) (holder == me)
#else
#define IS_WORTH_IT (P.evicts || P.gone != 0 || P.stateChanged || epoch != P.mine || number != P.has || P.isRival)
#define IS_LATE_OF(me) (P.mine != 0 && P.mine == epoch && holder == me && P.step == 0)
#define SEEN true
#define UNSEEN true
#define EVICTED 0
#define OUTCOME_IS(outcome) true
#define FIRST(me) ((me) == 0)  /* the processes are alike, so the first one begins */
#endif
#define IS_SURE(who) (processes[who].mine == 0 && processes[who].step == 0 || newest == who)

inline copyState(to, from) {
	to.complete = from.complete; to.syncedTo = from.syncedTo; to.token = from.token
}

inline noState(one) { one.complete = false; one.syncedTo = 0; one.token = 0 }

/* endCommit ends the commit that is under way. */
inline endCommit(me) {
	P.commits = false; P.after = 0; P.number = 0; P.value = 0; P.base = 0; P.heals = false;
	P.isRepeated = false; P.refused = false;
#ifdef FINE
	P.read = 0; P.answer = 0; P.hasSent = false; P.goneSent = 0
#endif
}

/* giveUp is [counter/owner.Owner.giveUp]. The tier does not learn of it. */
inline giveUp(me) {
	P.mine = 0; P.has = 0; P.knows = UNKNOWN;
#ifdef FINE
	P.knowsFrom = 0;
#endif
	endCommit(me)
}

/* endTakeover: it has ended, or it has failed. */
inline endTakeover(me) {
	P.step = 0; P.former = 0; P.claimed = 0; P.found = 0;
	noState(P.is);
	P.isNew = false;
	P.hasDurable = false; P.theirNumber = 0; P.theirUpTo = 0; P.theirUnconfirmed = false; P.isEmpty = false;
#ifdef FINE
	P.theirToken = 0; P.changed = 0
#endif
}

/* forget is [internal/rows/rowstier.partition.forgetLocked]. */
inline forget(me) {
	P.epoch = 0; P.isRival = false;
	noState(P.state);
	P.stateChanged = false;
	P.isDirty = false; P.dirty = 0; P.isSending = false; P.sending = 0; P.sendingUpTo = 0;
	P.drained = 0; P.unconfirmed = false;
	P.isHeld = false; P.wasHeld = false; P.isOutdated = false; P.isWaiting = false; P.durableNumber = 0;
	P.newest = 0; P.marks = 0; P.gone = 0; P.evicts = false;
#ifdef FINE
	P.tried = 0;
	P.theirAnswer = 0; P.confirms = false; P.taken = 0
#endif
}

/* check: one of the stores has what was acknowledged, unless the fast one has just lost it. */
inline check() {
	isLost = isLost && acknowledged > MAX(row, durableRow);
	assert(isLost || acknowledged <= MAX(row, durableRow))
}

/* claim is [internal/rows.Ownership.Claim] in the fast store. A claimed epoch is 0 if another process has claimed the
 * partition since the former claim. */
inline claim(me) {
	if
	:: P.former != 0 && epoch > P.former && holder != me -> P.claimed = 0
	:: else ->
		if
		:: P.former == 0 && isLost -> /* the former owner had no time to write it again */
			acknowledged = MAX(row, durableRow); isLost = false
		:: else
		fi;
		claims++;
		P.claimed = claims; epoch = claims; holder = me; newest = me;
		P.found = number
	fi
}

/* yield: the owner was overtaken. */
inline yield(me) {
	endTakeover(me);
	giveUp(me);
	if
	:: P.isWaiting -> forget(me) /* [internal/rows/rowstier.partition.forgetFailedTakeover] */
	:: else
	fi
}

/* readState is [internal/rows/rowstier.takeovers.readStates]. A record that is not there any more changes nothing. */
inline readState(me) {
	if
	:: state.token != 0 -> copyState(P.is, state)
	:: else
	fi
}

/* readDrained is [internal/rows/rowstier.takeovers.readDrained]. */
inline readDrained(me) {
	P.theirUpTo = upTo; P.theirUnconfirmed = unconfirmed;
#ifdef FINE
	P.theirToken = token
#endif
}

/* holdDurable is [internal/rows/rowstier.partition.claimedDurableLocked]. What was being sent is sent again. */
inline holdDurable(me, atNumber) {
	P.isHeld = true; P.wasHeld = true; P.isOutdated = false; P.durableNumber = atNumber;
#ifdef FINE
	P.hasSent = P.hasSent && P.state.syncedTo == atNumber;
#endif
	P.state.syncedTo = atNumber
}

/* begin is [internal/rows/rowstier.partition.beginTakeover]: the takeover claims the durable store from any process, so
 * a later claim that names the former one would not show that another process has held it since. */
inline begin(me) {
#ifdef FINE
	P.theirAnswer = 0; P.confirms = false; P.taken = 0; /* it has waited for the drain */
#endif
#ifdef HELD_ON
	P.isOutdated = P.isHeld
#else
	if
	:: P.former == 0 -> forget(me)
	:: else -> P.isHeld = false; P.isWaiting = true
	fi
#endif
}

/* An owner whose store lacks nothing makes an empty commit all the same, of which see verifyEach. */
#ifdef TRACE
#define HEALS true
#else
#define HEALS (P.has > P.found)
#endif
#ifdef FINE
#define KNOWS_MORE (P.knows != UNKNOWN && P.knowsFrom > P.found)
#else
#define KNOWS_MORE (P.knows != UNKNOWN)
#endif

/* finish is [internal/rows/rowstier.takeover.finish], and then the claim's result for the owner:
 * [counter/owner.Owner.Own], [counter/owner.Owner.heal]. A commit without an answer may have been made. The owner then
 * writes what the store may lack. */
inline finish(me, changed) {
	P.isWaiting = false;
	copyState(P.state, P.is);
	P.stateChanged = changed;
	if
	:: P.hasDurable ->
		holdDurable(me, P.theirNumber);
		P.drained = P.theirUpTo; P.unconfirmed = P.theirUnconfirmed
	:: else
	fi;
	if
	:: P.former == 0 -> P.has = P.found
	:: P.former != 0 && P.commits && P.found == P.number && P.found > P.has -> land(me)
	:: P.former != 0 && !(P.commits && P.found == P.number && P.found > P.has) -> endCommit(me)
	fi;
	P.mine = P.claimed;
	if
	:: P.former != 0 && HEALS -> /* [counter/owner.partition.healing] */
		P.commits = true; P.heals = true; P.after = P.found; P.number = MAX(P.has, P.found) + 1;
		P.value = (KNOWS_MORE -> P.knows : 0)
	:: else -> P.has = P.found
	fi;
	endTakeover(me)
}

/* The fast store has lost it, and the next owner goes on without it. */
#ifdef FINE
#define IS_LOST_ANSWER (P.answer == MADE_AND_LOST || P.step != 0 && epoch != P.claimed)
#define IS_LATE_ANSWER (IS_LOST_ANSWER && newest != me)
#else
#define IS_LATE_ANSWER false
#endif

/* land is [counter/owner.Owner.land]: the caller is answered. */
inline land(me) {
#ifdef FINE
	isLost = isLost || IS_LOST_ANSWER;
#endif
	if
	:: P.value != 0 ->
		P.knows = P.value;
#ifdef FINE
		P.knowsFrom = P.number;
#endif
		acknowledged = (IS_LATE_ANSWER -> acknowledged : MAX(acknowledged, P.value)); check()
	:: else
	fi;
	P.has = P.number;
	endCommit(me)
}

/* recordClaim is [internal/rows/rowstier.takeover.recordClaim]. */
#ifdef UNACKNOWLEDGED
#define KNOWS_ALL(me) (P.former != 0 && P.epoch != 0)
#else
#define KNOWS_ALL(me) (P.former != 0 && P.epoch != 0 && P.found <= P.newest)
#endif
inline recordClaim(me) {
	if
	:: KNOWS_ALL(me)
	:: else ->
		forget(me);
		P.former = (P.former != 0 -> FORGOTTEN : 0)
	fi;
	P.epoch = P.claimed;
	P.isWaiting = true
}

/* readDirtyRows is [internal/rows/rowstier.takeover.readDirtyRows]. */
inline readDirtyRows(me) {
#ifndef NO_MARKS
	P.gone = marks & UPTO(P.theirUpTo);
	P.marks = marks & ~UPTO(P.theirUpTo)
#else
	skip
#endif
}

/* readDirty is [internal/rows/rowstier.takeover.values]: a row that is not there was drained and then evicted. */
inline readDirty(me) {
	P.isDirty = P.marks != 0 && row != 0;
	P.dirty = (P.isDirty -> row : 0)
}

/* loadUndrained is [internal/rows/rowstier.takeover.loadUndrained]. */
inline loadUndrained(me) {
	recordClaim(me);
	if
	:: !IS_RENEWAL -> P.newest = P.found; readDirtyRows(me); readDirty(me)
	:: else
	fi
}

#define IS_UNDRAINED (P.isDirty || P.isSending && P.sending != 0)
#define CHANGED_IN_DURABLE (P.hasDurable && !P.isNew && durableRowNumber > P.is.syncedTo -> durableRow : 0)

#ifdef FINE
/* unload: what was read of a failed takeover is not kept. */
inline unload(me) {
	P.marks = 0; P.gone = 0; P.isDirty = false; P.dirty = 0; P.newest = 0
}
#endif

/* lackRows is [internal/rows/rowstier.partition.addUndrained], and value becomes what the fast store gets. Before it is
 * the row of [internal/rows/rowstier.takeover.changedInDurable]; reads fill a fast store without a record. */
inline lackRows(me) {
	value = (P.isDirty -> P.dirty : (P.isSending && P.sending != 0 -> P.sending : value));
	P.is.syncedTo = (P.hasDurable -> P.theirNumber : P.is.syncedTo);
	P.is.complete = P.is.complete && !P.isNew;
	P.newest = MAX(MAX(P.theirUpTo, P.found + 1), P.newest);
	P.gone = 0;
	P.marks = P.marks | (IS_UNDRAINED -> BIT(P.newest) : 0)
}

/* makeRestore is the fast store's side of [internal/rows/rowstier.takeover.restore], which is one commit. */
inline makeRestore(me, restored) {
	row = (restored != 0 -> restored : row);
	marks = marks | (IS_UNDRAINED -> BIT(P.newest) : 0);
	copyState(state, P.is);
	number = P.newest;
	check()
}

/* completeState: with a new durable store the fast store lacks nothing. */
inline completeState(me) {
	P.is.complete = P.is.complete || P.isNew && P.isEmpty;
	P.is.syncedTo = (P.hasDurable -> P.theirNumber : P.is.syncedTo)
}

/* giveToken is [internal/rows/rowstier.takeover.newToken]. */
inline giveToken(me) {
	tokens++;
	token = tokens; unconfirmed = true; durableNumber++;
	P.is.token = tokens; P.theirUnconfirmed = true; P.theirNumber = durableNumber;
	P.isNew = true
}

/* turn begins a commit. */
inline turn(me) {
	commits++;
	P.commits = true; P.after = P.has; P.number = P.has + 1
}

/* prepare is [internal/rows/rowstier.partition.prepare]. */
#ifdef EVICTS_DIRTY
#define EVICTS_NOW (P.evicts)
#else
#define EVICTS_NOW (P.evicts && !IS_UNDRAINED)
#endif
inline prepare(me) {
#ifdef FINE
	P.isRepeated = P.tried == P.number;
	P.tried = P.number;
#endif
#ifndef KEEPS_COMPLETE
	if
	:: EVICTS_NOW && P.state.complete -> P.state.complete = false; P.stateChanged = true
	:: else
	fi
#else
	skip
#endif
}

/* makeCommit is the fast store's side: [scripts/rows_commit.lua]. */
inline makeCommit(me) {
	if
	:: P.value != 0 && !P.heals ->
		assert(P.base >= acknowledged);                           /* it was judged on all that must be there */
		assert(P.value > top || P.value == top && P.isRepeated);  /* no version is used twice */
		top = P.value
	:: else
	fi;
	row = (P.value != 0 -> P.value : (EVICTS_NOW -> 0 : row));
	marks = marks & ~P.gone | (P.value != 0 -> BIT(P.number) : 0);
	if
	:: P.stateChanged -> copyState(state, P.state)
	:: else
	fi;
	number = P.number;
	check()
}

/* acknowledge is [internal/rows/rowstier.partition.acknowledge]. */
inline acknowledge(me, written, deleted) {
	if
	:: P.value != 0 -> P.isDirty = true; P.dirty = P.value; P.marks = P.marks | BIT(P.number)
	:: else
	fi;
	P.newest = P.number;
	P.gone = P.gone & ~(deleted);
	P.evicts = false;
	P.stateChanged = P.stateChanged && !(written);
	land(me)
}

/* makeDrain is the durable store's side: [internal/rows/rowstier.partition.newDrainLocked]. */
inline makeDrain(me) {
	if
	:: P.sending != 0 ->
		/* It goes back only over what nobody acknowledged, or where a newer one is yet to be drained. */
		assert(P.sending >= durableRow || durableRow > acknowledged || (marks & ~UPTO(P.sendingUpTo)) != 0);
		durableRow = P.sending; durableRowNumber = durableNumber + 1
	:: else
	fi;
	assert(P.sendingUpTo >= upTo && P.state.token != 0);
	upTo = P.sendingUpTo;
	token = P.state.token; unconfirmed = false;
	durableNumber++;
	check()
}

/* endDrain is [internal/rows/rowstier.partition.drainedLocked]. */
inline endDrain(me) {
	P.drained = P.sendingUpTo; P.unconfirmed = false;
	P.durableNumber++;
	P.state.syncedTo = P.durableNumber; P.stateChanged = true;
#ifdef FINE
	P.hasSent = false;
#endif
#ifdef NO_UPTO
	P.gone = P.gone | P.marks; P.marks = 0;
#else
	P.gone = P.gone | (P.marks & UPTO(P.sendingUpTo)); P.marks = P.marks & ~UPTO(P.sendingUpTo);
#endif
	assert((P.gone & ~UPTO(upTo)) == 0); /* only the marks of what was drained are deleted */
	P.isSending = false; P.sending = 0; P.sendingUpTo = 0
}

/* [internal/rows/rowstier.partition.refuses]. A commit without changes may pass, see rival. */
#define MAY_PASS (!P.isRival || P.value == 0)

/* A drain waits for a takeover, but not for a claim in the fast store. */
#ifdef FINE
#define MAY_DRAIN (P.step == 0 || P.step == CLAIMED || P.step == OVERTAKEN)
#else
#define MAY_DRAIN (P.step == 0)
#endif

/* What [internal/rows/rowstier.takeover.fastLostData] finds. */
#ifdef LOSS_UNSEEN
#define LACKS_DRAINED false
#else
#define LACKS_DRAINED (P.hasDurable && P.found < P.theirUpTo)
#endif
#define LACKS_KNOWN (!LACKS_DRAINED && IS_RENEWAL && P.found < P.newest)
#define LACKS_SOMETHING (LACKS_DRAINED || LACKS_KNOWN)
#define LACKS_NOTHING (!LACKS_DRAINED && !(IS_RENEWAL && P.found < P.newest))
#define IS_WITHHELD (LACKS_KNOWN && !P.hasDurable && P.found < P.drained) /* the durable store has it, and is away */
#define IS_ALIEN (LACKS_NOTHING && P.isNew && !P.isEmpty && P.found > 0)  /* both have rows: ErrBoth */

active [PROCESSES] proctype process() {
	byte me = _pid;

end:	do
	/* [counter/owner.Owner.Own]. Every takeover begins with [internal/rows/rowstier.Store.Claim]. Or
	 * [counter/owner.Owner.heal]: the store has refused a commit. */
	:: CHOOSE { P.step == 0 && (P.mine == 0 || P.refused) && IS(CLAIM, me) && (FIRST(me) || claims > 0) &&
		(claims < CLAIMS || P.refused && epoch > P.mine && holder != me) ->
		P.former = P.mine; P.refused = false;
		claim(me);
		expects(FORMER == P.former && EPOCH == P.claimed && (P.claimed == 0 || NUMBER == P.found));
#ifdef FINE
		if
		:: SEEN -> P.step = (P.claimed == 0 -> OVERTAKEN : CLAIMED)
		:: UNSEEN -> endTakeover(me) /* the store alone knows of it */
		fi;
		follow() }
#else
		if
		:: P.claimed == 0 -> yield(me)
		:: else -> P.step = CLAIMED
		fi }
#endif

	/* The claim does not reach the store, and the commit is repeated. */
	:: d_step { P.refused && P.step == 0 && IS(ENDED, me) -> P.refused = false; matches(OUTCOME_IS(FAILS)) }
#ifdef TRACE
	:: d_step { !P.refused && P.step == 0 && IS(ENDED, me) -> matches(OUTCOME_IS(FAILS)) }
#endif

	/* A claim of before arrives late, when the process owns the partition. */
	:: d_step { IS_LATE_OF(me) && claims < CLAIMS && IS(LATE, me) ->
		claims++; epoch = claims; matches(EPOCH == epoch) }

#ifndef FINE
	/* [internal/rows/rowstier.takeovers.takeOverDurable], [internal/rows/rowstier.takeovers.claimDurable]. */
	:: d_step { P.step == CLAIMED && (state.token == 0 || token == 0 || token == state.token) ->
		begin(me);
		readState(me);
		durableHolder = me;
		P.theirNumber = durableNumber;
		P.hasDurable = true;
		P.step = TAKEN }

	/* The durable store is away, so the record must be there. */
	:: d_step { P.step == CLAIMED && state.token != 0 ->
		begin(me);
		readState(me); P.step = READY }

	/* The claim fails. */
	:: d_step { P.step >= TAKEN -> endTakeover(me) }

	/* Both are read again, and [internal/rows/rowstier.takeovers.giveTokens] comes. */
	:: d_step { P.step == TAKEN ->
		readState(me);
		readDrained(me);
		P.isEmpty = P.theirNumber == 0 || upTo == 0;
		if
		:: P.is.token != 0 && (token == 0 || token == P.is.token) -> P.step = READY
		:: P.is.token != 0 && token != 0 && token != P.is.token -> endTakeover(me)
		:: P.is.token == 0 && unconfirmed -> P.is.token = token; P.isNew = true; P.step = READY
		:: P.is.token == 0 && !unconfirmed && durableHolder == me -> giveToken(me); P.step = READY
		:: P.is.token == 0 && !unconfirmed && durableHolder != me -> endTakeover(me)
		fi }

	/* [internal/rows/rowstier.takeover.prepare]. */
	:: atomic { P.step == READY ->
		loadUndrained(me);
		if
		:: HAS_CHANGED || IS_WITHHELD || IS_ALIEN -> endTakeover(me) /* [internal/rows/rowstier.takeover.confirm] */
		:: !HAS_CHANGED && !IS_WITHHELD && LACKS_SOMETHING ->
			value = CHANGED_IN_DURABLE; lackRows(me);
			if
			:: epoch != P.claimed || number != P.found -> endTakeover(me) /* refused */
			:: else ->
				makeRestore(me, value);
				if
				:: P.found = number; finish(me, false)
				:: endTakeover(me) /* the answer is lost */
				fi
			fi;
			value = 0
		:: !HAS_CHANGED && LACKS_NOTHING && !IS_ALIEN -> completeState(me); finish(me, P.hasDurable)
		fi }
#else
	/* [internal/rows/rowstier.takeovers.takeOverDurable]. */
	:: d_step { P.step == CLAIMED && IS(READS_STATE, me) ->
		begin(me);
		readState(me); P.step = BEGUN;
		matches(TOKEN == state.token && IS_COMPLETE == state.complete) }
	:: d_step { P.step == BEGUN && IS(READS_DRAINED, me) ->
		readDrained(me);
		P.step = (P.is.token != 0 && token != 0 && token != P.is.token -> FAILED : ITS_OWN);
		matches(TO == upTo && TOKEN == token && IS_COMPLETE == !unconfirmed) }
	/* [internal/rows/rowstier.takeovers.claimDurable]. */
	:: atomic { P.step == ITS_OWN && IS(TAKES, me) ->
		durableHolder = me; P.theirNumber = durableNumber;
		expects(NUMBER == durableNumber);
		if
		:: SEEN -> P.hasDurable = true; P.step = TAKEN
		:: UNSEEN -> P.step = WITHOUT
		fi;
		follow() }
	:: d_step { P.step == TAKEN && IS(READS_STATE, me) ->
		readState(me); P.step = REREAD;
		matches(TOKEN == state.token && IS_COMPLETE == state.complete) }
	:: d_step { P.step == REREAD && IS(READS_DRAINED, me) ->
		readDrained(me);
		P.isEmpty = P.theirNumber == 0 || upTo == 0;
		if
		:: P.is.token != 0 -> P.step = (token == 0 || token == P.is.token -> READY : FAILED)
		:: P.is.token == 0 && unconfirmed -> P.is.token = token; P.isNew = true; P.step = READY
		:: P.is.token == 0 && !unconfirmed -> P.step = NO_TOKEN
		fi;
		matches(TO == upTo && TOKEN == token && IS_COMPLETE == !unconfirmed) }

	/* [internal/rows/rowstier.takeovers.giveTokens]. */
	:: atomic { P.step == NO_TOKEN && IS(GIVES, me) ->
		if
		:: durableHolder != me || durableNumber != P.theirNumber -> P.step = FAILED; expects(TOKEN == 0)
		:: else ->
			giveToken(me);
			expects(TOKEN == token && NUMBER == durableNumber);
			if
			:: SEEN -> P.step = READY
			:: UNSEEN -> P.step = FAILED
			fi
		fi;
		follow() }

	/* The durable store is away, so the record must be there. */
	:: d_step { (P.step == BEGUN || P.step == ITS_OWN || P.step == WITHOUT || P.step == TAKEN || P.step == REREAD) ->
		P.hasDurable = false; P.theirNumber = 0; P.theirUnconfirmed = false;
		P.step = (P.is.token != 0 -> READY : FAILED) }

	/* [internal/rows/rowstier.takeover.prepare], [internal/rows/rowstier.takeover.loadUndrained]. */
	:: d_step { P.step == READY && KNOWS_ALL(me) -> recordClaim(me); P.step = LOADED }
	:: d_step { P.step == READY && !KNOWS_ALL(me) && IS(LISTS, me) ->
		recordClaim(me);
		readDirtyRows(me);
		P.step = LISTED;
		follow() }
	:: d_step { P.step == LISTED && P.marks == 0 -> P.step = VALUED }
	:: d_step { P.step == LISTED && P.marks != 0 && IS(READS_ROW, me) ->
		readDirty(me); P.step = VALUED;
		matches(VALUE == row) }
	:: d_step { P.step == VALUED && P.former == 0 -> P.newest = P.found; P.step = LOADED }
	/* [internal/rows/rowstier.takeover.confirm]. */
	:: d_step { P.step == VALUED && P.former != 0 && IS(CONFIRMS, me) ->
		expects(OUTCOME == (epoch != P.claimed -> FENCED : (number != P.found -> LOST : MADE)));
		if
		:: HAS_CHANGED -> unload(me); P.step = FAILED
		:: else -> P.newest = P.found; P.step = LOADED
		fi;
		follow() }

	/* [internal/rows/rowstier.takeover.restore]. */
	:: d_step { P.step == LOADED && (IS_WITHHELD || IS_ALIEN) -> P.step = FAILED }
	:: d_step { P.step == LOADED && !IS_WITHHELD && LACKS_SOMETHING && P.hasDurable && !P.isNew &&
		IS(READS_CHANGED, me) ->
		value = CHANGED_IN_DURABLE; lackRows(me); P.changed = value; value = 0; P.step = LACKING;
		follow() }
	:: d_step { P.step == LOADED && !IS_WITHHELD && LACKS_SOMETHING && !(P.hasDurable && !P.isNew) ->
		value = 0; lackRows(me); P.changed = value; value = 0; P.step = LACKING }
	:: atomic { P.step == LACKING && IS(RESTORES, me) ->
		expects(EPOCH == P.claimed && AFTER == P.found && NUMBER == P.newest && VALUE == P.changed);
		expects(TOKEN == P.is.token && IS_COMPLETE == P.is.complete);
		if
		:: epoch != P.claimed || number != P.found -> P.step = FAILED; expects(OUTCOME_IS(FENCED) || OUTCOME_IS(LOST))
		:: else ->
			makeRestore(me, P.changed);
			expects(OUTCOME_IS(MADE));
			if
			:: P.found = P.newest; P.step = RESTORED
			:: P.step = FAILED /* the answer is lost */
			fi
		fi;
		follow() }
	:: atomic { P.step == RESTORED && IS(ENDED, me) ->
		expects(OUTCOME_IS(OWNS) && EPOCH == P.claimed && NUMBER == P.found);
		finish(me, false);
		follow() }
	:: atomic { P.step == LOADED && LACKS_NOTHING && !IS_ALIEN && IS(ENDED, me) ->
		expects(OUTCOME_IS(OWNS) && EPOCH == P.claimed && NUMBER == P.found);
		completeState(me);
		finish(me, P.hasDurable);
		follow() }

	/* The claim is refused, or fails. */
	:: d_step { P.step == OVERTAKEN && IS(ENDED, me) -> yield(me); matches(OUTCOME_IS(YIELDED)) }
	:: d_step { P.step != 0 && P.step != OVERTAKEN && P.step != RESTORED && (P.step != LOADED || LACKS_SOMETHING) &&
		IS(ENDED, me) ->
		if
		:: P.step == CLAIMED -> begin(me)
		:: P.step == READY && !KNOWS_ALL(me) -> recordClaim(me)
		:: P.step == LISTED || P.step == VALUED -> unload(me)
		:: else
		fi;
		endTakeover(me);
		matches(OUTCOME_IS(FAILS)) }
#endif

	/* [counter/owner.Owner.makeTurn]: the row is in memory, or it is read in [internal/rows/rowstier.Store.Read]. */
#ifndef FINE
	:: atomic { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS ->
		if
		:: P.knows != UNKNOWN -> P.base = P.knows
		:: true -> P.base = (row != 0 || state.complete -> row : durableRow)
		fi;
		P.value = NEXT(P.base, P.mine);
		turn(me) }
#else
	:: d_step { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS && IS(READS, me) ->
		P.base = row;
		P.read = (row != 0 || state.complete -> WHOLE_READ : HALF_READ);
		matches(VALUE == row && IS_COMPLETE == state.complete) }
	:: d_step { P.read == HALF_READ && IS(READS_ON, me) ->
		P.base = durableRow; P.read = WHOLE_READ;
		matches(VALUE == durableRow) }
	:: atomic { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS && IS(COMMIT, me) &&
		(P.knows != UNKNOWN || P.read == WHOLE_READ) ->
		if
		:: P.knows != UNKNOWN -> P.base = P.knows
		:: P.read == WHOLE_READ
		fi;
		P.value = NEXT(P.base, P.mine);
		turn(me) }
#endif

	/* [counter/owner.Owner.verifyEach]: an empty commit. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS && IS(COMMIT, me) && IS_WORTH_IT ->
		P.base = 0; P.value = 0;
		turn(me) }

	/* [internal/rows/rowstier.Store.Commit]. */
#ifndef FINE
	:: atomic { P.commits && !P.refused && P.step == 0 ->
		if
		:: P.isRival -> P.refused = true /* [internal/rows/rowstier.partition.refuses] */
		:: else ->
			prepare(me);
			if
			:: epoch != P.mine || number != P.after && number != P.number -> P.refused = true
			:: else ->
				if
				:: number == P.after -> makeCommit(me)
				:: else
				fi;
				if
				:: P.isRepeated = true /* the answer is lost, and [counter/owner.Owner.insist] repeats the commit */
				:: acknowledge(me, !P.isRepeated, P.gone)
				fi
			fi
		fi }
#else
	:: atomic { P.commits && !P.refused && P.step == 0 && IS(COMMIT, me) ->
		expects(EPOCH == P.mine && AFTER == P.after && NUMBER == P.number);
		if
		:: P.isRival && OUTCOME_IS(HERE) -> P.refused = true; P.answer = 0
		:: MAY_PASS && OUTCOME_IS(NEVER) -> prepare(me); P.hasSent = P.stateChanged; P.goneSent = P.gone; P.answer = 0
		:: MAY_PASS && OUTCOME_IS(FENCED) && epoch != P.mine -> prepare(me); P.answer = FENCED
		:: !P.isRival && OUTCOME_IS(LOST) && epoch == P.mine && number != P.after && number != P.number -> prepare(me); P.answer = LOST
		:: !P.isRival && OUTCOME_IS(MADE) && epoch == P.mine && (number == P.after || number == P.number) ->
			prepare(me); P.hasSent = P.stateChanged; P.goneSent = P.gone; P.answer = MADE;
			value = (P.value != 0 -> P.value : (EVICTS_NOW -> EVICTED : 0));
			expects(VALUE == value);
			value = (P.stateChanged -> P.state.token : 0);
			expects(TOKEN == value);
			value = 0;
			expects(!P.stateChanged || IS_COMPLETE == P.state.complete);
			if
			:: number == P.after -> makeCommit(me)
			:: else
			fi
#ifdef TRACE
		:: else -> event[0] = OTHER
#endif
		fi;
		follow() }
	:: d_step { P.answer != 0 && P.step == 0 && IS(ANSWERED, me) ->
		if
		:: P.answer == FENCED || P.answer == LOST -> P.refused = true; P.answer = 0
		:: else -> acknowledge(me, P.hasSent && !P.isRepeated, P.goneSent)
		fi;
		follow() }
#ifndef TRACE
	:: d_step { P.answer != 0 && P.step == 0 -> P.answer = 0 } /* the answer is lost */
#endif
#endif

	/* [internal/rows/rowstier.Store.Evict] for [counter/owner.Owner.evictCold]. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.evicts && row != 0 && commits < COMMITS && IS(EVICTS, me) ->
		P.evicts = true; follow() }
#ifdef TRACE
	:: d_step { P.evicts && IS(EVICTS, me) -> follow() }
#endif

	/* [counter/owner.Owner.Release]. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.refused && !P.heals && claims < CLAIMS && IS(RELEASES, me) ->
		giveUp(me); follow() }

	/* The process ends, and another one begins. */
	:: d_step { (P.mine != 0 || P.epoch != 0) && claims < CLAIMS && IS(ENDS, me) ->
		giveUp(me); endTakeover(me); forget(me); follow() }
#ifdef TRACE
	:: d_step { P.mine == 0 && P.epoch == 0 && IS(ENDS, me) -> giveUp(me); endTakeover(me); forget(me); follow() }
#endif

	/* [internal/rows/rowstier.Store.claimDurable], for a drain. */
#ifndef FINE
	:: d_step { P.epoch != 0 && P.step == 0 && !P.isHeld && !P.isWaiting && (P.isDirty || P.isSending) ->
		if
		:: P.wasHeld && durableHolder != me ->
			forget(me); P.isRival = true /* [internal/rows/rowstier.Store.giveUp] */
		:: else ->
			durableHolder = me;
			if
			:: !P.wasHeld && IS_OVERTAKEN -> forget(me) /* [internal/rows/rowstier.Store.confirm] */
			:: else -> holdDurable(me, durableNumber)
			fi
		fi }
#else
	:: atomic { P.epoch != 0 && MAY_DRAIN && !P.isHeld && !P.isWaiting && (P.isDirty || P.isSending) &&
		!(P.wasHeld && durableHolder != me) && IS(HOLDS, me) ->
		durableHolder = me;
		expects(FORMER == P.wasHeld && EPOCH == 1 && NUMBER == durableNumber);
		P.confirms = false; P.taken = 0;
		if
		:: UNSEEN
		:: SEEN && P.wasHeld -> holdDurable(me, durableNumber)
		:: SEEN && !P.wasHeld -> P.confirms = true; P.taken = durableNumber
		fi;
		follow() }
	:: d_step { P.epoch != 0 && MAY_DRAIN && !P.isHeld && P.wasHeld && durableHolder != me && IS(HOLDS, me) ->
		matches(FORMER == 1 && EPOCH == 0) }

	/* [internal/rows/rowstier.Store.giveUp]. */
	:: d_step { P.epoch != 0 && MAY_DRAIN && !P.isHeld && P.wasHeld && durableHolder != me && (P.isDirty || P.isSending) &&
		IS(HAS_RIVAL, me) ->
		forget(me); P.isRival = true;
		follow() }

	/* [internal/rows/rowstier.Store.confirm]. */
	:: d_step { P.confirms && MAY_DRAIN && IS(CHECKS, me) ->
		expects(OUTCOME == (epoch != P.epoch -> FENCED : (number != P.newest -> LOST : MADE)));
		if
		:: !IS_OVERTAKEN -> holdDurable(me, P.taken)
		:: else
		fi;
		P.confirms = false; P.taken = 0;
		follow() }
	:: d_step { P.epoch != 0 && MAY_DRAIN && !P.isHeld && !P.wasHeld && epoch > P.epoch && holder != me && IS(YIELDS, me) ->
		forget(me); matches(EPOCH == 0) }
#endif

	/* [internal/rows/rowstier.partition.nextDrain]. */
#ifdef FINE
	:: d_step { P.isHeld && MAY_DRAIN && P.isSending && IS(SENDS, me) ->
		matches(VALUE == P.sending && TO == P.sendingUpTo) }
#endif
	:: d_step { P.isHeld && MAY_DRAIN && !P.isSending && (P.isDirty || P.unconfirmed && !P.stateChanged) && IS(SENDS, me) ->
		P.isSending = true; P.sending = P.dirty; P.sendingUpTo = P.newest;
		P.isDirty = false; P.dirty = 0;
		matches(VALUE == P.sending && TO == P.sendingUpTo) }

	/* [internal/rows/rowstier.Store.send]. */
#ifndef FINE
	:: atomic { P.isHeld && P.step == 0 && P.isSending ->
		if
		:: DURABLE_FENCED || durableNumber != P.durableNumber && durableNumber != P.durableNumber + 1 ->
			P.isHeld = false
		:: else ->
			if
			:: durableNumber == P.durableNumber -> makeDrain(me)
			:: else
			fi;
			if
			:: true /* the answer is lost */
			:: endDrain(me)
			fi
		fi }
#else
	:: d_step { P.isHeld && MAY_DRAIN && P.isSending && IS(DRAIN, me) ->
		expects(VALUE == P.sending && TO == P.sendingUpTo && NUMBER == P.durableNumber + 1);
		if
		:: DURABLE_FENCED -> P.theirAnswer = FENCED
		:: !DURABLE_FENCED && durableNumber != P.durableNumber && durableNumber != P.durableNumber + 1 ->
			P.theirAnswer = LOST
		:: !DURABLE_FENCED && durableNumber == P.durableNumber -> makeDrain(me); P.theirAnswer = MADE
		:: !DURABLE_FENCED && durableNumber == P.durableNumber + 1 -> P.theirAnswer = MADE
		fi;
		expects(OUTCOME_IS(P.theirAnswer) && (P.theirAnswer != MADE || TOKEN == token));
		follow() }
	:: d_step { P.theirAnswer != 0 && MAY_DRAIN && IS(DRAINED, me) ->
		if
		:: P.theirAnswer == MADE -> endDrain(me)
		:: else -> P.isHeld = false
		fi;
		P.theirAnswer = 0;
		follow() }
#endif
	od
}

#ifdef FINE
/* loseAnswer: what a process is about to acknowledge is lost. */
inline loseAnswer(me) { P.answer = (P.answer == MADE -> MADE_AND_LOST : P.answer) }
#endif

active proctype world() {
end:	do
#ifdef TRACE
	:: d_step { event[0] == BEGINNING -> follow() }
	:: d_step { event[0] == WHOLE -> assert(event[0] != WHOLE) }
#endif
	/* The fast store loses everything. No process takes itself for an owner that is none any more. */
	:: d_step { losses < LOSSES && epoch != 0 && IS_SURE(0) && IS_SURE(1) && IS_SURE(PROCESSES - 1) && COMES(LOSES) ->
		losses++;
		epoch = 0; holder = NOBODY; number = 0; row = 0; marks = 0;
		noState(state);
		isLost = acknowledged > MAX(row, durableRow);
#ifdef FINE
		loseAnswer(0); loseAnswer(1);
#if PROCESSES > 2
		loseAnswer(2);
#endif
#endif
		matches(true) }
	od
}
