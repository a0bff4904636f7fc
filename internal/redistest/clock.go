package redistest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// shim moves the wall clock of a program by OFFSET seconds.
const shim = `#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
	static long by;
	static int known;
	if (!known) {
		const char *text = getenv("OFFSET");
		by = text ? atol(text) : 0;
		known = 1;
	}
	return by;
}

int clock_gettime(clockid_t id, struct timespec *t) {
	static int (*real)(clockid_t, struct timespec *);
	if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
	int err = real(id, t);
	if (!err && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += offset();
	return err;
}

int gettimeofday(struct timeval *t, void *zone) {
	struct timespec now;
	(void)zone;
	clock_gettime(CLOCK_REALTIME, &now);
	t->tv_sec = now.tv_sec;
	t->tv_usec = now.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *t) {
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (t) *t = now.tv_sec;
	return now.tv_sec;
}
`

// StartAt is Start of a server whose clock is wrong by offset, in whole seconds.
// It needs a C compiler, as the race detector does, and Linux.
func StartAt(t testing.TB, offset time.Duration, args ...string) *Server {
	t.Helper()
	dir := t.TempDir()
	source, library := filepath.Join(dir, "shim.c"), filepath.Join(dir, "shim.so")
	if err := os.WriteFile(source, []byte(shim), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := exec.Command("cc", "-shared", "-fPIC", "-o", library, source, "-ldl").CombinedOutput(); err != nil {
		t.Fatalf("a clock that is wrong needs a C compiler, run make setup: %v\n%s", err, text)
	}
	s := newServer(t.TempDir(), args...)
	s.env = []string{"LD_PRELOAD=" + library, fmt.Sprintf("OFFSET=%d", int(offset.Seconds()))}
	s.startFor(t)
	c := s.Client()
	defer c.Close()
	there, err := c.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	if off := time.Until(there) - offset; off.Abs() > time.Minute {
		t.Fatalf("the server's clock is not %s off, but %s", offset, time.Until(there))
	}
	return s
}
