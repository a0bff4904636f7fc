/*
 * Write-behind: the owner of a partition commits to a fast store (Redis), and drains to a durable one (PostgreSQL).
 * What becomes of acknowledged and of drained changes when the fast store loses its memory, rows are evicted from it,
 * the durable store is away, and the partition moves?
 *
 * Each action names its functions in brackets; a test holds that they exist.
 *
 * Sizes: two processes that own one partition in turn, one row, and the bounds below. A process may pause between any
 * two of its actions, end, and begin anew; a takeover has four steps. Answers of both stores get lost. The durable store
 * is away whenever it likes. The fast store loses everything once, at any moment.
 *
 * Proved by assertions: a change is judged on all that was acknowledged, as long as its owner lives or the change was
 * drained; unless the fast store has just lost something, one of the stores has whatever was acknowledged; versions grow,
 * so none has two values; the number up to which was drained does not go back, and neither does the row in the durable
 * store, but over what nobody acknowledged, or while the fast store says that a newer one is yet to be drained; only the
 * marks of what was drained are deleted.
 *
 * Left out: deletions, idempotency keys, the adoption of a fast store that was used alone, two fast stores, a fast store
 * that loses its newest commits alone, and a takeover without the durable store after a loss, see package rowstier. A commit
 * reaches the fast store in the moment in which it is prepared. As in the simulations, a takeover itself is not lost, no
 * process takes itself for an owner that was overtaken when the fast store loses everything, and the clock is past all
 * epochs when the store is back, see ownership.pml.
 *
 * Planted faults, each of which must be found: NO_UPTO, a drain takes the marks of newer commits for its own; NO_MARKS,
 * the next owner does not look at them; EVICTS_DIRTY; KEEPS_COMPLETE, a store goes on to call itself complete after an
 * eviction; LOSS_UNSEEN, the number of the store is not compared with the drained one; DURABLE_UNFENCED. Four were faults
 * of the product: UNACKNOWLEDGED, nobody drains a commit that lost its answer; LATE_CLAIM, a process that owns the
 * partition no more claims it in the durable store for the first time; HELD_ON, a process whose takeover has failed
 * claims the durable store again, and drains what it knew before; UNCONFIRMED, nobody looks whether the fast store has
 * lost something during a takeover.
 */
#ifndef CLAIMS
#define CLAIMS 3
#endif
#ifndef COMMITS
#define COMMITS 2
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#define PROCESSES 2
#define NOBODY 255
#define UNKNOWN 255
#define MAX(a, b) ((a) > (b) -> (a) : (b))

#ifdef DURABLE_UNFENCED
#define DURABLE_FENCED false
#else
#define DURABLE_FENCED (durableHolder != me || P.isOutdated)
#endif
#ifdef LOSS_UNSEEN
#define LOST_NOTHING_DRAINED true
#else
#define LOST_NOTHING_DRAINED !(P.hasDurable && P.found < P.theirUpTo)
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
#define NEXT(version, epoch) (MAX(epoch, (version) / 8) * 8 + (version) % 8 + 1)

/* Numbers of commits are also kept as bits. */
#define BIT(number) (1 << (number))
#define UPTO(number) ((2 << (number)) - 1)

/* What the fast store records about itself. Token 0: there is no record. */
typedef Record { bool complete; byte syncedTo; byte token }

/* The fast store. */
byte epoch;
byte holder = NOBODY;
byte number;
byte row;
short marks;       /* the commits whose names of changed rows it has */
Record state;

/* The durable store. */
byte durableHolder = NOBODY;  /* who made the newest claim of it; its epochs are not counted */
byte durableNumber;
byte durableRow, durableRowNumber;
byte upTo;         /* what was drained: everything up to this commit of the fast store */
byte token;        /* of the fast store that was drained last; 0: none was */
bool unconfirmed;  /* the fast store may not have that token yet */

/* What only the model knows. */
byte newest = NOBODY;  /* who made the newest claim */
byte claims, tokens, commits, losses;
byte top;              /* the greatest version that was ever in the fast store */
byte acknowledged;     /* the greatest version that must not be missing */
bool isLost;           /* the fast store has lost it, and its owner has not written it again */


typedef Process {
	/* The owner of counters. */
	byte mine; byte has;  /* its epoch, and the newest commit it knows of; 0: it owns nothing */
	byte knows = UNKNOWN; /* the row in its memory */
	bool commits;         /* a commit is under way: */
	byte after; byte value; byte base;  /* value 0: it changes nothing; base: what it was judged on */
	bool heals;           /* it writes again what the store may lack */
	bool isRepeated;
	bool refused;

	/* A takeover. */
	byte step;            /* 0: there is none */
	byte former; byte claimed; byte found;  /* the former epoch, the new one, and the number with it */
	Record is;
	bool hasDurable; byte theirNumber; byte theirUpTo; bool theirUnconfirmed; bool isEmpty;

	/* The tier's tenure. */
	byte epoch;           /* 0: there is none */
	bool isRival;         /* another process has claimed the durable store after this one */
	Record state; bool stateChanged;
	bool isDirty; byte dirty;
	bool isSending; byte sending; byte sendingUpTo;
	byte drained; bool unconfirmed;
	bool isHeld; bool wasHeld; bool isOutdated; bool isWaiting; byte durableNumber;  /* of its claim of the durable store */
	byte newest;
	short marks;          /* of commits that are not drained */
	short gone;           /* of commits that are, to be deleted in the fast store */
	bool evicts
}
Process processes[PROCESSES];

#define P processes[me]

/* A takeover that had to forget what it knew is no renewal. */
#define FORGOTTEN 254
#define IS_RENEWAL (P.former != 0 && P.former != FORGOTTEN)

hidden byte value, to;

inline copyState(to, from) {
	to.complete = from.complete; to.syncedTo = from.syncedTo; to.token = from.token
}

inline noState(one) { one.complete = false; one.syncedTo = 0; one.token = 0 }

/* endCommit: there is no commit under way. */
inline endCommit(me) {
	P.commits = false; P.after = 0; P.value = 0; P.base = 0; P.heals = false; P.isRepeated = false; P.refused = false
}

/* giveUp is [counter/owner.Owner.giveUp]. The tier does not learn of it. */
inline giveUp(me) {
	P.mine = 0; P.has = 0; P.knows = UNKNOWN;
	endCommit(me)
}

/* endTakeover: it has ended, or it has failed. */
inline endTakeover(me) {
	P.step = 0; P.former = 0; P.claimed = 0; P.found = 0;
	noState(P.is);
	P.hasDurable = false; P.theirNumber = 0; P.theirUpTo = 0; P.theirUnconfirmed = false; P.isEmpty = false
}

/* forget is [internal/rows/rowstier.partition.forgetLocked]. */
inline forget(me) {
	P.epoch = 0; P.isRival = false;
	noState(P.state);
	P.stateChanged = false;
	P.isDirty = false; P.dirty = 0; P.isSending = false; P.sending = 0; P.sendingUpTo = 0;
	P.drained = 0; P.unconfirmed = false;
	P.isHeld = false; P.wasHeld = false; P.isOutdated = false; P.isWaiting = false; P.durableNumber = 0;
	P.newest = 0; P.marks = 0; P.gone = 0; P.evicts = false
}

/* check: one of the stores has what was acknowledged, unless the fast one has just lost it. */
inline check() {
	isLost = isLost && acknowledged > MAX(row, durableRow);
	assert(isLost || acknowledged <= MAX(row, durableRow))
}

/* claim is [internal/rows.Ownership.Claim] in the fast store. */
inline claim(me) {
	if
	:: P.former != 0 && epoch > P.former && holder != me -> /* overtaken */
		endTakeover(me);
		giveUp(me);
		if
		:: P.isWaiting -> forget(me) /* [internal/rows/rowstier.partition.forgetFailedTakeover] */
		:: else
		fi
	:: else ->
		if
		:: P.former == 0 && isLost -> /* the former owner had no time to write it again */
			acknowledged = MAX(row, durableRow); isLost = false
		:: else
		fi;
		claims++;
		P.claimed = claims; epoch = claims; holder = me; newest = me;
		P.found = number;
		P.step = 1;
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
	P.theirUpTo = upTo; P.theirUnconfirmed = unconfirmed
}

/* holdDurable is [internal/rows/rowstier.partition.claimedDurableLocked]. What was being sent is sent again. */
inline holdDurable(me, atNumber) {
	P.isHeld = true; P.wasHeld = true; P.isOutdated = false; P.durableNumber = atNumber;
	P.state.syncedTo = atNumber
}

/* endHold is [internal/rows/rowstier.partition.beginTakeover]: the takeover claims the durable store from any process, so
 * a later claim that names the former one would not show that another process has held it since. */
inline endHold(me) {
#ifdef HELD_ON
	P.isOutdated = P.isHeld
#else
	if
	:: P.former == 0 -> forget(me)
	:: else -> P.isHeld = false; P.isWaiting = true
	fi
#endif
}

/* finish is [internal/rows/rowstier.takeover.finish], and then the claim's result for the owner:
 * [counter/owner.Owner.Own], [counter/owner.Owner.heal]. */
inline finish(me, changed) {
	copyState(P.state, P.is);
	P.stateChanged = changed;
	if
	:: P.hasDurable ->
		holdDurable(me, P.theirNumber);
		P.drained = P.theirUpTo; P.unconfirmed = P.theirUnconfirmed
	:: else
	fi;
	if
	:: P.former == 0 -> skip
	:: P.former != 0 && P.commits && P.found == P.after + 1 && P.found > P.has -> land(me)
	:: P.former != 0 && !(P.commits && P.found == P.after + 1 && P.found > P.has) -> endCommit(me)
	fi;
	P.mine = P.claimed;
	if
	:: P.has > P.found -> /* [counter/owner.partition.healing] */
		P.commits = true; P.heals = true; P.after = P.found; P.value = (P.knows == UNKNOWN -> 0 : P.knows)
	:: else -> P.has = P.found
	fi;
	endTakeover(me)
}

/* land is [counter/owner.Owner.land]: the caller is answered. */
inline land(me) {
	if
	:: P.value != 0 -> P.knows = P.value; acknowledged = MAX(acknowledged, P.value); check()
	:: else
	fi;
	P.has = P.after + 1;
	endCommit(me)
}

/* loadUndrained is [internal/rows/rowstier.takeover.loadUndrained], with
 * [internal/rows/rowstier.takeover.recordClaim] and [internal/rows/rowstier.takeover.readDirtyRows]. */
inline loadUndrained(me) {
	if
#ifdef UNACKNOWLEDGED
	:: P.former != 0 && P.epoch != 0 -> P.epoch = P.claimed
	:: P.former == 0 || P.epoch == 0 ->
#else
	:: P.former != 0 && P.epoch != 0 && P.found <= P.newest -> P.epoch = P.claimed /* it knows all */
	:: P.former == 0 || P.epoch == 0 || P.found > P.newest ->
#endif
		forget(me);
		P.epoch = P.claimed;
		P.former = (P.former != 0 -> FORGOTTEN : 0);
		P.newest = P.found;
#ifndef NO_MARKS
		P.gone = marks & UPTO(P.theirUpTo);
		P.marks = marks & ~UPTO(P.theirUpTo);
#endif
		/* [internal/rows/rowstier.takeover.values]: a row that is not there was drained and then evicted. */
		P.isDirty = P.marks != 0 && row != 0;
		P.dirty = (P.isDirty -> row : 0)
	fi;
	P.isWaiting = false
}

/* restore is [internal/rows/rowstier.takeover.restore], in one commit of the fast store:
 * [internal/rows/rowstier.takeover.changedInDurable], [internal/rows/rowstier.partition.addUndrained]. */
inline restore(me) {
	value = (P.hasDurable && P.is.token != 0 && durableRowNumber > P.is.syncedTo -> durableRow : 0);
	P.is.syncedTo = (P.hasDurable -> P.theirNumber : P.is.syncedTo);
	value = (P.isDirty -> P.dirty : (P.isSending && P.sending != 0 -> P.sending : value));
	to = MAX(MAX(P.theirUpTo, P.found + 1), P.newest);
	P.newest = to;
	P.gone = 0;
	P.marks = P.marks | (P.isDirty || P.isSending && P.sending != 0 -> BIT(to) : 0);
	if
	:: epoch != P.claimed || number != P.found -> endTakeover(me) /* refused: the claim fails */
	:: else ->
		row = (value != 0 -> value : row);
		marks = marks | (P.isDirty || P.isSending && P.sending != 0 -> BIT(to) : 0);
		copyState(state, P.is);
		number = to;
		check();
		if
		:: P.found = to; finish(me, false)
		:: endTakeover(me) /* the answer is lost: the claim fails */
		fi
	fi;
	value = 0; to = 0
}

/* hideState: a fast store that had no record is not complete. */
inline hideState(me) {
	if
	:: P.step == 4 -> P.is.complete = false
	:: else
	fi
}

/* makeCommit is the fast store's side: [internal/rows/rowstier.partition.prepare], [scripts/rows_commit.lua]. */
inline makeCommit(me) {
#ifdef EVICTS_DIRTY
	P.evicts = P.evicts;
#else
	P.evicts = P.evicts && !P.isDirty && !(P.isSending && P.sending != 0);
#endif
#ifndef KEEPS_COMPLETE
	if
	:: P.evicts && P.state.complete -> P.state.complete = false; P.stateChanged = true
	:: else
	fi;
#endif
	if
	:: P.value != 0 && !P.heals ->
		assert(P.base >= acknowledged);                           /* it was judged on all that must be there */
		assert(P.value > top || P.value == top && P.isRepeated);  /* no version is used twice */
		top = P.value
	:: else
	fi;
	row = (P.value != 0 -> P.value : (P.evicts -> 0 : row));
	marks = marks & ~P.gone | (P.value != 0 -> BIT(P.after + 1) : 0);
	if
	:: P.stateChanged -> copyState(state, P.state)
	:: else
	fi;
	number = P.after + 1;
	check()
}

/* acknowledge is [internal/rows/rowstier.partition.acknowledge]. */
inline acknowledge(me) {
	if
	:: P.value != 0 -> P.isDirty = true; P.dirty = P.value; P.marks = P.marks | BIT(P.after + 1)
	:: else
	fi;
	P.newest = P.after + 1;
	P.gone = 0;
	P.evicts = false;
	P.stateChanged = P.stateChanged && P.isRepeated;
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
#ifdef NO_UPTO
	P.gone = P.gone | P.marks; P.marks = 0;
#else
	P.gone = P.gone | (P.marks & UPTO(P.sendingUpTo)); P.marks = P.marks & ~UPTO(P.sendingUpTo);
#endif
	assert((P.gone & ~UPTO(upTo)) == 0); /* only the marks of what was drained are deleted */
	P.isSending = false; P.sending = 0; P.sendingUpTo = 0
}

active [PROCESSES] proctype process() {
	byte me = _pid;

end:	do
	/* [counter/owner.Owner.Own]; the processes differ in nothing, so the first one begins. Every takeover begins with
	 * [internal/rows/rowstier.Store.Claim]. */
	:: d_step { P.mine == 0 && P.step == 0 && claims < CLAIMS && (me == 0 || claims > 0) ->
		P.former = 0; claim(me) }

	/* A claim of before arrives late, when the process owns the partition. */
	:: d_step { P.mine != 0 && P.mine == epoch && holder == me && P.step == 0 && claims < CLAIMS ->
		claims++; epoch = claims }

	/* [counter/owner.Owner.heal]: the store has refused a commit. */
	:: d_step { P.refused && P.step == 0 && (claims < CLAIMS || epoch > P.mine && holder != me) ->
		P.refused = false; P.former = P.mine; claim(me) }

	/* [internal/rows/rowstier.takeovers.takeOverDurable], [internal/rows/rowstier.takeovers.claimDurable]. */
	:: d_step { P.step == 1 && (state.token == 0 || token == 0 || token == state.token) ->
		readState(me);
		durableHolder = me; endHold(me);
		P.theirNumber = durableNumber;
		P.hasDurable = true;
		P.step = 2 }

	/* The durable store is away, so the record must be there. */
	:: d_step { P.step == 1 && state.token != 0 && losses == 0 ->
		readState(me); P.step = 3 }

	/* The claim fails. */
	:: d_step { P.step >= 2 -> endTakeover(me) }

	/* Both are read again, and [internal/rows/rowstier.takeovers.giveTokens] comes. */
	:: d_step { P.step == 2 ->
		readState(me);
		readDrained(me);
		P.isEmpty = P.theirNumber == 0 || upTo == 0;
		if
		:: P.is.token != 0 && (token == 0 || token == P.is.token) -> P.step = 3
		:: P.is.token != 0 && token != 0 && token != P.is.token -> endTakeover(me)
		:: P.is.token == 0 && unconfirmed -> P.is.token = token; P.step = 4
		:: P.is.token == 0 && !unconfirmed && durableHolder == me ->
			/* [internal/rows/rowstier.takeover.newToken] */
			tokens++;
			token = tokens; unconfirmed = true; durableNumber++;
			P.is.token = tokens; P.theirUnconfirmed = true; P.theirNumber = durableNumber;
			P.step = 4
		:: P.is.token == 0 && !unconfirmed && durableHolder != me -> endTakeover(me)
		fi }

	/* [internal/rows/rowstier.takeover.prepare], [internal/rows/rowstier.takeover.fastLostData]. In step 4 the fast
	 * store has no record. */
	:: atomic { P.step >= 3 ->
		loadUndrained(me);
		if
		:: HAS_CHANGED -> endTakeover(me) /* [internal/rows/rowstier.takeover.confirm] */
#ifndef LOSS_UNSEEN
		:: !HAS_CHANGED && P.hasDurable && P.found < P.theirUpTo -> hideState(me); restore(me)
#endif
		:: !HAS_CHANGED && LOST_NOTHING_DRAINED && IS_RENEWAL && P.found < P.newest ->
			if
			:: !P.hasDurable && P.found < P.drained -> endTakeover(me)
			:: else -> hideState(me); restore(me)
			fi
		:: !HAS_CHANGED && LOST_NOTHING_DRAINED && !(IS_RENEWAL && P.found < P.newest) ->
			if
			:: P.step == 4 && !P.isEmpty && P.found > 0 -> endTakeover(me) /* ErrBoth */
			:: else ->
				P.is.complete = P.is.complete || P.step == 4 && P.isEmpty;
				P.is.syncedTo = (P.hasDurable -> P.theirNumber : P.is.syncedTo);
				finish(me, P.hasDurable)
			fi
		fi }

	/* [counter/owner.Owner.makeTurn]: the row is in memory, or it is read in [internal/rows/rowstier.Store.Read]. */
	:: atomic { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS ->
		commits++;
		if
		:: P.knows != UNKNOWN -> P.base = P.knows
		:: true -> P.base = (row != 0 || state.complete -> row : durableRow)
		fi;
		P.commits = true; P.after = P.has; P.value = NEXT(P.base, P.mine) }

	/* [counter/owner.Owner.verifyEach]: an empty commit. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.commits && commits < COMMITS &&
		(P.evicts || P.gone != 0 || P.stateChanged || epoch != P.mine || number != P.has || P.isRival) ->
		commits++;
		P.commits = true; P.after = P.has }

	/* [internal/rows/rowstier.Store.Commit]. */
	:: atomic { P.commits && !P.refused && P.step == 0 ->
		if
		:: P.isRival || epoch != P.mine || number != P.after && number != P.after + 1 ->
			P.refused = true /* [internal/rows/rowstier.partition.refuses], or [scripts/rows_commit.lua] */
		:: else ->
			if
			:: number == P.after -> makeCommit(me)
			:: else
			fi;
			if
			:: P.isRepeated = true /* the answer is lost, and [counter/owner.Owner.insist] repeats the commit */
			:: acknowledge(me)
			fi
		fi }

	/* [internal/rows/rowstier.Store.Evict] for [counter/owner.Owner.evictCold]. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.evicts && row != 0 && commits < COMMITS -> P.evicts = true }

	/* [counter/owner.Owner.Release]. */
	:: d_step { P.mine != 0 && P.step == 0 && !P.refused && !P.heals && claims < CLAIMS -> giveUp(me) }

	/* The process ends, and another one begins. */
	:: d_step { (P.mine != 0 || P.epoch != 0) && claims < CLAIMS -> giveUp(me); endTakeover(me); forget(me) }

	/* [internal/rows/rowstier.Store.claimDurable], for a drain. */
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

	/* [internal/rows/rowstier.partition.nextDrain]. */
	:: d_step { P.isHeld && P.step == 0 && !P.isSending && (P.isDirty || P.unconfirmed && !P.stateChanged) ->
		P.isSending = true; P.sending = P.dirty; P.sendingUpTo = P.newest;
		P.isDirty = false; P.dirty = 0 }

	/* [internal/rows/rowstier.Store.send]. */
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
	od
}

active proctype world() {
end:	do
	/* The fast store loses everything. No process takes itself for an owner that is none any more. */
	:: d_step { losses < LOSSES && epoch != 0 &&
		(processes[0].mine == 0 && processes[0].step == 0 || newest == 0) &&
		(processes[1].mine == 0 && processes[1].step == 0 || newest == 1) ->
		losses++;
		epoch = 0; holder = NOBODY; number = 0; row = 0; marks = 0;
		noState(state)
		isLost = acknowledged > MAX(row, durableRow) }
	od
}
