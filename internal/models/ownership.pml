/*
 * Who owns a partition: claims, pauses, and clocks of the store that go back.
 *
 * Without -DPRESENCE it is a partition of counters: rows_claim.lua and rows_commit.lua of Redis, whose rules in Go are
 * rows.Ownership, and the owner's side of them in counter/owner. With -DPRESENCE it is a partition of presence:
 * claim.lua, fence.lua, members.lua and counts.lua, and their caller in presence/presenceredis and presence/node.
 * The nearest public specification is that of CockroachDB's StoreLiveness. Every action names its functions in
 * brackets; models_test.go holds that they exist.
 *
 * Sizes: PROCS processes, CLAIMS claims, COMMITS commits, a clock of CLOCK ticks that is set to any of them at any time.
 * A process may pause between any two of its actions, and a message to the store may arrive late, and twice.
 * With -DLOSS the store loses its tail up to the last takeover once. As in the simulations, a takeover itself is not
 * lost, and the clock is past every epoch when the store is back.
 *
 * Proved, as assertions: an epoch is granted once; whoever commits owns the newest claim, and has judged on the newest
 * rows; a process that was overtaken takes nothing back; counts of an older owner never follow those of a newer one.
 *
 * Left out: rows (a version stands for all of them), processes that die (a paused one that never goes on), Redis's
 * generations, and who wants to own what (any process at any time).
 *
 * -DNO_FENCE, -DCLOCK_ALONE, -DNO_FORMER, -DREPEATED_CLAIM and -DFENCE_FALLS plant faults. -DBOTH is a limit of the
 * product: see set_clock.
 */
#ifndef PROCS
#define PROCS 3
#endif
#ifndef CLAIMS
#define CLAIMS 4
#endif
#ifndef COMMITS
#define COMMITS 3
#endif
#ifndef CLOCK
#define CLOCK 3
#endif
#define NOBODY 255
#define MAX(a, b) ((a) > (b) -> (a) : (b))

/* The store. */
byte clock = 1;
byte epoch;
byte holder = NOBODY;
byte number;
byte version;          /* stands for the rows: it grows with every commit that changed something */

/* What only the model knows. */
byte top;              /* the greatest epoch that was ever granted */
byte newest = NOBODY;  /* the process that made the newest claim */
byte claims, commits;

#ifdef LOSS
bool lost;
byte kept_epoch, kept_holder = NOBODY, kept_number, kept_version;
#endif

/* grant gives the partition to a process. */
inline grant(p, former, granted) {
#ifdef CLOCK_ALONE
	granted = clock;
#else
	granted = MAX(clock, MAX(epoch + 1, former + 1));
#endif
	assert(granted > top);                  /* an epoch is granted once, and later ones are greater */
	assert(former == 0 || newest == p);     /* whoever was overtaken takes nothing back */
	top = granted;
	epoch = granted;
	holder = p;
	newest = p;
	claims++;
}

/* [internal/redisconn.Caller.Known] is told the time by the store alone, and that may be set: by a failover to another
 * server, or by hand. With -DBOTH this goes together with the loss of a claim: then an epoch may be granted twice, if the
 * clock stays behind the lost epochs until the next claim. */
inline set_clock() {
	if
	:: clock = 1
	:: clock = 2
	:: clock = 3
	fi
}
