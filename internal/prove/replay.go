package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// run is one seed of a simulation, with an order in which goroutines go on, and without some faults. The same run has
// the same trace, byte for byte.
type run struct {
	pkg, test string
	seed      uint64
	order     uint64
	without   []int
}

// result is what a run has printed.
type result struct {
	printed string
	crash   string        // why it ended early
	broke   string        // the first promise that it broke, and how: "once: sum1 is 5, ..."; empty: none
	cpu     time.Duration // that it took
}

// trace returns the lines of the trace. What the package testing says, with real times, is no part of it. A trace has a
// thousand lines, so this takes half as long as a run.
func (is result) trace() string { return strings.Join(traceLine.FindAllString(is.printed, -1), "") }

// tooLong is how long a run may take. Nothing preempts goroutines, so one that asks in a loop whether another has done
// something would never end.
const tooLong = 5 * time.Minute

var (
	traceLine  = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  .*\n`)
	brokenLine = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  BROKEN (.*)$`)
	faultLine  = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  fault (\d+):$`)
	crashLine  = regexp.MustCompile(`(?m)^(?:panic|fatal error): .*$`)
)

func (r run) do() (result, error) {
	path, err := filepath.Abs(program(r.pkg))
	if err != nil {
		return result{}, err
	}

	ctx, stop := context.WithTimeout(context.Background(), tooLong)
	defer stop()

	// To a file: through a pipe each of its thousands of lines would wake this process.
	out, err := os.CreateTemp("", "trace-")
	if err != nil {
		return result{}, err
	}
	defer os.Remove(out.Name())
	defer out.Close()

	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, path, "-test.run", r.test, "-test.timeout", "0",
		"-seed", fmt.Sprint(r.seed), "-without", list(r.without))
	cmd.Dir = r.pkg     // as go test does it
	cmd.Env = []string{ // the first one decides the order: see patches
		fmt.Sprint("ORDER=", r.order), "GOMAXPROCS=1", "GOGC=off", "GODEBUG=asyncpreemptoff=1",
	}
	cmd.Stdout = out
	cmd.Stderr = &errs

	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return result{}, err
	}

	printed, failed := os.ReadFile(out.Name())
	if failed != nil {
		return result{}, failed
	}

	is := resultOf(string(printed), errs.String(), err)
	is.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()

	return is, nil
}

// resultOf reads what a run printed.
func resultOf(out, errs string, failed error) result {
	is := result{printed: out}
	// Hardly any run breaks a promise, and this takes a thousandth of a look for the line.
	if !strings.Contains(out, "  BROKEN ") && failed == nil {
		return is
	}

	if found := brokenLine.FindStringSubmatch(out); found != nil {
		is.broke = found[1]
	} else if failed != nil {
		is.crash = cmp.Or(errs, traceLine.ReplaceAllString(out, ""))
		is.broke = fmt.Sprintf("–: %v %s", failed, crashLine.FindString(is.crash))
	}

	return is
}

// promise is the name of the one that was broken.
func (is result) promise() string {
	name, _, _ := strings.Cut(is.broke, ": ")
	return name
}

// find tries some orders until a promise is broken, the named one if there is a name.
func (r run) find(promise string, orders uint64) (run, result, error) {
	for first := r.order; ; r.order++ {
		is, err := r.do()
		found := is.broke != "" && (promise == "" || is.promise() == promise)
		if err != nil || found || r.order+1 == first+orders {
			return r, is, err
		}
	}
}

// shrink leaves out what faults it can, as long as the same promise is broken in some order.
func (r run) shrink(is result) (run, result) {
	fewest(is.faults(), func(without []int) bool {
		less := r
		less.without = without
		less, then, err := less.find(is.promise(), 3)
		if err != nil || then.promise() != is.promise() {
			return false
		}

		r = less
		is = then

		return true
	})

	return r, is
}

// faults returns how many faults the trace has, and those that were left out.
func (is result) faults() (n int) {
	for _, fault := range faultLine.FindAllStringSubmatch(is.printed, -1) {
		number, _ := strconv.Atoi(fault[1])
		n = max(n, number+1)
	}

	return n
}

// fewest returns which of some faults may be left out while the rest still breaks something: it tries many at once
// first, and then one after another.
func fewest(faults int, breaks func(without []int) bool) (without []int) {
	for size := faults; size > 0; size /= 2 {
		for first := 0; first < faults; first += size {
			var more []int
			for number := range faults {
				isCut := number >= first && number < first+size
				if isCut || slices.Contains(without, number) {
					more = append(more, number)
				}
			}
			if len(more) > len(without) && breaks(more) {
				without = more
			}
		}
	}

	return without
}

// command is what replays the run.
func (r run) command() string {
	command := fmt.Sprintf("make replay SIM=%s SEED=%d ORDER=%d", r.pkg, r.seed, r.order)
	if r.without != nil {
		command += " WITHOUT=" + list(r.without)
	}
	if r.test != simulation {
		command += fmt.Sprintf(" ARGS=\"-test '%s'\"", strings.ReplaceAll(r.test, "$", `\$\$`))
	}

	return command
}

func list(numbers []int) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(numbers), "[]"), " ", ",")
}
