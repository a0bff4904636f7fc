// Prove runs the simulations of presence, counters and regions with fresh seeds for a number of simulated hours. It
// ends at the first seed that breaks a promise: it looks for the fewest faults with which that happens, prints the
// trace, and says how to replay it. Each minute it prints its progress. At the end every marked place of the product
// (see package marks) must have been reached. With -replay it runs one seed.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

var (
	hours = flag.Float64("hours", 10, "simulated hours")
	begin = flag.Uint64("first", uint64(time.Now().UnixNano()), "the first seed")

	replayed = flag.String("replay", "", "replay one seed of a simulation, such as counter/call, and print its trace")
	test     = flag.String("test", simulation, "the test of the replay")
	seed     = flag.Uint64("seed", 1, "the seed of the replay")
	order    = flag.Int64("order", -1, "the order of the replay; -1: try some until a promise is broken")
	without  = flag.String("without", "", "with an order: numbers of the faults to leave out, such as 1,4")
	times    = flag.Int("times", 1, "how often to replay: all traces must be the same")
)

// simulations has the packages with simulations, and how many seeds each gets in a round.
var simulations = []struct {
	pkg   string
	seeds int
}{
	{"counter/call", 600},
	{"counter/region", 40},
	{"presence/member", 150},
}

// counts of all rounds so far.
type counts struct {
	mu        sync.Mutex // guards the fields below
	simulated time.Duration
	cpu       time.Duration
	marks     map[string]int64
	faults    map[string]int64
}

// simulation matches the test of each package that runs its simulation.
const simulation = "^TestSimulation$"

// someOrders is how many orders a replay tries when none is given.
const someOrders = 10

func main() {
	log.SetFlags(0)
	flag.Parse()

	do := prove
	if *replayed != "" {
		do = replay
	}
	if err := do(); err != nil {
		log.Fatal(err)
	}
}

func prove() error {
	for _, s := range simulations {
		if err := compile(s.pkg); err != nil {
			return err
		}
	}

	all := counts{marks: map[string]int64{}, faults: map[string]int64{}}
	wanted := time.Duration(*hours * float64(time.Hour))
	began := time.Now()
	said := began
	fmt.Printf("the first seed is %d\n", *begin)

	for round := uint64(0); all.simulated < wanted; round++ {
		// Rounds are 1,000 seeds apart, which is more than a round has, so no seed comes twice.
		if err := all.round(*begin + round*1000); err != nil {
			return err
		}

		if time.Since(said) > time.Minute {
			said = time.Now()
			all.print(time.Since(began))
		}
	}

	all.print(time.Since(began))

	return all.reached()
}

// round simulates some seeds of each package, with one process for each core.
func (all *counts) round(first uint64) error {
	group, ctx := errgroup.WithContext(context.Background())
	group.SetLimit(runtime.NumCPU())
	for _, s := range simulations {
		for i := range s.seeds {
			group.Go(func() error {
				if ctx.Err() != nil {
					return nil
				}

				r := run{pkg: s.pkg, test: *test, seed: first + uint64(i)}
				res, err := r.do()
				if err != nil {
					return err
				}
				if res.broke != "" {
					return &broken{r, res}
				}
				all.add(res)

				return nil
			})
		}
	}

	err := group.Wait()
	if found, ok := err.(*broken); ok {
		return found.report()
	}

	return err
}

// add adds the counts that package marks has printed in a run.
func (all *counts) add(res result) {
	all.mu.Lock()
	defer all.mu.Unlock()

	all.cpu += res.cpu
	// A count is a line with two tabs; the other lines of a test have none.
	for line := range strings.Lines(res.printed) {
		words := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(words) != 3 {
			continue
		}
		n, err := strconv.ParseInt(words[1], 10, 64)
		if err != nil {
			continue
		}

		switch words[0] {
		case "simulated":
			all.simulated += time.Duration(n)
		case "mark":
			all.marks[words[2]] += n
		case "fault":
			all.faults[words[2]] += n
		}
	}
}

// replay runs one seed.
func replay() error {
	if err := compile(*replayed); err != nil {
		return err
	}

	r := run{pkg: *replayed, test: *test, seed: *seed}
	if *order < 0 {
		found, res, err := r.find("", someOrders)
		if err == nil && res.broke != "" {
			return (&broken{found, res}).report()
		}
		if err != nil {
			return err
		}
		// No order breaks a promise, so the trace below is that of the first one.
	}

	r.order = uint64(max(0, *order))
	for _, number := range strings.FieldsFunc(*without, func(c rune) bool { return c == ',' }) {
		n, err := strconv.Atoi(number)
		if err != nil {
			return err
		}
		r.without = append(r.without, n)
	}

	return r.again()
}

// again prints the trace of a run, and repeats the run: its trace must be the same each time.
func (r run) again() error {
	res, err := r.do()
	if err != nil {
		return err
	}
	fmt.Print(res.trace(), res.crash)

	for n := 2; n <= *times; n++ {
		then, err := r.do()
		if err != nil {
			return err
		}
		if then.trace() != res.trace() || then.broke != res.broke {
			return fmt.Errorf("run %d of %d differs from the first", n, *times)
		}
	}
	fmt.Printf("%d lines, the same in %d runs\n", lines(res.trace()), *times)

	if res.broke != "" {
		return &broken{r, res}
	}

	return nil
}

func lines(trace string) int { return strings.Count(trace, "\n") }

// broken is a run that broke a promise.
type broken struct {
	run
	result
}

func (b *broken) Error() string {
	return fmt.Sprintf("%s: seed %d breaks %s\nreplay: %s", b.pkg, b.seed, b.broke, b.command())
}

// report leaves out as many faults as it can, and prints the trace of the rest.
func (b *broken) report() error {
	less, res := b.shrink(b.result)
	fmt.Print(res.trace(), res.crash)

	return &broken{less, res}
}

// print prints the progress.
func (all *counts) print(took time.Duration) {
	// Also per hour of CPU, because other work on the machine slows the simulations down.
	fmt.Printf("%.1f hours simulated in %s, %.0f in an hour, %.0f in an hour of CPU\n", all.simulated.Hours(),
		took.Round(time.Second), all.simulated.Hours()/took.Hours(), all.simulated.Hours()/all.cpu.Hours())
	fmt.Println("  faults:", listed(all.faults))
	fmt.Println("  reached:", listed(all.marks))
}

// listed returns the counts in words, the largest first.
func listed(all map[string]int64) string {
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		// Equal counts are sorted by name, so that two lists can be compared.
		return cmp.Or(cmp.Compare(all[b], all[a]), strings.Compare(a, b))
	})

	var b strings.Builder
	for i, name := range names {
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "%s %d", name, all[name])
	}

	return b.String()
}

// reached returns an error that names the marks which nothing has reached.
func (all *counts) reached() error {
	var missing []string
	for name, n := range all.marks {
		if n == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return fmt.Errorf("never reached: %s", strings.Join(missing, "; "))
	}

	return nil
}
