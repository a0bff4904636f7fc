// Package promises ends a program that has broken a promise of docs/promises.md. The code that checks promises has the
// build tag promises; the programs that tests start are built with it.
package promises

import (
	"fmt"
	"os"
)

// status is the exit status of a program that has broken a promise.
const status = 70

// Broken says which promise is broken, and ends the program.
func Broken(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "a promise is broken: "+format+"\n", args...)
	os.Exit(status)
}
