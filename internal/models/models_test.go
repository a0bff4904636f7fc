// Package models has formal models in Promela of what no test can try in every order. Spin, which Debian has, looks at
// all states of each one.
package models

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const root = "../.."

// TestServerOwnership: no order of claims, pauses, late messages and clocks that go back breaks an assertion of the
// model, and each planted fault does.
func TestServerOwnership(t *testing.T) {
	for what, setting := range map[string]string{
		"counters": "", "counters whose store loses its tail": "-DLOSS", "presence": "-DPRESENCE",
	} {
		if found := check(t, "ownership.pml", setting); found != "" {
			t.Errorf("%s: %s", what, found)
		}
	}

	for _, faulty := range []string{
		"-DNO_FENCE", "-DCLOCK_ALONE", "-DTAKES_BACK", "-DLOSS -DBACK_AND_LOST",
		"-DPRESENCE -DCLOCK_ALONE", "-DPRESENCE -DNO_NUMBERS", "-DPRESENCE -DFENCE_FALLS",
		"-DPRESENCE -DLATE_AND_AGAIN",
	} {
		if check(t, "ownership.pml", faulty) == "" {
			t.Errorf("%s is not found", faulty)
		}
	}
}

// check looks at every state of a model, and returns the assertion that one of them breaks, or "".
func check(t *testing.T, model, setting string) string {
	t.Helper()
	file, err := filepath.Abs(model)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(name string, args ...string) []byte {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v; run make setup if it is missing\n%s", name, err, said)
		}

		return said
	}

	flags := strings.Fields(setting)
	run("spin", append(flags, "-a", file)...)
	// Only assertions are checked, with at most so many MB.
	run("gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c")
	said := run("./pan", "-m100000")

	if broken := regexp.MustCompile(`assertion violated .*`).Find(said); broken != nil {
		return string(broken)
	}
	isWhole := bytes.Contains(said, []byte("errors: 0")) && !bytes.Contains(said, []byte("not completed")) &&
		!bytes.Contains(said, []byte("max search depth too small"))
	if !isWhole {
		t.Fatalf("%s %s was not looked at as a whole:\n%s", model, setting, said)
	}

	return ""
}

// TestNamedFunctions: the functions and scripts that a model names exist.
func TestNamedFunctions(t *testing.T) {
	models, err := filepath.Glob("*.pml")
	if err != nil || len(models) == 0 {
		t.Fatal("no models", err)
	}

	for _, model := range models {
		text, err := os.ReadFile(model)
		if err != nil {
			t.Fatal(err)
		}

		names := regexp.MustCompile(`\[([a-z]+/[\w/]+)\.([\w.]+)\]`).FindAllStringSubmatch(string(text), -1)
		if len(names) < 10 {
			t.Errorf("%s names %d functions", model, len(names))
		}
		for _, name := range names {
			path, function := name[1], name[2]
			if function == "lua" {
				if _, err := os.Stat(filepath.Join(root, path+".lua")); err != nil {
					t.Errorf("%s: %v", model, err)
				}
				continue
			}

			if !declares(t, filepath.Join(root, path), function) {
				t.Errorf("%s: %s has no %s", model, path, function)
			}
		}
	}
}

// declares reports whether the package in a directory declares a function, or Type.Method.
func declares(t *testing.T, dir, function string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}

	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, is := d.(*ast.FuncDecl); is && nameOf(f) == function {
				return true
			}
		}
	}

	return false
}

// nameOf returns the name of a function, or Type.Method.
func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}

	of := f.Recv.List[0].Type
	if star, is := of.(*ast.StarExpr); is {
		of = star.X
	}
	if generic, is := of.(*ast.IndexExpr); is {
		of = generic.X
	}
	is, _ := of.(*ast.Ident)
	if is == nil {
		return ""
	}

	return is.Name + "." + f.Name.Name
}
