// Prove runs the simulations of presence, of counters and of regions with fresh seeds until they have simulated so many
// hours, and ends at the first seed that fails, which it says how to replay. Each minute it says how far it is. In the
// end every place of the product that is marked (package marks) must have been reached.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	hours = flag.Float64("hours", 10, "simulated hours")
	begin = flag.Uint64("first", uint64(time.Now().UnixNano()), "the first seed")
)

// simulations with the seeds of one round, of which each takes some seconds. Those of presence are enough to say what
// share of the users they held to be counted.
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
	simulated time.Duration
	marks     map[string]int64
	faults    map[string]int64
}

func main() {
	log.SetFlags(0)
	flag.Parse()

	if err := prove(); err != nil {
		log.Fatal(err)
	}
}

func prove() error {
	dir, err := os.MkdirTemp("", "prove")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	// Compiled once, because every round runs them again.
	for _, s := range simulations {
		out, err := exec.Command("go", "test", "-c", "-tags", "marks,nomsgpack", "-o", program(dir, s.pkg), "./"+s.pkg).
			CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", s.pkg, err, out)
		}
	}

	all := counts{marks: map[string]int64{}, faults: map[string]int64{}}
	wanted := time.Duration(*hours * float64(time.Hour))
	began := time.Now()
	said := began
	fmt.Printf("the first seed is %d\n", *begin)

	for round := uint64(0); all.simulated < wanted; round++ {
		for _, s := range simulations {
			// Rounds are 1,000 seeds apart, more than any simulation takes, so no seed comes twice.
			first := *begin + round*1000
			if err := all.run(program(dir, s.pkg), s.pkg, first, s.seeds); err != nil {
				return err
			}
		}

		if time.Since(said) > time.Minute {
			said = time.Now()
			all.print(time.Since(began))
		}
	}

	all.print(time.Since(began))

	return all.reached()
}

func program(dir, pkg string) string {
	return filepath.Join(dir, strings.ReplaceAll(pkg, "/", "-")+".test")
}

// run simulates some seeds of a package.
func (all *counts) run(program, pkg string, first uint64, seeds int) error {
	cmd := exec.Command(program, "-test.run", "^TestSimulation$", "-test.timeout", "1h",
		"-seeds", strconv.Itoa(seeds), "-first", strconv.FormatUint(first, 10))
	// As go test does it: the tests read files by paths relative to their package.
	cmd.Dir = pkg

	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w, with the seeds from %d\n%s", pkg, err, first, out)
	}

	// Everything else that a test prints is no count, and has no two tabs.
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		words := strings.Split(lines.Text(), "\t")
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

	return nil
}

// print says how far it is, the commonest faults first.
func (all *counts) print(took time.Duration) {
	fmt.Printf("%.1f hours simulated in %s, %.0f in an hour\n",
		all.simulated.Hours(), took.Round(time.Second), all.simulated.Hours()/took.Hours())
	fmt.Println("  faults:", list(all.faults))
	fmt.Println("  reached:", list(all.marks))
}

func list(all map[string]int64) string {
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		// The commonest first; names decide between equal ones, so that two lines can be compared.
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

// reached returns an error that names the places which nothing has reached.
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
