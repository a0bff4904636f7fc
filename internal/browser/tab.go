package browser

import (
	"context"
	_ "embed"
	"encoding/base64"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dop251/goja"
	"github.com/dop251/goja_nodejs/require"
	"github.com/dop251/goja_nodejs/url"
)

// Tab is one tab, with its page.
type Tab struct {
	b      *Browser
	vm     *goja.Runtime
	page   context.Context // ends with the tab
	end    context.CancelFunc
	timers map[int64]*time.Timer
	timer  int64 // id of the newest one
	locks  []*request

	frozen  bool
	waiting []func() // tasks of a frozen tab, which run when it thaws
}

//go:embed platform.js
var platform string

// platformProgram is compiled once for all tabs.
var platformProgram = sync.OnceValue(func() *goja.Program {
	return goja.MustCompile("platform.js", platform, true)
})

// Open opens a tab with a page. Its script is the body of an async function, which may use the globals and load(file):
// that returns the exports of one of the server's modules.
func (b *Browser) Open(globals map[string]any, script string) *Tab {
	page, end := context.WithCancel(b.ctx)
	t := &Tab{b: b, vm: goja.New(), page: page, end: end, timers: map[int64]*time.Timer{}}
	b.tabs = append(b.tabs, t)

	t.vm.SetTimeSource(time.Now)
	t.vm.SetRandSource(b.cfg.Chance.Float64)
	t.vm.SetFieldNameMapper(goja.UncapFieldNameMapper())
	new(require.Registry).Enable(t.vm)
	url.Enable(t.vm)
	t.provide()
	for name, value := range globals {
		t.set(name, value)
	}

	t.run(func() error {
		_, err := t.vm.RunProgram(platformProgram())
		return err
	})
	t.Run("(async () => {" + script + "})().catch(reportError)")

	return t
}

// Run runs a script in the tab, unless it has ended. A frozen tab runs it later.
func (t *Tab) Run(script string) {
	t.task(func() {
		t.run(func() error {
			_, err := t.vm.RunString(script)
			return err
		})
	})
}

// Leave ends the tab as a user does who closes it: the page receives the event pagehide.
func (t *Tab) Leave() {
	t.Thaw()
	t.Run("windowEvents.dispatchEvent(new Event('pagehide'))")
	t.b.soon = append(t.b.soon, t.Kill)
}

// Kill ends the tab at once. Its connections close, and its locks are released.
func (t *Tab) Kill() {
	t.end()
	t.b.tabs = slices.DeleteFunc(t.b.tabs, func(o *Tab) bool { return o == t })
	t.b.channels = slices.DeleteFunc(t.b.channels, func(c *channel) bool { return c.tab == t })
	for _, timer := range t.timers {
		timer.Stop()
	}
	for _, r := range t.locks {
		t.b.withdraw(r)
		t.b.release(r)
	}
}

// Hide hides the page or shows it again, and the page learns of it.
func (t *Tab) Hide(hidden bool) {
	t.Run(fmt.Sprintf("document.hidden = %t; windowEvents.dispatchEvent(new Event('visibilitychange'))", hidden))
}

// Freeze makes the tab do nothing until Thaw.
func (t *Tab) Freeze() { t.frozen = true }

// Thaw runs all tasks that a frozen tab has put off.
func (t *Tab) Thaw() {
	t.frozen = false
	for _, f := range t.waiting {
		t.task(f)
	}
	t.waiting = nil
}

// task runs f after the function that runs now. A frozen tab runs it when it thaws, and a tab that has ended never.
func (t *Tab) task(f func()) {
	t.b.soon = append(t.b.soon, func() {
		switch {
		case t.page.Err() != nil:
		case t.frozen:
			t.waiting = append(t.waiting, f)
		default:
			f()
		}
	})
}

// later runs f as a task. Goroutines other than the loop call it.
func (t *Tab) later(f func()) { t.b.Do(func() { t.task(f) }) }

// run runs a script, and reports the exception that it throws.
func (t *Tab) run(script func() error) {
	if err := script(); err != nil {
		t.b.cfg.Fail(err.Error())
	}
}

func (t *Tab) set(name string, value any) {
	t.run(func() error { return t.vm.Set(name, value) })
}

// calling returns a Go function that calls a function of a script.
func (t *Tab) calling(f goja.Value) func(args ...any) {
	call, ok := goja.AssertFunction(f)
	if !ok {
		panic(t.vm.NewTypeError("not a function"))
	}

	return func(args ...any) {
		values := make([]goja.Value, len(args))
		for i, arg := range args {
			values[i] = t.vm.ToValue(arg)
		}
		t.run(func() error {
			_, err := call(goja.Undefined(), values...)
			return err
		})
	}
}

// provide defines the globals that platform.js and the server's modules need.
func (t *Tab) provide() {
	b := t.b
	begun := time.Now()

	t.set("host", map[string]any{
		"address": b.cfg.Address,
		"random":  b.cfg.Chance.Float64,
		"now":     func() float64 { return float64(time.Since(begun)) / float64(time.Millisecond) },
		"say":     b.cfg.Say,
		"failed":  b.cfg.Fail,
		"store":   func(key, value string) { b.stored[key] = value },
		"stored": func(key string) any {
			if value, ok := b.stored[key]; ok {
				return value
			}
			return nil
		},
		"channel": t.channel,
		"lock":    t.lock,
		"socket":  t.socket,
		"call":    t.call,
	})
	t.set("setTimeout", func(call goja.FunctionCall) goja.Value { return t.start(call, false) })
	t.set("setInterval", func(call goja.FunctionCall) goja.Value { return t.start(call, true) })
	t.set("clearTimeout", t.clear)
	t.set("clearInterval", t.clear)
	t.set("atob", func(text string) (string, error) {
		decoded, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(text, "="))
		return string(decoded), err
	})
	t.set("load", t.load)
}

// start is setTimeout and, if again is set, setInterval.
func (t *Tab) start(call goja.FunctionCall, again bool) goja.Value {
	f := t.calling(call.Argument(0))
	delay := max(time.Duration(call.Argument(1).ToFloat()*float64(time.Millisecond)), time.Millisecond)
	var args []any
	for _, arg := range call.Arguments[min(2, len(call.Arguments)):] {
		args = append(args, arg)
	}

	t.timer++
	id := t.timer
	var fire func()
	fire = func() {
		t.later(func() {
			if t.timers[id] == nil {
				return // it was cleared meanwhile
			}
			if again {
				t.timers[id] = time.AfterFunc(delay, fire)
			} else {
				delete(t.timers, id)
			}
			f(args...)
		})
	}
	t.timers[id] = time.AfterFunc(delay, fire)

	return t.vm.ToValue(id)
}

func (t *Tab) clear(id goja.Value) {
	n := id.ToInteger() // scripts may clear timers that they never set
	if timer := t.timers[n]; timer != nil {
		timer.Stop()
		delete(t.timers, n)
	}
}

func (t *Tab) channel(name string, receive goja.Value) map[string]any {
	received := t.calling(receive)
	c := &channel{tab: t, name: name, receive: func(text string) { received(text) }}
	t.b.channels = append(t.b.channels, c)

	return map[string]any{
		"post":  func(text string) { t.b.post(c, text) },
		"close": func() { t.b.close(c) },
	}
}

func (t *Tab) lock(name string, steal bool, granted, stolen goja.Value) map[string]any {
	grant, lose := t.calling(granted), t.calling(stolen)
	r := &request{tab: t, name: name, granted: func() { grant() }, stolen: func() { lose() }}
	t.locks = append(t.locks, r)
	t.b.request(r, steal)

	return map[string]any{
		"release":  func() { t.b.release(r) },
		"withdraw": func() bool { return t.b.withdraw(r) },
	}
}

// Each of the server's modules exports in one of two ways: a list at its end, or one function.
var (
	exportedList     = regexp.MustCompile(`export\s*\{([^}]*)\};?\s*$`)
	exportedFunction = regexp.MustCompile(`export default ((?:async )?function (\w+))`)
)

// script turns one of the server's modules into a script. The script's value is a function that returns the module's
// exports. The interpreter has neither modules nor async generators. The client has one async generator, for
// applications that loop over values with `for await`; here it becomes an async function, which no simulation calls.
func (t *Tab) script(file string) (string, error) {
	raw, err := fs.ReadFile(t.b.cfg.Files, file)
	if err != nil {
		return "", err
	}

	text := string(raw)
	exports := ""
	if found := exportedList.FindStringSubmatch(text); found != nil {
		text = strings.TrimSuffix(text, found[0])
		exports = regexp.MustCompile(`([\w$]+) as (\w+)`).ReplaceAllString(found[1], "$2: $1")
	}
	if found := exportedFunction.FindStringSubmatch(text); found != nil {
		text = strings.Replace(text, found[0], found[1], 1)
		exports = "default: " + found[2]
	}

	text = strings.NewReplacer(
		"import(", "load(", "import.meta", "meta", "async*", "async ", "yield*", "return ",
	).Replace(text)

	return "(meta) => {" + text + "\nreturn {" + exports + "}}", nil
}

// programs are the compiled modules, by their files. All tabs of a process share them.
var programs sync.Map

// load returns a promise of a module's exports. It requests the file, as a browser does, so that load fails when the
// server cannot be reached; the module itself comes from Config.Files.
func (t *Tab) load(name string) *goja.Promise {
	promise, resolve, reject := t.vm.NewPromise()
	file, _, _ := strings.Cut(strings.TrimPrefix(name, "./"), "?")
	address := t.b.cfg.Address + "-/" + file

	fail := func(why string) { t.run(func() error { return reject(why) }) }
	answered := func() {
		exports, err := t.exports(file, address)
		if err != nil {
			fail(err.Error())
			return
		}
		t.run(func() error { return resolve(exports) })
	}
	t.ask(t.page, asked{method: "GET", url: address}, answering{
		answered: func(int, map[string]string, string) { answered() }, failed: func() { fail("not loaded") },
	})

	return promise
}

func (t *Tab) exports(file, address string) (goja.Value, error) {
	program, known := programs.Load(file)
	if !known {
		text, err := t.script(file)
		if err != nil {
			return nil, err
		}
		program, err = goja.Compile(file, text, true)
		if err != nil {
			return nil, err
		}
		programs.Store(file, program)
	}

	module, err := t.vm.RunProgram(program.(*goja.Program))
	if err != nil {
		return nil, err
	}
	call, _ := goja.AssertFunction(module)

	return call(goja.Undefined(), t.vm.ToValue(map[string]any{"url": address}))
}
