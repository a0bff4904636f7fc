/*
 * With -DTRACE a model follows a trace: the events of a simulation, which it reads from its standard input, eleven numbers
 * for each event. The model asserts that it never reaches the end of the trace, so the trace is a run of the model if the
 * search breaks that assertion. Between two events the model may take steps that a simulation does not see.
 */
#define BEGINNING 0
#define WHOLE 254 /* there is no further event */
#define OTHER 255 /* the model has done something else */

#ifdef TRACE
c_decl {
	\#include <stdio.h>
	\#include <stdlib.h>

	static short events[5000][11];
	static int length, farthest;

	static void report() { printf("trace: %d of %d events\n", farthest, length); }

	static void load() {
		while (length < 4999 && scanf("%hd", &events[length][0]) == 1) {
			for (int i = 1; i < 11; i++) {
				if (scanf("%hd", &events[length][i]) != 1) {
					exit(2);
				}
			}
			length++;
		}
		events[length][0] = 254;
		atexit(report);
	}
};

short step;      /* the number of events so far */
short event[11]; /* the next event: its kind, its process, and nine numbers that each model names */

/* IS: the next event is of this kind and of this process. COMES: it is of this kind. */
#define IS(kind, process) (event[0] == (kind) && event[1] == (process))
#define COMES(kind) (event[0] == (kind))

/* expects ends this path of the search unless the model has done the same as the event says. */
inline expects(agrees) {
	if
	:: agrees
	:: else -> event[0] = OTHER
	fi
}

/* follow loads the next event. */
inline follow() {
	if
	:: event[0] == OTHER
	:: else -> c_code {
			if (length == 0) {
				load();
			}
			for (int i = 0; i < 11; i++) {
				now.event[i] = events[now.step][i];
			}
			if (now.step > farthest) {
				farthest = now.step;
			}
			now.step++;
		}
	fi
}

inline matches(agrees) {
	expects(agrees);
	follow()
}
#else
#define IS(kind, process) true
#define COMES(kind) true
#define expects(is) skip
#define follow() skip
#define matches(is) skip
#endif
