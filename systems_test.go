package headcount_test

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"

	"headcount/internal/testkit"
)

// TestOtherSystemsAreServed type-checks every package and its tests for the other
// systems. It reads the sources of what they import, since compiling all that
// for each system takes minutes.
func TestOtherSystemsAreServed(t *testing.T) {
	testkit.Long(t)
	for _, system := range []string{"darwin/arm64", "linux/arm64", "freebsd/amd64"} {
		t.Run(system, func(t *testing.T) {
			goos, goarch, _ := strings.Cut(system, "/")
			found, err := packages.Load(&packages.Config{
				Mode:  packages.LoadAllSyntax,
				Env:   append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"),
				Tests: true,
			}, module+"/...")
			if err != nil {
				t.Fatal(err)
			}
			if len(found) < 20 {
				t.Fatalf("%d packages are found: is this test looking at the module?", len(found))
			}
			for _, pkg := range found {
				for _, err := range pkg.Errors {
					t.Error(err)
				}
			}
		})
	}
}
