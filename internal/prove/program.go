package main

import (
	"encoding/json"
	"fmt"
	"go/build"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// patches are what the runtime of Go does otherwise in the programs that are built here. With one processor, no
// preemption and no garbage collection, everything follows from the first variable of the environment: which goroutine
// goes on, which case of a select is taken, in which order a map is read. Another value is another order.
//
// A program for WebAssembly has one thread, too. But bbolt does not compile for it, and there goroutines go on first
// come, first served.
var patches = []struct{ file, old, patched string }{
	// No thread looks whether a goroutine runs for too long.
	{"runtime/proc.go", `const haveSysmon = GOARCH != "wasm"`, `const haveSysmon = false`},
	// As with the race detector, chance decides whether a goroutine that was just woken goes first.
	{"runtime/proc.go", `if !haveSysmon && next {`, `if false {`},
	{"runtime/proc.go", `const randomizeScheduler = raceenabled`, `const randomizeScheduler = true`},
	// Without these patches the runtime draws the following numbers from a cheap source. Its locks and the sampling of
	// memory draw from the same source, at moments that depend on real time.
	{"runtime/select.go", `j := cheaprandn(uint32(norder + 1))`, `j := randn(uint32(norder + 1))`},
	{"runtime/time.go", `t.rand = cheaprand()`, `t.rand = uint32(rand())`},
	{
		"runtime/proc.go", "for i := uint32(1); i <= n; i++ {\n\t\t\tj := cheaprandn(i + 1)",
		"for i := uint32(1); i <= n; i++ {\n\t\t\tj := randn(i + 1)",
	},
	{
		"runtime/proc.go", "for i := uint32(1); i < n; i++ {\n\t\t\tj := cheaprandn(i + 1)",
		"for i := uint32(1); i < n; i++ {\n\t\t\tj := randn(i + 1)",
	},
	{
		"runtime/rand.go", `globalRand.state.Init(*seed)`,
		`clear(seed[:]); copy(seed[:], gostringnocopy(argv_index(argv, argc+1))); globalRand.state.Init(*seed)`,
	},
	// Each thread has a source of its own, and real time decides which thread goes on. So all threads draw from the
	// source of the first one, and a new thread takes nothing from it when it starts.
	{"runtime/rand.go", `c := &mp.chacha8`, `c := &m0.chacha8`},
	{"runtime/rand.go", `mp.cheaprand = rand()`, `mp.cheaprand = bootstrapRand()`},
	// The first goroutine is bound to the first thread while the program starts. Whenever it waits, another thread goes
	// on, and real time decides whether that is a new one, whose place in memory shifts all that comes after it.
	{"runtime/proc.go", "\tlockOSThread()\n\n\tif mp != &m0 {", "\tif mp != &m0 {"},
	{"runtime/proc.go", "if needUnlock {\n\t\t\tunlockOSThread()\n\t\t}", "_ = needUnlock"},
	{"runtime/proc.go", "needUnlock = false\n\tunlockOSThread()", "needUnlock = false"},
	// A mutex hands over, rather than be taken by who comes first, when somebody has waited for a real millisecond.
	{
		"runtime/sema.go", "func internal_sync_nanotime() int64 {\n\treturn nanotime()",
		"func internal_sync_nanotime() int64 {\n\treturn int64(randn(2e6))",
	},
	// Where a goroutine takes a mutex, it may be as if it had been preempted.
	{"sync/mutex.go", `isync "internal/sync"`, "isync \"internal/sync\"\n\t\"runtime\""},
	{
		"sync/mutex.go", "func (m *Mutex) Lock() {\n",
		"func (m *Mutex) Lock() {\n\tif runtime_randn(16) == 0 {\n\t\truntime.Gosched()\n\t}\n",
	},
	// The last two change nothing but the time, by a quarter: without a collector all memory is new, and a page of it
	// costs more than what is done in it; and every stack is copied as often as it grows.
	{"runtime/mem_linux.go", "\tif debug.disablethp != 0 {", "\tsysHugePageOS(v, n)\n\tif debug.disablethp != 0 {"},
	{"runtime/stack.go", "var startingStackSize uint32 = fixedStack", "var startingStackSize uint32 = 8192"},
}

// programs is where the simulations' programs are. It is always the same place: the system tells each program its
// path, and a program in which a text is longer may have another order.
const programs = "bin/prove"

// compile builds the program of a simulation.
func compile(pkg string) error {
	overlay, err := patch()
	if err != nil {
		return err
	}

	cmd := exec.Command("go", "test", "-c", "-vet=off", "-trimpath", "-tags", "marks,nomsgpack", "-overlay", overlay,
		"-o", program(pkg), "./"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOEXPERIMENT=norandomizedheapbase64")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", pkg, err, out)
	}

	return nil
}

func program(pkg string) string {
	return filepath.Join(programs, strings.ReplaceAll(pkg, "/", "-")+".test")
}

// patch writes the patched files, and returns the name of the overlay that has go use them.
func patch() (overlay string, err error) {
	root := build.Default.GOROOT
	texts := map[string]string{}
	for _, p := range patches {
		if texts[p.file] == "" {
			text, err := os.ReadFile(filepath.Join(root, "src", p.file))
			if err != nil {
				return "", err
			}
			texts[p.file] = string(text)
		}
		if strings.Count(texts[p.file], p.old) != 1 {
			return "", fmt.Errorf("%s of %s does not have once what is patched: %s", p.file, runtime.Version(), p.old)
		}
		texts[p.file] = strings.Replace(texts[p.file], p.old, p.patched, 1)
	}

	dir, err := filepath.Abs(programs)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}

	replace := map[string]string{}
	for file, text := range texts {
		patched := filepath.Join(dir, filepath.Base(file)+".patched")
		if err := os.WriteFile(patched, []byte(text), 0o666); err != nil {
			return "", err
		}
		replace[filepath.Join(root, "src", file)] = patched
	}

	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")

	return overlay, os.WriteFile(overlay, text, 0o666)
}
