package owners_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

var seeds = flag.Int("seeds", 5, "random histories of faults")

// threeAndAGateway is a cluster of three owners, and a gateway whose clients change all keys all the time.
func threeAndAGateway(t *testing.T) (*world, *load) {
	return threeAndABusyGateway(t, 100*time.Millisecond)
}

func threeAndABusyGateway(t *testing.T, each time.Duration) (*world, *load) {
	w := newWorld(t)
	for _, name := range []string{"a", "b", "c"} {
		w.start(name, true)
	}
	gateway := w.start("gateway", false)
	w.ring("a", "b", "c")
	l := gateway.change(each)
	time.Sleep(time.Second)
	// The first calls wait until the owners have claimed their partitions.
	l.forget()

	return w, l
}

// promised checks that since the last check no call failed, and none waited for longer than most.
func (l *load) promised(t *testing.T, what string, most time.Duration) {
	t.Helper()
	longest := l.forget()
	t.Logf("%s: a call waited for %v at most", what, longest)
	if longest > most {
		t.Errorf("%s: a call waited for %v, want %v at most", what, longest, most)
	}
	if l.failed > 0 {
		t.Errorf("%s: %d calls failed", what, l.failed)
	}
}

func TestNothingHappens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndAGateway(t)
		claims := w.claims
		time.Sleep(10 * time.Second)
		l.promised(t, "without a fault", 10*time.Millisecond)
		if w.claims != claims {
			t.Errorf("%d claims were made, want none", w.claims-claims)
		}
		w.end(l)
	})
}

func TestAKilledOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndAGateway(t)
		w.processes["b"].kill()
		time.Sleep(3 * time.Second) // until its lease has ended
		w.ring("a", "c")
		time.Sleep(10 * time.Second)
		l.promised(t, "a killed owner", 300*time.Millisecond)
		w.end(l)
	})
}

func TestASilentOwner(t *testing.T) {
	// A call may come soon after a ping, or long after.
	aSilentOwner(t, 0, 100*time.Millisecond)
	aSilentOwner(t, 35*time.Millisecond, 10*time.Millisecond)
	aSilentOwner(t, 70*time.Millisecond, 20*time.Millisecond)
}

func aSilentOwner(t *testing.T, after, each time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndABusyGateway(t, each)
		time.Sleep(after)
		w.processes["b"].freeze()
		time.Sleep(4 * time.Second) // until its lease has ended
		w.ring("a", "c")
		time.Sleep(4 * time.Second)
		l.promised(t, "a silent owner", 2200*time.Millisecond)

		// The owner wakes, and still takes itself for the owner of what others have claimed meanwhile.
		w.processes["b"].thaw()
		time.Sleep(time.Second)
		w.ring("a", "b", "c")
		time.Sleep(10 * time.Second)
		l.promised(t, "it wakes", 100*time.Millisecond)
		w.end(l)
	})
}

func TestAnOwnerComesAndLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndAGateway(t)
		w.start("d", true)
		w.ring("a", "b", "c", "d")
		time.Sleep(time.Second)
		l.promised(t, "an owner more", 50*time.Millisecond)

		w.ring("b", "c", "d")
		time.Sleep(time.Second)
		l.promised(t, "an owner leaves", 50*time.Millisecond)
		// By now the process owns nothing, so its end is noticed by nobody.
		w.processes["a"].kill()
		time.Sleep(5 * time.Second)
		l.promised(t, "it has ended", 10*time.Millisecond)
		w.end(l)
	})
}

// Each process reads the leases once a second, so for some time processes have different rings. No call waits for that.
func TestRingsDiffer(t *testing.T) {
	for name, order := range map[string][]string{
		"the gateway knows first":             {"gateway", "d", "a", "b", "c"},
		"the gateway knows last":              {"d", "a", "b", "c", "gateway"},
		"the next owners know last":           {"a", "gateway", "d", "b", "c"},
		"the one that comes or goes is last":  {"b", "c", "gateway", "a", "d"},
		"the one that comes or goes is first": {"d", "a", "c", "b", "gateway"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, l := threeAndAGateway(t)
				w.start("d", true)
				w.ring("a", "b", "c")
				w.ringInOrder(order, "a", "b", "c", "d")
				l.promised(t, "an owner more", 50*time.Millisecond)

				w.ringInOrder(order, "b", "c", "d")
				l.promised(t, "an owner leaves", 50*time.Millisecond)
				w.end(l)
			})
		})
	}
}

// A gateway that is cut off from one owner changes keys of the others. Partitions do not move because of that.
func TestAGatewayIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndAGateway(t)
		claims := w.claims
		other := w.start("other", false)
		w.ring("a", "b", "c")
		from := other.change(100 * time.Millisecond)

		// If a process that cannot reach an owner made others claim its partitions, two such processes would take them
		// from each other all the time.
		w.separate("other", "b", true)
		time.Sleep(15 * time.Second)
		l.promised(t, "elsewhere", 50*time.Millisecond)
		if w.claims != claims {
			t.Errorf("%d claims were made, want none", w.claims-claims)
		}
		if from.failed == 0 {
			t.Error("no call to the unreachable owner failed, so the test proves nothing")
		}

		w.separate("other", "b", false)
		time.Sleep(10 * time.Second)
		from.failed = 0
		from.forget()
		time.Sleep(10 * time.Second)
		from.promised(t, "the link is back", 50*time.Millisecond)
		w.end(l, from)
	})
}

// Two owners that are cut off from each other do not fight for a partition, because a third process reaches both.
func TestOwnersAreCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := threeAndAGateway(t)
		own := w.processes["a"].change(100 * time.Millisecond)
		claims := w.claims
		w.separate("a", "b", true)
		time.Sleep(30 * time.Second)
		if n := w.claims - claims; n > 0 {
			t.Errorf("%d claims were made, want none", n)
		}

		t.Logf("%d claims, %d calls failed at a third process, which waited for %v at most",
			w.claims-claims, l.failed, l.forget())

		w.separate("a", "b", false)
		time.Sleep(20 * time.Second)
		l.failed = 0
		l.forget()
		time.Sleep(10 * time.Second)
		l.promised(t, "the link is back", 50*time.Millisecond)
		w.end(l, own)
	})
}

// Whatever happens to processes and links, and whichever rings they believe in, each value is what was acknowledged,
// and in the end everything works again.
func TestAnything(t *testing.T) {
	n := *seeds
	if testing.Short() {
		n = min(n, 1)
	}
	for seed := range uint64(n) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { anything(t, seed) })
		})
	}
}

func anything(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(t)
	names := []string{"a", "b", "c", "d"}
	for _, name := range names {
		w.start(name, true)
	}

	gateway := w.start("gateway", false)
	w.ring(names...)
	loads := []*load{gateway.change(200 * time.Millisecond), w.processes["a"].change(300 * time.Millisecond)}

	alive := slices.Clone(names)
	for range 30 {
		time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
		one, other := names[random.IntN(len(names))], alive[random.IntN(len(alive))]
		switch random.IntN(8) {
		case 0, 1:
			w.processes[one].freeze()
		case 2, 3:
			w.processes[one].thaw()
		case 4:
			w.separate(one, other, true)
		case 5:
			w.separate(one, other, false)
		case 6: // each process gets a ring of its own
			for _, p := range w.processes {
				some := slices.DeleteFunc(slices.Clone(names), func(string) bool { return random.IntN(3) == 0 })
				p.directory.SetProcesses(some, names)
			}
		case 7:
			if one != "a" && len(alive) > 2 && !w.processes[one].isDead() {
				w.processes[one].kill()
				alive = slices.DeleteFunc(alive, func(name string) bool { return name == one })
			}
		}
	}

	for _, one := range names {
		w.processes[one].thaw()
		for _, other := range append([]string{"gateway"}, names...) {
			w.separate(one, other, false)
		}
	}

	// All links and processes work, and all know the same ring, so from some moment on no call may fail.
	w.ring(alive...)
	time.Sleep(15 * time.Second)
	for _, l := range loads {
		l.failed = 0
		l.forget()
	}

	time.Sleep(5 * time.Second)
	for _, l := range loads {
		l.promised(t, "in the end", 50*time.Millisecond)
	}

	w.end(loads...)
}
