//go:build linux

// Attack attacks servers that it starts on the loopback, with one attack after the other, and prints what each costs
// others: the memory of the server and of Redis, how soon a join is seen, how soon a newcomer has its first count, and
// how long a like takes. Each attack is limited in rate and time. The exit status is 1 when a bound is broken.
//
// It needs Linux and two cores, one for the server and one for this program. With
// --redis it needs redis-server(1) as well.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

// The bounds that each attack is held to.
const (
	slowerTimes    = 1.2                   // an ordinary client's p99 may grow by this factor
	slowerBy       = 20 * time.Millisecond // or by this much, whichever permits more
	maxGrowth      = 300 << 20             // bytes, of any process while it is attacked
	leftGrowth     = 30 << 20              // bytes, when the server has rested after the attack
	leftGoroutines = 50                    // likewise
)

func main() {
	h := &run{}
	var only string
	flag.StringVar(&h.program, "program", "bin/headcount", "the server")
	flag.DurationVar(&h.lasts, "lasts", 8*time.Second, "how long each attack lasts")
	flag.DurationVar(&h.rests, "rests", time.Minute, "how soon after an attack its memory must be free again")
	flag.BoolVar(&h.redis, "redis", false, "a server over Redis, not the embedded store")
	flag.StringVar(&only, "only", "", "names of attacks, separated by commas")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	broken, err := h.run(ctx, only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "attack:", err)
	}

	if broken || err != nil {
		os.Exit(1)
	}
}

// run is one run of attacks.
type run struct {
	program      string
	lasts, rests time.Duration
	redis        bool
}

func (h *run) run(ctx context.Context, only string) (broken bool, err error) {
	if err := benchenv.Cores(); err != nil {
		return false, err
	}

	// The attackers must not take the server's core, or any attack would succeed.
	var mine unix.CPUSet
	mine.Set(benchenv.ClientCore)
	if err := unix.SchedSetaffinity(0, &mine); err != nil {
		return false, err
	}

	fmt.Printf("%-22s %30s %30s %26s %26s %20s  %s\n", "attack", "server MB before, most, after",
		"Redis MB before, most, after", "join seen p50/p99, attacked", "first count p99, attacked",
		"like p99, attacked", "verdict")
	for _, a := range slices.Concat(crowding, holding) {
		if only != "" && !slices.Contains(strings.Split(only, ","), a.name) {
			continue
		}

		// Each attack has a server of its own, so that what one leaves behind does not count against the next.
		var r result
		if err := benchenv.Try(ctx, func(t *benchenv.Trial) { r = h.attack(t, a) }); err != nil {
			return broken, fmt.Errorf("%s: %w", a.name, err)
		}

		why := r.broken()
		broken = broken || why != ""
		if why == "" {
			why = "held"
		}

		before, attacked := r.felt[0], r.felt[1]
		fmt.Printf("%-22s %30s %30s %26s %26s %20s  %s\n", a.name, r.server, r.store,
			fmt.Sprintf("%s, %s", before.seen, attacked.seen),
			fmt.Sprintf("%.1f, %.1f ms", before.first.at(99), attacked.first.at(99)),
			fmt.Sprintf("%.1f, %.1f ms", before.liked.at(99), attacked.liked.at(99)), why)
	}

	return broken, nil
}

// memory is the memory of one process, in bytes: before the attack, the peak, and after the rest.
type memory struct{ before, most, after int64 }

// freed reports whether the memory that the attack took is free again.
func (m memory) freed() bool { return m.after-m.before <= leftGrowth }

func (m memory) String() string {
	return fmt.Sprintf("%d, %d, %d", m.before>>20, m.most>>20, m.after>>20)
}

// times are sorted.
type times []time.Duration

func (t times) at(percent int) float64 {
	if len(t) == 0 {
		return 0
	}
	return float64(t[(len(t)-1)*percent/100]) / 1e6
}

func (t times) String() string { return fmt.Sprintf("%.1f/%.1f ms", t.at(50), t.at(99)) }

// result is what an attack cost.
type result struct {
	server, store memory
	goroutines    [2]int      // before the attack, and after the rest
	felt          [2]measured // by ordinary clients, before the attack and during it
	wrong         string      // what is wrong with the count at the end; "": nothing
}

func (r *result) goroutinesLeft() bool { return r.goroutines[1]-r.goroutines[0] > leftGoroutines }

// rested reports whether all memory and goroutines that the attack took are free again.
func (r *result) rested() bool { return r.server.freed() && r.store.freed() && !r.goroutinesLeft() }

// broken returns which bounds are broken, in words; "": none.
func (r *result) broken() string {
	var why []string
	for name, m := range map[string]memory{"server": r.server, "Redis": r.store} {
		if m.most-m.before > maxGrowth {
			why = append(why, name+" grows")
		}
		if !m.freed() {
			why = append(why, name+" keeps memory")
		}
	}

	// The order of a map changes from run to run.
	slices.Sort(why)

	if r.goroutinesLeft() {
		why = append(why, fmt.Sprintf("%d goroutines before, %d after", r.goroutines[0], r.goroutines[1]))
	}

	before, attacked := r.felt[0], r.felt[1]
	for what, t := range map[string][2]times{
		"joins are seen late": {before.seen, attacked.seen},
		"newcomers wait":      {before.first, attacked.first},
		"likes wait":          {before.liked, attacked.liked},
	} {
		if t[1].at(99) > max(t[0].at(99)*slowerTimes, t[0].at(99)+slowerBy.Seconds()*1e3) {
			why = append(why, what)
		}
	}

	if lost := attacked.lost; lost > 0 {
		why = append(why, fmt.Sprintf("%d ordinary clients failed", lost))
	}

	if r.wrong != "" {
		why = append(why, r.wrong)
	}

	return strings.Join(why, "; ")
}

// goroutines returns how many goroutines the server has.
func goroutines(admin string) (n int) {
	resp, err := http.Get("http://" + admin + "/metrics")
	if err != nil {
		return 0
	}
	defer resp.Body.Close()

	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if count, found := strings.CutPrefix(lines.Text(), "go_goroutines "); found {
			n, _ = strconv.Atoi(count)
		}
	}

	return n
}

// attack starts a server and measures one attack on it.
func (h *run) attack(t *benchenv.Trial, a attack) (r result) {
	flags, storePID := h.flags(t, a)

	server := t.Serve(h.program, flags...)
	o := newOrdinary(server.Addr)
	if err := o.open(); err != nil {
		t.Fatal(err)
	}
	defer o.close()

	// The bounds are relative to the same measurement before the attack.
	r.felt[0] = o.measure(t.Context(), h.lasts/2)
	r.goroutines[0] = goroutines(server.Admin)

	pid := server.PID()
	r.server = memory{before: servertest.Memory(pid)}
	r.store = memory{before: servertest.Memory(storePID)}

	watching, stop := context.WithCancel(t.Context())
	var watch, attacking sync.WaitGroup
	// The peak may be short, so the memory is read all the time.
	watch.Go(func() { // ends with stop
		for watching.Err() == nil {
			r.server.most = max(r.server.most, servertest.Memory(pid))
			r.store.most = max(r.store.most, servertest.Memory(storePID))
			time.Sleep(50 * time.Millisecond)
		}
	})

	attacked, over := context.WithTimeout(t.Context(), h.lasts)
	attacking.Go(func() { a.run(attacked, server.Addr) })

	time.Sleep(h.lasts / 8) // the attack has to begin first
	r.felt[1] = o.measure(attacked, h.lasts)
	attacking.Wait()
	over()

	h.rest(t, &r, server, storePID)
	stop()
	watch.Wait()

	// An attack that leaves the count wrong has succeeded, whatever it cost.
	n, err := o.count(t.Context())
	if err != nil || n != 1 {
		r.wrong = fmt.Sprintf("the count is %d and not 1 (%v)", n, err)
	}

	return r
}

// rest waits until the server is as small as before the attack, or h.rests has passed: Go returns memory to the system
// late.
func (h *run) rest(t *benchenv.Trial, r *result, server benchenv.Server, storePID int) {
	for end := time.Now().Add(h.rests); ; time.Sleep(time.Second) {
		r.server.after = servertest.Memory(server.PID())
		r.store.after = servertest.Memory(storePID)
		r.goroutines[1] = goroutines(server.Admin)

		if r.rested() || time.Now().After(end) || t.Context().Err() != nil {
			return
		}
	}
}

// flags starts the server's Redis, if it has one, and writes the rules. It returns the server's flags for them.
func (h *run) flags(t *benchenv.Trial, a attack) (flags []string, storePID int) {
	if h.redis {
		redis := servertest.FreeAddr()
		_, port, _ := net.SplitHostPort(redis)
		// On the core of the server, because the attack is on both.
		store := t.Start(benchenv.On(t.Context(), benchenv.ServerCore, "redis-server", "--port", port, "--save", "",
			"--appendonly", "no", "--maxmemory-policy", "noeviction", "--loglevel", "warning"))
		storePID = store.PID()
		flags = []string{"--redis", "redis://" + redis, "--cluster-listen", servertest.FreeAddr()}
	}

	if a.rules != "" {
		rules := filepath.Join(t.TempDir(), "rules.json")
		if err := os.WriteFile(rules, []byte(a.rules), 0o600); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, "--counters", rules)
	}

	return flags, storePID
}
