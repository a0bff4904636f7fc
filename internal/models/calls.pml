/*
 * An owner's numbered streams: gateways send calls in streams, calls and answers get lost, are repeated and arrive late,
 * and the partition moves meanwhile. Is each change counted once?
 *
 * Each action names its functions in brackets; a test holds that they exist.
 *
 * Sizes: two gateways with a stream and a change each, or with -DMERGED one gateway with the changes of two callers, which
 * go together in one call or apart, and may be refused; two processes that own one partition in turn; and the bounds
 * below. A process may pause between any two of its actions.
 * Calls, answers and commits arrive late, twice or never. The store is full now and then; it loses nothing, which is the
 * matter of ownership.pml and behind.pml.
 *
 * Proved by assertions: no change is counted twice; what is acknowledged is in the store, and stays; what is refused, or
 * told not to be made, never counts; a row never takes a change back. A row's version is the number of its changes, so
 * no version has two values.
 *
 * Left out: idempotency keys, which the same commit writes as it does the rows of streams; more than one row of
 * counters; streams that are forgotten an hour after their last call.
 *
 * With -DTRACE -DMERGED it follows a trace of the simulation of counters, see trace.h and counter/call/traces_test.go. The
 * first gateway is then one stream of the simulation, whose calls have one change each. The calls of other streams are
 * commits without any.
 *
 * Planted faults, each of which must be found: NO_FENCE; NEW_NUMBER, a repeated call gets a new number; EARLY, a call is
 * answered before the commit; APART, the row of the stream is not in the commit of the changes; JUDGED_AGAIN, a
 * repetition is. Four were faults of the product: REFUSAL_FORGOTTEN, the refusal of a repeated call is not stored;
 * FULL_ENDS, a full store ends the doubt about a commit; DRAFT_REUSED, the commit of a partition that was given up in
 * doubt is repeated without its changes; MADE_UNSEEN, an owner that claims again takes a commit that was made for one that
 * was not.
 */
#define GATEWAYS 2
#ifdef TRACE
#define OWNERS 16
#define CLAIMS 30000
#define COMMITS 30000
#define LATES 12
#define WORD short
#define SET int
#define TRACED true
#else
#define OWNERS 2
#define LATES 1 /* copies of commits that are on their way at once */
#define WORD byte
#define SET byte
#define TRACED false
#endif
#ifndef CLAIMS
#define CLAIMS 3
#endif
#ifndef COMMITS
#define COMMITS 2
#endif
#ifdef MERGED
#define CALLERS 3
#define IS_MERGED true
#else
#define CALLERS 1 /* a set of callers, a bit for each */
#define IS_MERGED false
#endif
#ifdef FULL_ENDS
#define FULL_IS_FINAL true
#else
#define FULL_IS_FINAL false
#endif
#ifdef NO_FENCE
#define IS_FENCED(one) false
#else
#define IS_FENCED(one) (one.epoch != epoch)
#endif
#define NOBODY 255
#define NO_ROW 255
#define MAX(a, b) ((a) > (b) -> (a) : (b))

/* A call is a number, one or two changes of its gateway, which are bits, and whether it is a repetition. 0: none. */
#define CALL(number, ops, repeated) ((number) * 8 + (ops) * 2 + (repeated))
#define NUMBER(call) ((call) / 8)
#define OPS(call) (((call) / 2) % 4)
#define REPEATED(call) ((call) % 2)
#ifdef TRACE
#define CHANGES(g, ops, number) (1 << (number)) /* of one gateway, whose calls have one change each */
#else
#define CHANGES(g, ops, number) ((ops) << (2 * (g)))
#endif

#include "trace.h"

/* The events of a trace, and what they say beside their process or gateway. Epochs are numbered in their order. */
#define CLAIM 1   /* a claim has reached the store: FORMER, EPOCH, NUMBER, and whether the answer was SEEN */
#define COMMIT 2  /* a commit has reached it: EPOCH, AFTER, LAST, OUTCOME, SEEN */
#define COPY 3    /* a copy of a commit will arrive late, the one with the number SLOT */
#define LATE 4    /* a late copy arrives: EPOCH, AFTER, LAST, OUTCOME */
#define END 7     /* a process has ended */
#define SEND 8    /* a gateway sends a call: NUMBER, IS_AGAIN */
#define TOLD 9    /* a gateway is told the answer to a call: NUMBER, IS_AGAIN, OUTCOME */
#define LEAVE 10  /* callers have left: in the simulation only with their gateway, whose stream ends */

/* The answers to a gateway. */
#define MADE 1
#define REFUSED 2
#define BUSY 3
#define SAID(number, answer) ((number) * 4 + (answer))

#ifdef TRACE
#define FORMER event[2]
#define EPOCH event[3]
#define AFTER event[4]
#define TOLD_NUMBER event[5]
#define IS_AGAIN event[6]
#define OUTCOME event[7]
#define SEEN (event[8] == 1)
#define UNSEEN (event[8] == 0)
#define SLOT event[9]
#define LAST event[10]             /* the number of the call in the row of the stream; 0: it is not written */
#else
#define SEEN true
#define UNSEEN true
#define SLOT 0
#endif

/* The store: who owns the partition, the row of a counter, and a row for each stream. */
WORD epoch;
byte holder = NOBODY;
WORD number;
SET sum;           /* the changes that are in the counter */
WORD last[GATEWAYS];     /* the number of the last call */
bool refusal[GATEWAYS];  /* the answer to that call */

/* What only the model knows. */
WORD claims, commits;
SET acknowledged, denied; /* the changes whose callers have that answer */

typedef Gateway {
	byte waiting = CALLERS;  /* changes whose callers wait for a call */
	bool apart;    /* they were refused together, so each is tried by itself */
	WORD number;   /* of the call in progress, or of the last one */
	byte ops;      /* its changes; 0: none is in progress */
	byte attempts; /* up to 2 */
	WORD sent; WORD sentToo /* calls that are on their way, or wait in the queue of an owner */
#ifdef TRACE
	; short said[2] /* the last answer to a first attempt and to a repetition */
#endif
}
Gateway gateways[GATEWAYS];

/* A commit; its number is one more than after. Epoch is 0: there is none. */
typedef Commit {
	WORD epoch; WORD after;
	SET sum;
	bool twice;           /* it counts a change twice */
	WORD last[GATEWAYS];  /* 0: the row of the stream is not written */
	bool refusal[GATEWAYS]
}

typedef Owner {
	WORD mine; WORD has;  /* its epoch; the number of the newest commit that it knows */
	SET sum;              /* the rows in its memory */
	WORD last[GATEWAYS]; bool refusal[GATEWAYS];
	WORD turn[GATEWAYS];  /* the calls of c */
	Commit c;
	bool unsure;          /* the outcome of c is not known */
	bool refused          /* the store has refused c, so the partition must be claimed again */
}
Owner owners[OWNERS];

Commit late[LATES]; /* copies of commits that arrive late */

hidden WORD m, granted;
hidden byte isNew;
mtype = { made, fenced, lost };

#define G gateways[g]
#define O owners[me]

/* AWAITS: the gateway waits for the answer to this attempt. After a repetition it no longer waits for that to the first. */
#define AWAITS(call) (G.ops != 0 && G.number == NUMBER(call) && G.attempts == 1 + REPEATED(call))

/* told is [counter/call.Caller.Do]: an answer, which may get lost, has arrived. When a merged operation is refused,
 * [counter.combining.write] makes its parts one by one. */
inline told(g, call, isRefused) {
#ifdef TRACE
	G.said[REPEATED(call)] = SAID(NUMBER(call), (isRefused -> REFUSED : MADE)) /* it arrives later, see TOLD */
#else
	if
	:: true
	:: AWAITS(call) && !isRefused ->
		acknowledged = acknowledged | CHANGES(g, G.ops, G.number);
		assert((acknowledged & sum) == acknowledged); /* what is acknowledged was committed */
		G.ops = 0; G.attempts = 0
	:: AWAITS(call) && isRefused && G.ops == 3 ->
		G.waiting = 3; G.apart = true;
		G.ops = 0; G.attempts = 0
	:: AWAITS(call) && isRefused && G.ops != 3 -> deny(g)
	fi
#endif
}

/* toldBusy: nothing was made. Of a call that was sent before, [counter/call.Caller.do] does not believe it. */
inline toldBusy(g, call) {
	if
	:: true
	:: AWAITS(call) && G.attempts == 1 -> deny(g)
	fi
}

inline deny(g) {
	denied = denied | CHANGES(g, G.ops, G.number);
	assert((denied & sum) == 0);
	G.ops = 0; G.attempts = 0
}

inline send(g, call) {
	if
	:: G.sent == 0 -> G.sent = call
	:: else -> G.sentToo = call
	fi
}

active [GATEWAYS] proctype gateway() {
	byte g = _pid;

end:	do
	/* [counter.Combiner.Do]: changes that wait go together, or a first one goes alone. The streams are alike, so the
	 * first one begins. */
	:: atomic { G.ops == 0 && G.waiting != 0 && (g == 0 || gateways[0].number > 0 && !IS_MERGED) && IS(SEND, g) ->
		G.number++;
#ifdef TRACE
		G.ops = 1;
#else
		if
		:: G.waiting == 3 && !G.apart -> G.ops = 3
		:: G.waiting & 1 -> G.ops = 1
		:: else -> G.ops = 2
		fi;
		G.waiting = G.waiting & (3 - G.ops)
#endif
		}

	/* [counter/call.Caller.try]: it will arrive at an owner, soon, late or never. An earlier attempt may be on its way. */
	:: d_step { G.ops != 0 && G.sentToo == 0 && IS(SEND, g) ->
#ifdef NEW_NUMBER
		G.number = G.number + (G.attempts > 0 -> 1 : 0);
#endif
		send(g, CALL(G.number, G.ops, G.attempts > 0));
		G.attempts = (G.attempts > 0 -> 2 : 1);
		matches(TOLD_NUMBER == G.number && G.attempts == 1 + IS_AGAIN) }

#ifdef TRACE
	/* An attempt is lost. */
	:: d_step { G.sent != 0 && COMES(SEND) -> G.sent = G.sentToo; G.sentToo = 0 }
	:: d_step { G.sentToo != 0 && COMES(SEND) -> G.sentToo = 0 }

	/* [counter/call.Caller.do]: an answer has arrived. If nothing was made, the only attempt is gone. */
	:: d_step { G.ops != 0 && IS(TOLD, g) ->
		expects(TOLD_NUMBER == G.number && G.attempts == 1 + IS_AGAIN && (OUTCOME != BUSY || !IS_AGAIN));
		expects(OUTCOME == BUSY || G.said[IS_AGAIN] == SAID(G.number, OUTCOME));
		if
		:: event[0] == OTHER
		:: event[0] != OTHER && OUTCOME == MADE ->
			acknowledged = acknowledged | CHANGES(g, G.ops, G.number);
			assert((acknowledged & sum) == acknowledged);
			G.ops = 0; G.attempts = 0
		:: event[0] != OTHER && OUTCOME == REFUSED -> deny(g)
		:: event[0] != OTHER && OUTCOME == BUSY -> G.sent = 0; G.sentToo = 0; deny(g)
		fi;
		follow() }
#endif

	/* The callers have left, and others wait. The next call has a greater number. */
	:: d_step { G.ops != 0 && G.attempts > 0 && G.waiting != 0 && IS(LEAVE, g) -> G.ops = 0; G.attempts = 0 }
	od
}

inline forget(one) {
	one.epoch = 0; one.after = 0; one.sum = 0; one.twice = false;
	one.last[0] = 0; one.last[1] = 0; one.refusal[0] = false; one.refusal[1] = false
}

/* copy makes a commit arrive again, later. */
inline copy(one) {
	late[SLOT].epoch = one.epoch; late[SLOT].after = one.after; late[SLOT].sum = one.sum; late[SLOT].twice = one.twice;
	late[SLOT].last[0] = one.last[0]; late[SLOT].last[1] = one.last[1];
	late[SLOT].refusal[0] = one.refusal[0]; late[SLOT].refusal[1] = one.refusal[1]
}

/* claim is [internal/rows.Ownership.Claim], [scripts/rows_claim.lua]. A granted epoch is 0 if another process has claimed
 * the partition since the former claim. Of clocks see ownership.pml. */
inline claim(me, former) {
	if
	:: former != 0 && epoch > former && holder != me -> granted = 0
	:: else ->
		claims++;
		granted = claims; epoch = claims;
		holder = me
	fi
}

inline writeStream(g, one) {
	if
	:: one.last[g] != 0 -> last[g] = one.last[g]; refusal[g] = one.refusal[g]
	:: else
	fi
}

/* decide is the store's side of a commit: [internal/rows.Ownership.Refuses], [internal/rows.Ownership.Has],
 * [scripts/rows_commit.lua]. */
inline decide(one, outcome) {
	if
	:: IS_FENCED(one) -> outcome = fenced
	:: !IS_FENCED(one) && one.after + 1 == number -> outcome = made
	:: !IS_FENCED(one) && one.after + 1 != number && one.after != number -> outcome = lost
	:: !IS_FENCED(one) && one.after == number ->
		assert(!one.twice);
		if
		:: one.sum != NO_ROW ->
			assert((sum & one.sum) == sum);     /* no change is taken back */
			assert((denied & one.sum) == 0);    /* what is refused never counts */
			sum = one.sum
		:: else
		fi;
#ifndef APART
		writeStream(0, one);
		writeStream(1, one);
#endif
		number = one.after + 1;
		outcome = made
	fi
}

/* judge is [counter/owner.draft.judgeCall]. What decides whether a change is refused is left out here, so each may be
 * refused, each time anew. */
inline judge(me, g) {
	m = O.turn[g];
	if
#ifndef JUDGED_AGAIN
	:: m == 0 || O.last[g] >= NUMBER(m) /* no call, a repetition, or ErrOld */
	:: m != 0 && O.last[g] < NUMBER(m) ->
#else
	:: m == 0 || O.last[g] > NUMBER(m)
	:: m != 0 && O.last[g] <= NUMBER(m) ->
#endif
		if
		:: true ->
			O.c.twice = O.c.twice || (O.c.sum & CHANGES(g, OPS(m), NUMBER(m))) != 0;
			O.c.sum = O.c.sum | CHANGES(g, OPS(m), NUMBER(m));
			O.c.last[g] = NUMBER(m)
		:: IS_MERGED ->
			/* A refusal changes nothing, so it is stored only if an earlier copy of the call may yet arrive. */
			O.c.refusal[g] = true;
#ifndef REFUSAL_FORGOTTEN
			O.c.last[g] = (REPEATED(m) -> NUMBER(m) : 0)
#endif
		fi
	fi;
	m = 0
}

/* answer is [counter/owner.Owner.answer]. */
inline answer(me, g) {
	if
	:: O.turn[g] == 0 || O.last[g] > NUMBER(O.turn[g])
	:: O.turn[g] != 0 && O.last[g] == NUMBER(O.turn[g]) -> told(g, O.turn[g], O.refusal[g])
	:: O.turn[g] != 0 && O.last[g] < NUMBER(O.turn[g]) -> told(g, O.turn[g], O.c.refusal[g])
	fi
}

inline remember(me, g) {
	if
	:: O.c.last[g] != 0 -> O.last[g] = O.c.last[g]; O.refusal[g] = O.c.refusal[g]
	:: else
	fi;
	O.turn[g] = 0
}

/* land is [counter/owner.Owner.land], [counter/owner.partition.landDraft]: the draft moves into memory. */
inline land(me) {
#ifndef EARLY
	answer(me, 0);
	answer(me, 1);
#endif
	O.has = O.c.after + 1;
	O.sum = O.c.sum;
	remember(me, 0);
	remember(me, 1);
	forget(O.c);
	O.unsure = false; O.refused = false
}

/* giveUp is [counter/owner.Owner.giveUp]: the callers turn to the next owner. If the outcome of a commit is not known,
 * [counter/owner.Owner.commitAll] goes on repeating it. */
inline giveUp(me) {
	if
	:: O.unsure && (late[SLOT].epoch == 0 || late[SLOT].epoch == O.c.epoch) && !TRACED ->
		copy(O.c);
#ifdef DRAFT_REUSED
		late[SLOT].sum = NO_ROW
#endif
	:: else
	fi;
	O.mine = 0; O.has = 0;
	O.sum = 0; O.last[0] = 0; O.last[1] = 0; O.refusal[0] = false; O.refusal[1] = false;
	O.turn[0] = 0; O.turn[1] = 0;
	O.unsure = false; O.refused = false;
	forget(O.c)
}

inline again(me, g) {
	if
	:: O.turn[g] != 0 && gateways[g].sentToo == 0 -> send(g, O.turn[g])
	:: else
	fi;
	O.turn[g] = 0
}

#define HAS_CALL(g) (gateways[g].sent != 0)

inline take(me, g) {
	if
	:: G.sent != 0 -> O.turn[g] = G.sent; G.sent = G.sentToo
	:: G.sentToo != 0 -> O.turn[g] = G.sentToo
	fi;
	G.sentToo = 0
}

active [OWNERS] proctype owner() {
	byte me = _pid - GATEWAYS;
	mtype outcome;

end:	do
	/* [counter/owner.Owner.Own]: from any owner. The processes are alike, so the first one begins. */
	:: d_step { O.mine == 0 && claims < CLAIMS && (me == 0 || claims > 0) && IS(CLAIM, me) ->
		claim(me, 0); O.mine = granted; O.has = number; granted = 0;
		O.sum = sum; O.last[0] = last[0]; O.refusal[0] = refusal[0]; O.last[1] = last[1]; O.refusal[1] = refusal[1];
		matches(SEEN && FORMER == 0 && EPOCH == O.mine && TOLD_NUMBER == O.has) }

	/* The same, but the message arrives late, when the process owns the partition already. */
	:: d_step { (O.mine != 0 && holder == me || TRACED) && claims < CLAIMS && IS(CLAIM, me) ->
		claim(me, 0);
		matches(UNSEEN && FORMER == 0 && EPOCH == granted);
		granted = 0 }

	/* [counter/owner.Owner.enqueue], [counter/owner.Owner.makeTurn], which takes what waits with
	 * [counter/owner.partition.takeLocked]: one call of each stream. */
	:: atomic { O.mine != 0 && O.c.epoch == 0 && commits < COMMITS && (HAS_CALL(0) || HAS_CALL(1) || TRACED) &&
		(IS(COMMIT, me) || IS(COPY, me)) ->
		commits++;
		if
		:: HAS_CALL(0) ->
			take(me, 0);
			if
			:: HAS_CALL(1) -> take(me, 1)
			:: true
			fi
		:: HAS_CALL(1) -> take(me, 1)
#ifdef TRACE
		:: true /* it has calls of other streams, or none */
#endif
		fi;
		O.c.epoch = O.mine; O.c.after = O.has; O.c.sum = O.sum; /* [counter/owner.draft.commit] */
		judge(me, 0);
		judge(me, 1);
#ifdef EARLY
		answer(me, 0);
		answer(me, 1);
#endif
		}

	/* [counter/owner.Owner.write]: the commit arrives, and so does the answer, for [counter/owner.Owner.handleOutcome]. */
	:: atomic { O.c.epoch != 0 && !O.refused && IS(COMMIT, me) && SEEN ->
		decide(O.c, outcome);
		expects(EPOCH == O.c.epoch && AFTER == O.c.after && LAST == O.c.last[0] && OUTCOME == outcome);
		if
		:: outcome == made -> land(me)
		:: outcome != made -> O.refused = true
		fi;
		outcome = 0;
		follow() }

	/* The answer is lost, and [counter/owner.Owner.insist] will repeat it; see [counter/owner.Owner.doubt]. */
	:: d_step { O.c.epoch != 0 && !O.refused && (!O.unsure || TRACED) && IS(COMMIT, me) && UNSEEN ->
		decide(O.c, outcome);
		matches(EPOCH == O.c.epoch && AFTER == O.c.after && LAST == O.c.last[0] && OUTCOME == outcome);
		O.unsure = true; outcome = 0 }

	/* The same, but the commit arrives late or never. */
	:: d_step { O.c.epoch != 0 && !O.refused && late[SLOT].epoch == 0 && IS(COPY, me) ->
		copy(O.c);
		O.unsure = true;
		matches(EPOCH == O.c.epoch && AFTER == O.c.after && LAST == O.c.last[0]) }

	/* ErrFull. While the commit is in doubt, an earlier attempt may yet arrive. */
	:: atomic { O.c.epoch != 0 && O.c.epoch == epoch && O.c.after == number && !O.refused &&
		(!O.unsure || FULL_IS_FINAL) && !TRACED ->
		/* [counter/owner.Owner.fail] */
		if
		:: O.turn[0] != 0 -> toldBusy(0, O.turn[0])
		:: else
		fi;
		if
		:: O.turn[1] != 0 -> toldBusy(1, O.turn[1])
		:: else
		fi;
		O.turn[0] = 0; O.turn[1] = 0;
		O.unsure = false;
		forget(O.c) }

	/* [counter/owner.Owner.heal]. The store has lost nothing, so [counter/owner.partition.healing] has nothing to write. */
	:: atomic { O.refused && (claims < CLAIMS || epoch > O.mine && holder != me) && IS(CLAIM, me) ->
		O.refused = false;
		claim(me, O.mine);
		expects(FORMER == O.mine && EPOCH == granted && (UNSEEN || granted == 0 || TOLD_NUMBER == number));
		if
		:: SEEN && granted == 0 -> giveUp(me)
		:: UNSEEN -> O.unsure = true /* the answer is lost, and the commit is repeated */
		:: SEEN && granted != 0 ->
			isNew = number == O.c.after + 1 && number > O.has;
#ifdef MADE_UNSEEN
			isNew = false;
#endif
			if
			:: isNew -> land(me)
			:: else -> /* [counter/owner.Owner.requeue] */
				again(me, 0);
				again(me, 1);
				O.unsure = false;
				forget(O.c)
			fi;
			O.mine = granted; O.has = number
		fi;
		granted = 0; isNew = false;
		follow() }

	/* The same, but the claim does not reach the store. */
	:: d_step { O.refused -> O.refused = false; O.unsure = true }

	/* [counter/owner.Owner.Release]: the next owner asks for it. It waits for a turn, but for no commit in doubt. */
	:: d_step { (O.mine != 0 && !O.refused && (O.c.epoch == 0 || O.unsure) && claims < CLAIMS || TRACED) && IS(END, me) ->
		giveUp(me);
		matches(true) }
	od
}

active proctype world() {
	mtype outcome;

end:	do
#ifdef TRACE
	:: d_step { event[0] == BEGINNING -> follow() }
	:: d_step { event[0] == WHOLE -> assert(event[0] != WHOLE) }
#endif
	:: d_step { late[SLOT].epoch != 0 && COMES(LATE) ->
		decide(late[SLOT], outcome);
		expects(EPOCH == late[SLOT].epoch && AFTER == late[SLOT].after && LAST == late[SLOT].last[0]);
		forget(late[SLOT]);
		matches(OUTCOME == outcome);
		outcome = 0 }
	od
}
