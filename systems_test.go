package headcount_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

// TestServerOtherSystemsAreServed type-checks every package and its tests for the other systems. Of imported packages
// it reads the sources without the bodies of functions: compiling everything for each system would take minutes.
func TestServerOtherSystemsAreServed(t *testing.T) {
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}

	for _, system := range []string{"darwin/arm64", "linux/arm64", "freebsd/amd64"} {
		goos, goarch, _ := strings.Cut(system, "/")
		found, err := packages.Load(&packages.Config{
			Mode:  packages.LoadAllSyntax,
			Env:   append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"),
			Tests: true,
			ParseFile: func(set *token.FileSet, name string, text []byte) (*ast.File, error) {
				file, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
				// The generated main file of a test is outside the module as well, and has another ending.
				if file != nil && strings.HasSuffix(name, ".go") && !strings.HasPrefix(name, root) {
					dropBodies(file)
				}

				return file, err
			},
		}, module+"/...")

		if err != nil {
			t.Fatal(err)
		}
		if len(found) < 20 {
			t.Fatalf("%s: only %d packages were found: was the module read?", system, len(found))
		}

		for _, pkg := range found {
			for _, err := range pkg.Errors {
				t.Errorf("%s: %v", system, err)
			}
		}
	}
}

// dropBodies removes the bodies of the functions of a file.
func dropBodies(file *ast.File) {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			f.Body = nil
		}
	}
}
