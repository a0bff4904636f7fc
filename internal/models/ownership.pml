/*
 * Who owns a partition: claims, pauses, and a clock of the store that goes back.
 *
 * Without -DPRESENCE this is a partition of counters: the rules of rows.Ownership, which rows_claim.lua and
 * rows_commit.lua repeat in Redis, and the owner's side of them. With -DPRESENCE it is a partition of presence and one
 * bucket of counts: claim.lua, fence.lua, members.lua, counts.lua and their callers. The nearest public specification is
 * that of CockroachDB's StoreLiveness. Each action names its functions in brackets; a test holds that they exist.
 *
 * Sizes: the processes and bounds below. The clock may be set to any time at any moment. A process may pause between any
 * two of its actions. Messages to the store arrive late, twice or never, and their answers get lost. With -DLOSS the
 * store once loses its tail, back to some moment since the last takeover from a process that had not ended. As in the
 * simulations, that takeover itself is not lost, and the clock is past all epochs when the store is back.
 *
 * Proved by assertions: no epoch is granted twice, and epochs grow; an owner that commits has made the newest claim, and
 * has judged on the newest rows; an owner that was replaced does not take the partition back; in a bucket no count of an
 * older owner follows one of a newer owner; late messages of a claim change nothing.
 *
 * Left out: what rows contain (a version stands for all of them), the reading of rows after a claim, generations of
 * Redis, and who should own what (any process claims at any time).
 *
 * With -DTRACE -DLOSS it follows a trace of the simulation of counters, see trace.h and counter/call/traces_test.go.
 *
 * Planted faults, each of which must be found: NO_FENCE, CLOCK_ALONE, TAKES_BACK; of presence CLOCK_ALONE, NO_NUMBERS,
 * FENCE_FALLS. Two more are known limits of the product, which the checker must find as well. BACK_AND_LOST: if the store
 * loses a claim, and its clock is behind that claim until the next one, an epoch is granted twice. LATE_AND_AGAIN: the
 * claim of a process arrives so late that it takes the partition from the next owner. If the process then claims again,
 * after a loss of Redis and before it has written anything, it goes on with outdated members.
 */
#ifdef PRESENCE
#define PROCESSES 2
#ifdef LATE_AND_AGAIN
#define CLAIMS 4
#else
#define CLAIMS 3
#endif
#define ASKED 3   /* claims that one process asks for */
#define COMMITS 2
#define CLOCK 2
#elif defined(TRACE)
#define PROCESSES 16
#define CLAIMS 30000
#define COMMITS 30000
#define LATES 12
#define LOSSES 12
#elif defined(LOSS)
#define PROCESSES 2
#define CLAIMS 4
#define COMMITS 3
#define CLOCK 2
#else
#define PROCESSES 3
#define CLAIMS 4
#define COMMITS 3
#define CLOCK 3
#endif
#ifndef TRACE
#define LATES 1   /* copies of commits that are on their way at once */
#define LOSSES 1
#endif
#ifdef LOSS
#define MAY_BE_LATE true
#else
#define MAY_BE_LATE (c.changes && !c.heals) /* any other commit would only make the number greater */
#endif
#define NOBODY 255
#define MAX(a, b) ((a) > (b) -> (a) : (b))

#include "trace.h"

/* The store. */
short clock = 1;
short epoch;
byte holder = NOBODY;
short number;
short version;        /* stands for all rows: every change adds one to it */

/* What only the model knows. */
short top;            /* the greatest epoch that was ever granted */
byte newest = NOBODY; /* who made the newest claim */
short claims, commits;

/* setClock: the clock of the store is set, as by a failover to another server; processes go by no other clock. It is
 * that of redis.call('TIME') in [scripts/rows_claim.lua], and of [internal/rows/rowspg.transaction.queueHold]. */
inline setClock() {
	clock = clock % CLOCK + 1
}

inline grant(who, former, granted) {
#ifdef CLOCK_ALONE
	granted = clock;
#else
	granted = MAX(clock, MAX(epoch, former) + 1);
#endif
	assert(granted > top);                 /* no epoch is granted twice, and epochs grow */
	assert(former == 0 || newest == who);  /* an owner that was replaced does not take the partition back */
	top = granted;
	epoch = granted;
	holder = who;
	newest = who;
	claims++
}

#ifndef PRESENCE

/* The events of a trace, and what they say beside their process. Epochs are numbered in their order. */
#define CLAIM 1   /* a claim has reached the store: FORMER, EPOCH, NUMBER, and whether the answer was SEEN */
#define COMMIT 2  /* a commit has reached it: EPOCH, AFTER, NUMBER, WRITES, OUTCOME, SEEN */
#define COPY 3    /* a copy of a commit will arrive late, the one with the number SLOT */
#define LATE 4    /* a late copy arrives: EPOCH, AFTER, NUMBER, OUTCOME */
#define KEEP 5    /* the loss with the number SLOT takes everything from here on */
#define LOSE 6    /* the store loses its tail, back to EPOCH and NUMBER */
#define END 7     /* a process has ended */

#ifdef TRACE
#define FORMER event[2]
#define EPOCH event[3]
#define AFTER event[4]
#define NUMBER event[5]
#define WRITES event[6]
#define OUTCOME event[7]
#define SEEN (event[8] == 1)
#define UNSEEN (event[8] == 0)
#define SLOT event[9]
#else
#define SEEN true
#define UNSEEN true
#define SLOT 0
#endif

#ifdef LOSS
/* What the store may go back to. */
typedef Kept { short epoch; short number; short version }
Kept kept[LOSSES];
byte losses;
bool owns[PROCESSES];
hidden byte isTakeover;

/* keep: everything from here on is a tail that the store may lose. */
inline keep(at) {
	kept[at].epoch = epoch; kept[at].number = number; kept[at].version = version
}
#endif
hidden byte i;

/* claim is the store's side: [internal/rows.Ownership.Claim], [scripts/rows_claim.lua]. A granted epoch is 0 if another
 * process has claimed the partition since the former claim. */
inline claim(who, former, granted) {
	if
#ifndef TAKES_BACK
	:: former != 0 && epoch > former && holder != who ->
		granted = 0
	:: else ->
#else
	:: true ->
#endif
#ifdef LOSS
		/* No process believes that it is the owner after the loss of a takeover from a process that has ended. */
		isTakeover = (holder == NOBODY -> true : holder != who && owns[holder]);
#endif
		grant(who, former, granted);
#ifdef LOSS
		i = losses;
		do
		:: isTakeover && i < LOSSES -> keep(i); i++
		:: else -> break
		od;
		i = 0; isTakeover = false
#endif
	fi
}

/* A commit on its way: each process has one, which it repeats until it knows the outcome. Copies may arrive late. Unused
 * fields are 0, so that states which differ only in them are the same. */
typedef Commit { short epoch; short after; short number; short version; bool changes; bool heals }
Commit late[LATES];
byte lateBy[LATES];

inline forget(c) {
	c.epoch = 0; c.after = 0; c.number = 0; c.version = 0; c.changes = false; c.heals = false
}

mtype = { made, fenced, lost };

/* decide is the store's side of a commit: [internal/rows.Ownership.Refuses], [internal/rows.Ownership.Has],
 * [scripts/rows_commit.lua]. A healing commit writes what its owner remembers. */
inline decide(who, c, outcome) {
	if
#ifndef NO_FENCE
	:: c.epoch != epoch -> outcome = fenced
	:: c.epoch == epoch && c.number == number -> outcome = made
	:: c.epoch == epoch && c.number != number && c.after != number -> outcome = lost
	:: c.epoch == epoch && c.number != number && c.after == number ->
#else
	:: c.number == number -> outcome = made
	:: c.number != number && c.after != number -> outcome = lost
	:: c.number != number && c.after == number ->
#endif
		assert(newest == who);                  /* the fence */
		assert(c.heals || version == c.version);  /* it was judged on the newest rows */
		number = c.number;
		version = c.version + c.changes;
		outcome = made
	fi
}

/* part: a healing owner writes what the store lacks in one commit or in several, up to any number. The value of the
 * model's only row is in the last of them. */
inline part() {
	c.number = c.after + 1;
	do
	:: c.number <= has -> c.number++
	:: break
	od;
	c.version = (c.number <= has -> version : knows)
}

/* giveUp is [counter/owner.Owner.giveUp]. */
inline giveUp() {
	mine = 0; has = 0; knows = 0; refused = false;
	forget(c);
	own(false)
}

inline own(is) {
#ifdef LOSS
	owns[_pid] = is
#else
	skip
#endif
}

active [PROCESSES] proctype owner() {
	short mine, has, knows;  /* its epoch; the number and the version of its memory */
	Commit c;               /* c.epoch is 0: there is none */
	bool refused;           /* the store has refused c, so the partition must be claimed again */
	short granted;
	mtype outcome;

end:	do
	/* [counter/owner.Owner.Own]: from whoever owns it now. */
	:: d_step { mine == 0 && claims < CLAIMS && IS(CLAIM, _pid) ->
		claim(_pid, 0, mine); has = number; knows = version;
		own(true);
		matches(SEEN && FORMER == 0 && EPOCH == mine && NUMBER == has) }

	/* The same, but the answer is lost or the message arrives late: the store alone knows of the claim. */
	:: d_step { claims < CLAIMS && IS(CLAIM, _pid) ->
		claim(_pid, 0, granted);
		matches(UNSEEN && FORMER == 0 && EPOCH == granted);
		granted = 0 }

	/* [counter/owner.Owner.makeTurn], [counter/owner.draft.commit]: a commit with changes, or an empty one of
	 * [counter/owner.Owner.verifyEach]. If the store is full or remembers a key, nothing was written, and there is none. */
	:: atomic { mine != 0 && c.epoch == 0 && commits < COMMITS && (IS(COMMIT, _pid) || IS(COPY, _pid)) ->
		commits++;
		c.epoch = mine; c.after = has; c.number = has + 1; c.version = knows;
		if
		:: c.changes = true
		:: c.changes = false
		fi }

	/* A copy of it will arrive late. */
	:: d_step { c.epoch != 0 && MAY_BE_LATE && late[SLOT].epoch == 0 && IS(COPY, _pid) ->
		lateBy[SLOT] = _pid;
		late[SLOT].epoch = c.epoch; late[SLOT].after = c.after; late[SLOT].number = c.number;
		late[SLOT].version = c.version; late[SLOT].changes = c.changes; late[SLOT].heals = c.heals;
		matches(EPOCH == c.epoch && AFTER == c.after && NUMBER == c.number && (c.heals || WRITES == c.changes)) }

	/* [counter/owner.Owner.write]: it arrives. If the answer is lost, [counter/owner.Owner.insist] repeats it. */
	:: atomic { c.epoch != 0 && !refused && IS(COMMIT, _pid) ->
		decide(_pid, c, outcome);
		expects(EPOCH == c.epoch && AFTER == c.after && NUMBER == c.number && (c.heals || WRITES == c.changes));
		expects(OUTCOME == outcome);
		if
		:: UNSEEN
		:: SEEN && outcome == made && c.heals && c.number <= has -> /* [counter/owner.Owner.commitAll]: the next one */
			c.after = c.number;
			part()
		:: SEEN && outcome == made && !(c.heals && c.number <= has) ->
			/* [counter/owner.Owner.handleOutcome], [counter/owner.Owner.land] */
			has = c.number; knows = c.version + c.changes; forget(c)
		:: SEEN && outcome != made -> refused = true
		fi;
		outcome = 0;
		follow() }

	/* [counter/owner.Owner.heal]: claims again, and [counter/owner.partition.healing] writes what the store may lack. */
	:: atomic { refused && claims < CLAIMS && IS(CLAIM, _pid) ->
		refused = false;
		claim(_pid, mine, granted);
		expects(FORMER == mine && EPOCH == granted && (UNSEEN || granted == 0 || NUMBER == number));
		if
		:: UNSEEN /* the answer is lost, and [counter/owner.Owner.doubt] repeats c */
		:: SEEN && granted == 0 -> giveUp()
		:: SEEN && granted != 0 ->
			mine = granted;
			if
			:: number == c.number && number > has -> has = number; knows = c.version + c.changes
			:: else
			fi;
			c.epoch = mine; c.after = number; c.changes = false; c.heals = true;
			part()
		fi;
		granted = 0;
		follow() }

	/* The same, but the claim does not reach the store. */
	:: d_step { refused -> refused = false }

	/* [counter/owner.Owner.Release]: the next owner asks for it. Or the process ends, see [counter/owner.Owner.Close]. */
	:: d_step { IS(END, _pid) -> giveUp(); matches(true) }
	od
}

active proctype world() {
	mtype outcome;

end:	do
#ifdef TRACE
	:: d_step { event[0] == BEGINNING -> follow() }
	:: d_step { event[0] == WHOLE -> assert(event[0] != WHOLE) }
#endif
#ifndef LOSS
	:: d_step { claims > 0 -> setClock() }
#else
	:: d_step { SLOT >= losses && SLOT < LOSSES && COMES(KEEP) -> keep(SLOT); matches(true) }
	:: d_step { losses < LOSSES && (kept[losses].epoch != epoch || kept[losses].number != number) && COMES(LOSE) ->
		epoch = kept[losses].epoch; number = kept[losses].number; version = kept[losses].version;
		kept[losses].epoch = 0; kept[losses].number = 0; kept[losses].version = 0;
		losses++;
		i = 0;
		do
		:: i < LATES -> forget(late[i]); lateBy[i] = 0; i++
		:: else -> break
		od;
		i = 0;
#ifndef BACK_AND_LOST
		clock = top + 1;
#endif
		matches(EPOCH == epoch && NUMBER == number) }
#endif
	:: d_step { late[SLOT].epoch != 0 && COMES(LATE) ->
		decide(lateBy[SLOT], late[SLOT], outcome);
		expects(EPOCH == late[SLOT].epoch && AFTER == late[SLOT].after && NUMBER == late[SLOT].number);
		forget(late[SLOT]); lateBy[SLOT] = 0;
		matches(OUTCOME == outcome);
		outcome = 0 }
	od
}

#else

/* A bucket of counts. */
byte fence;           /* the epoch of the partition in [scripts/fences.lua] */
byte count;           /* the version of the members that the count is of */
byte lastRun[PROCESSES];  /* the number of the last run of counts.lua of each process */

byte claimNumber;     /* of the newest claim among those of its process */

/* Messages that arrive late: a claim, a fence and a count. */
byte lateClaim, lateClaimFormer, lateClaimBy = NOBODY;
byte lateFence;
byte lateCount, lateCountEpoch, lateCountRun, lateCountBy = NOBODY;

bool strayed[PROCESSES]; /* a late claim of the process took the partition from another one */

#define OVERDUE 254   /* the answer to a late claim: the process has claimed the partition again since */

/* claim is [scripts/claim.lua]. */
inline claim(who, former, claimed, granted) {
	if
#ifndef NO_NUMBERS
	:: epoch != 0 && holder == who && claimNumber == claimed -> granted = epoch
	:: epoch != 0 && holder == who && claimNumber > claimed -> granted = OVERDUE
	:: epoch != 0 && holder != who && former != 0 && epoch > former -> granted = 0
	:: else ->
#else
	:: epoch != 0 && holder != who && former != 0 && epoch > former -> granted = 0
	:: else ->
#endif
		assert(holder != who || claimed > claimNumber); /* a late claim of the owner changes nothing */
		grant(who, former, granted);
		claimNumber = claimed
	fi
}

/* raise is [scripts/fence.lua]. */
inline raise(to) {
	if
#ifdef FENCE_FALLS
	:: true -> fence = to
#else
	:: fence < to -> fence = to
	:: else
#endif
	fi
}

/* write is [scripts/counts.lua]. */
inline write(who, under, runs, is, written) {
	if
	:: runs > lastRun[who] && fence == under ->
		assert(is >= count); /* counts do not go back: none of an older owner follows one of a newer owner */
		count = is;
		lastRun[who] = runs;
		written = true
	:: else -> written = false
	fi
}

active [PROCESSES] proctype node() {
	short mine;    /* the epoch of its claim */
	byte asked;    /* the number of its claims */
	byte knows;    /* the version of the members in its memory */
	byte runs;     /* the number of its runs of counts.lua */
	bool unfenced; /* the claim is granted, and the bucket does not know it yet */
	bool unloaded; /* the members are not read yet */
	bool uncounted;
	byte granted;
	bool written;

end:	do
	/* [presence/presenceredis.Store.Claim] for [presence/node.manager.startGroup]. The answer may be lost, and the
	 * message may arrive again later. */
	:: atomic { mine == 0 && claims < CLAIMS && asked < ASKED ->
		asked++;
		if
		:: lateClaimBy == NOBODY -> lateClaim = asked; lateClaimBy = _pid
		:: true
		fi;
		if
		:: true -> skip /* it is lost */
		:: true -> claim(_pid, 0, asked, granted);
			if
			:: true -> mine = granted; unfenced = true; unloaded = true
			:: true /* the answer is lost */
			fi
		fi;
		granted = 0 }

	/* The same for [presence/node.manager.reclaimGroup]: it names the former claim. */
	:: atomic { mine != 0 &&
#ifndef LATE_AND_AGAIN
		!strayed[_pid] &&
#endif
		 !unfenced && !unloaded && claims < CLAIMS && asked < ASKED ->
		asked++;
		claim(_pid, mine, asked, granted);
		if
		:: granted == 0 -> mine = 0; knows = 0; uncounted = false; strayed[_pid] = false
		:: granted != 0 -> mine = granted; unfenced = true
		fi;
		granted = 0 }

	/* [presence/presenceredis.Store.fence]; the message may arrive again later. */
	:: atomic { unfenced ->
		raise(mine);
		unfenced = false;
		if
		:: lateFence == 0 -> lateFence = mine
		:: true
		fi }

	/* [presence/presenceredis.Store.Load], [scripts/load.lua]: a newer owner fences it. */
	:: d_step { !unfenced && unloaded ->
		if
		:: epoch == mine -> knows = version; uncounted = true
		:: else -> mine = 0; strayed[_pid] = false
		fi;
		unloaded = false }

	/* [presence/node.outbox.take], [presence/presenceredis.Store.Write], [scripts/members.lua]: members come first. */
	:: d_step { mine != 0 && !unfenced && !unloaded && commits < COMMITS ->
		commits++;
		if
		:: epoch == mine ->
			assert(newest == _pid && version == knows);
			version++; knows = version; uncounted = true
		:: else -> mine = 0; knows = 0; uncounted = false; strayed[_pid] = false /* [presence/node.Node.outcomes] */
		fi }

	/* Then counts, in a numbered run of [scripts/counts.lua], of which a copy may arrive late. */
	:: atomic { mine != 0 && !unfenced && !unloaded && uncounted ->
		runs++;
		if
		:: lateCountBy == NOBODY ->
			lateCountBy = _pid; lateCount = knows; lateCountEpoch = mine; lateCountRun = runs
		:: true
		fi;
		write(_pid, mine, runs, knows, written);
		if
		:: written -> uncounted = false
		:: !written -> mine = 0; knows = 0; uncounted = false; strayed[_pid] = false
		fi;
		written = false }
	od
}

active proctype world() {
	byte granted;
	bool written;

end:	do
	:: d_step { claims > 0 -> setClock() }
	:: d_step { lateClaimBy != NOBODY && claims < CLAIMS ->
		strayed[lateClaimBy] = holder != lateClaimBy;
		claim(lateClaimBy, 0, lateClaim, granted);
		lateClaim = 0; lateClaimBy = NOBODY; granted = 0 }
	:: d_step { lateFence != 0 -> raise(lateFence); lateFence = 0 }
	:: d_step { lateCountBy != NOBODY ->
		write(lateCountBy, lateCountEpoch, lateCountRun, lateCount, written);
		lateCount = 0; lateCountEpoch = 0; lateCountRun = 0; lateCountBy = NOBODY; written = false }
	od
}

#endif
