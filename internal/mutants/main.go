// Mutants tests the tests. For each deliberate fault it patches a copy of the last commit and runs tests until one
// fails, those with promises in seconds last. Each *.patch of this directory is one fault; the lines above its diff say
// what is broken and which promise that breaks. A line "first: package" there names a package to test first, when that
// is not the one whose files the patch touches.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

var (
	only    = flag.String("only", "", "a regular expression: only patches whose name matches it")
	quick   = flag.Bool("quick", false, "run only the tests of the packages that the patch touches, and no TestClock")
	verbose = flag.Bool("v", false, "print what the tests print")
	byTest  = flag.String("by", "", "run only this test, such as cmd/headcount/faults.TestClockHistories")

	// touched finds the packages of a patch: of its lines "first:" and of the files that it changes.
	touched = regexp.MustCompile(`(?m)^(?:first: |\+\+\+ b/)(.*?)(?:/[^/\n]+\.\w+)?$`)
)

// imports makes go list print a package and then all packages that it and its tests import.
const imports = `{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}`

func main() {
	log.SetFlags(0)
	flag.Parse()
	pattern := regexp.MustCompile(*only)

	root, err := run(".", "git", "rev-parse", "--show-toplevel")
	root = strings.TrimSpace(root)
	patches, _ := filepath.Glob(filepath.Join(root, "internal/mutants/*.patch"))
	patches = slices.DeleteFunc(patches, func(p string) bool { return !pattern.MatchString(filepath.Base(p)) })

	// All copies share one build cache, and tests that run the program build it from their copy.
	if err := errors.Join(err, os.Setenv("GOFLAGS", "-trimpath"), os.Unsetenv("HEADCOUNT_BIN")); err != nil {
		log.Fatal(err)
	}

	killed, survived := 0, 0
	for _, patch := range patches {
		began := time.Now()
		by, err := try(root, patch)
		switch {
		case err != nil:
			by = "error: " + err.Error()
		case by == "":
			by, survived = "SURVIVED", survived+1
		default:
			killed++
		}
		fmt.Printf("%-42s %5.0f s  %s\n", filepath.Base(patch), time.Since(began).Seconds(), by)
	}

	if failed := len(patches) - killed - survived; failed > 0 {
		fmt.Printf("%d could not be tried\n", failed)
	}
	fmt.Printf("%d mutants: %d killed, %d survived\n", len(patches), killed, survived)
	if len(patches) == 0 || killed < len(patches) {
		os.Exit(1)
	}
}

// try returns the test that fails with the patch and passes without it, or "" when no test fails.
func try(root, patch string) (by string, err error) {
	dir, tempErr := os.MkdirTemp("", "mutant")
	defer os.RemoveAll(dir)

	_, err = run(root, "sh", "-c", `git archive HEAD | tar -x -C "$0" && cd "$0" && git apply "$1"`, dir, patch)
	text, readErr := os.ReadFile(patch)
	list, listErr := run(dir, "go", "list", "-f", imports, "./...")
	if err := errors.Join(tempErr, err, readErr, listErr); err != nil {
		return "", err
	}

	groups := order(string(text), list)
	kinds := []string{"-skip=^TestClock", "-run=^TestClock"}
	if pkg, test, only := strings.Cut(*byTest, "."); only {
		groups = [][]string{{"./" + pkg}}
		kinds = []string{"-run=^" + test + "$"}
	}

	for _, kind := range kinds {
		for _, packages := range groups {
			pkg, test, err := failing(dir, append([]string{kind}, packages...)...)
			if err != nil || pkg == "" && *quick {
				return "", err
			}
			if pkg == "" {
				continue
			}

			// A test that also fails without the fault has not found it.
			_, err = run(dir, "git", "apply", "-R", patch)
			top, _, _ := strings.Cut(test, "/")
			if again, _, failed := failing(dir, pkg, "-run", "^"+top); again != "" || err != nil || failed != nil {
				return "", errors.Join(fmt.Errorf("%s.%s fails without the fault, too", pkg, top), err, failed)
			}

			return strings.TrimPrefix(pkg, "headcount/") + "." + cmp.Or(test, "TestMain"), nil
		}
	}

	return "", nil
}

// order groups the packages of the list: those that the patch touches, those that import these, and the rest.
func order(patch, list string) [][]string {
	groups := make([][]string, 3)
	for line := range strings.Lines(list) {
		words, group := strings.Fields(line), 2
		for _, m := range touched.FindAllStringSubmatch(patch, -1) {
			if at := slices.Index(words, "headcount/"+m[1]); at >= 0 {
				group = min(group, at, 1)
			}
		}
		groups[group] = append(groups[group], words[0])
	}
	return slices.DeleteFunc(groups, func(g []string) bool { return len(g) == 0 })
}

// failing runs go test until a test fails, and returns that test and its package. test is "" when the package fails as
// a whole.
func failing(dir string, args ...string) (pkg, test string, err error) {
	c := exec.Command("go", append([]string{
		"test", "-short", "-json", "-vet=off", "-failfast", "-timeout=20m",
	}, args...)...)
	c.Dir = dir
	// A process group of its own, so that the processes which tests have started end with it.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}

	out, err := c.StdoutPipe()
	if err := errors.Join(err, c.Start()); err != nil {
		return "", "", err
	}

	for events := json.NewDecoder(out); ; {
		var e struct{ Action, Package, Test, Output, FailedBuild string }
		if err := events.Decode(&e); err != nil {
			if waited := c.Wait(); err == io.EOF && waited == nil {
				return "", "", nil
			}
			return "", "", fmt.Errorf("go test %s: %w", strings.Join(args, " "), err)
		}

		if *verbose {
			fmt.Print(e.Output)
		}

		if e.Action == "fail" {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // the tests that still run
			_ = c.Wait()

			if e.FailedBuild != "" {
				return "", "", fmt.Errorf("the tests of %s do not build", e.Package)
			}
			return e.Package, e.Test, nil
		}
	}
}

func run(dir, name string, args ...string) (out string, err error) {
	c := exec.Command(name, args...)
	c.Dir = dir
	c.Stderr = os.Stderr

	bytes, err := c.Output()
	return string(bytes), err
}
