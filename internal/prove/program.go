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

// patches change Go's runtime and package sync in the programs that are built here, so that a run can be repeated
// exactly. With one processor, no preemption and no garbage collection, the first variable of the environment decides
// everything: which goroutine runs next, which case of a select is taken, in which order a map is read. Each value of
// the variable is an order.
//
// WebAssembly has a single thread as well, but bbolt does not compile for it, and it always runs goroutines in the
// order in which they became ready.
var patches = []struct{ file, old, patched string }{
	// No monitor thread, which would look for goroutines that run for too long.
	{"runtime/proc.go", `const haveSysmon = GOARCH != "wasm"`, `const haveSysmon = false`},
	// As with the race detector, chance decides whether a goroutine that was just woken runs first.
	{"runtime/proc.go", `if !haveSysmon && next {`, `if false {`},
	{"runtime/proc.go", `const randomizeScheduler = raceenabled`, `const randomizeScheduler = true`},
	// The runtime draws these random numbers from a cheap source. Its locks and its memory profiler draw from it, too,
	// at moments that depend on real time. So the patched ones come from the seeded source.
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
	// Each thread has a source of its own, and real time decides which thread runs. So all threads draw from the source
	// of the first one, and a new thread draws nothing from it when it starts.
	{"runtime/rand.go", `c := &mp.chacha8`, `c := &m0.chacha8`},
	{"runtime/rand.go", `mp.cheaprand = rand()`, `mp.cheaprand = bootstrapRand()`},
	// The first goroutine is bound to the first thread while the program starts. Whenever it waits, another thread
	// takes over. Real time decides whether that is a new thread, which would shift all later memory addresses.
	{"runtime/proc.go", "\tlockOSThread()\n\n\tif mp != &m0 {", "\tif mp != &m0 {"},
	{"runtime/proc.go", "if needUnlock {\n\t\t\tunlockOSThread()\n\t\t}", "_ = needUnlock"},
	{"runtime/proc.go", "needUnlock = false\n\tunlockOSThread()", "needUnlock = false"},
	// When a goroutine has waited for a real millisecond, a mutex is handed to it and not to the first comer. Now
	// chance decides.
	{
		"runtime/sema.go", "func internal_sync_nanotime() int64 {\n\treturn nanotime()",
		"func internal_sync_nanotime() int64 {\n\treturn int64(randn(2e6))",
	},
	// A goroutine that locks a mutex may be preempted there.
	{"sync/mutex.go", `isync "internal/sync"`, "isync \"internal/sync\"\n\t\"runtime\""},
	{
		"sync/mutex.go", "func (m *Mutex) Lock() {\n",
		"func (m *Mutex) Lock() {\n\tif runtime_randn(16) == 0 {\n\t\truntime.Gosched()\n\t}\n",
	},
	// The last two save a quarter of the time and change nothing else. Without a collector all memory is new, and a new
	// page costs more than the work in it, so pages are large; and stacks begin large, because growing copies them.
	{"runtime/mem_linux.go", "\tif debug.disablethp != 0 {", "\tsysHugePageOS(v, n)\n\tif debug.disablethp != 0 {"},
	{"runtime/stack.go", "var startingStackSize uint32 = fixedStack", "var startingStackSize uint32 = 8192"},
}

// programs is the directory of the simulations' programs. It is always the same, because each program has its path in
// memory, and a longer path may cause another order.
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

// patch writes the patched files, and returns the name of an overlay file, which makes the go command use them.
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
			return "", fmt.Errorf("%s of %s does not contain exactly once: %s", p.file, runtime.Version(), p.old)
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
