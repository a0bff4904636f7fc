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

// run is one seed of a simulation, in one order of goroutines, and without some of the faults. The same run always has
// the same trace, byte for byte.
type run struct {
	pkg, test string
	seed      uint64
	order     uint64 // seed of the runtime's choices: see patches
	without   []int  // numbers of the faults that are left out
}

// result is the outcome of a run.
type result struct {
	printed string
	crash   string        // the output of a run that ended early
	broke   string        // the first promise that it broke, and how: "once: sum1 is 5, ..."; "": none
	cpu     time.Duration // that it took
}

// trace returns the lines of the trace. They are without the lines of package testing, which have real times. A trace
// has thousands of lines, so this takes half as long as a run.
func (res result) trace() string { return strings.Join(traceLine.FindAllString(res.printed, -1), "") }

// timeout bounds a run. Nothing preempts goroutines, so one that waits for another in a busy loop never ends.
const timeout = 5 * time.Minute

var (
	traceLine  = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  .*\n`)
	brokenLine = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  BROKEN (.*)$`)
	faultLine  = regexp.MustCompile(`(?m)^ *\d+\.\d{3}  fault (\d+):$`)
	crashLine  = regexp.MustCompile(`(?m)^(?:panic|fatal error): .*$`)
)

// do runs the simulation in a process of its own.
func (r run) do() (result, error) {
	path, err := filepath.Abs(program(r.pkg))
	if err != nil {
		return result{}, err
	}

	ctx, stop := context.WithTimeout(context.Background(), timeout)
	defer stop()

	// The output goes to a file, because through a pipe each of its thousands of lines would wake this process.
	out, err := os.CreateTemp("", "trace-")
	if err != nil {
		return result{}, err
	}
	defer os.Remove(out.Name())
	defer out.Close()

	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, path, "-test.run", r.test, "-test.timeout", "0",
		"-seed", fmt.Sprint(r.seed), "-without", list(r.without))
	cmd.Dir = r.pkg     // as go test does
	cmd.Env = []string{ // the first variable decides the order: see patches
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

	res := resultOf(string(printed), errs.String(), err)
	res.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()

	return res, nil
}

// resultOf reads what a run printed.
func resultOf(out, errs string, failed error) result {
	res := result{printed: out}
	// Hardly any run breaks a promise, and this check is a thousand times as fast as the expression below.
	if !strings.Contains(out, "  BROKEN ") && failed == nil {
		return res
	}

	if found := brokenLine.FindStringSubmatch(out); found != nil {
		res.broke = found[1]
	} else if failed != nil {
		res.crash = cmp.Or(errs, traceLine.ReplaceAllString(out, ""))
		res.broke = fmt.Sprintf("–: %v %s", failed, crashLine.FindString(res.crash))
	}

	return res
}

// promise returns the name of the promise that was broken.
func (res result) promise() string {
	name, _, _ := strings.Cut(res.broke, ": ")
	return name
}

// find tries some orders until the named promise is broken; "": any promise. It returns the last run that it tried.
func (r run) find(promise string, orders uint64) (run, result, error) {
	for first := r.order; ; r.order++ {
		res, err := r.do()
		found := res.broke != "" && (promise == "" || res.promise() == promise)
		if err != nil || found || r.order+1 == first+orders {
			return r, res, err
		}
	}
}

// shrink leaves out as many faults as it can while some order still breaks the same promise.
func (r run) shrink(res result) (run, result) {
	fewest(res.faults(), func(without []int) bool {
		less := r
		less.without = without
		less, then, err := less.find(res.promise(), 3)
		if err != nil || then.promise() != res.promise() {
			return false
		}

		r = less
		res = then

		return true
	})

	return r, res
}

// faults returns how many faults the run has, including those that were left out.
func (res result) faults() (n int) {
	for _, fault := range faultLine.FindAllStringSubmatch(res.printed, -1) {
		number, _ := strconv.Atoi(fault[1])
		n = max(n, number+1)
	}

	return n
}

// fewest returns which of the faults may be left out while the rest still breaks a promise. It tries to leave out many
// at once first, and in the end single ones.
func fewest(faults int, breaks func(without []int) bool) (without []int) {
	for size := faults; size > 0; size /= 2 {
		for first := 0; first < faults; first += size {
			var more []int
			for number := range faults {
				leftOut := number >= first && number < first+size
				if leftOut || slices.Contains(without, number) {
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

// command returns the command that replays the run.
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
