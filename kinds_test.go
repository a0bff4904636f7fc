package headcount_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A test is one of three kinds, and its name says which:
//
//   - TestServerXxx has a real server, a process or a socket, and no limit in seconds.
//   - TestClockXxx holds a promise in seconds, kills or stops a process at work, or waits for a timer of the program.
//   - Every other test is pure: it has no clock but that of synctest, no socket and no process.
//
// The Makefile selects tests by these names, so a wrong name makes a pure test slow and one in real time run twice.
var inRealTime = regexp.MustCompile(`^Test(Server|Clock)`)

// outside has the names by which a test leaves its own process, by import path. "*" stands for every name of a package.
var outside = map[string]string{
	"os/exec": "*",
	"os":      "StartProcess FindProcess",
	"net": "Listen ListenTCP ListenUDP ListenPacket ListenUnix ListenConfig " +
		"Dial DialTCP DialUDP DialTimeout Dialer",
	"net/http":                       "Get Head Post PostForm DefaultClient DefaultTransport ListenAndServe",
	"net/http/httptest":              "NewServer NewTLSServer NewUnstartedServer",
	"crypto/tls":                     "Dial DialWithDialer Dialer Listen",
	"github.com/coder/websocket":     "Dial",
	"github.com/jackc/pgx/v5":        "Connect ConnectConfig",
	"github.com/redis/go-redis/v9":   "NewClient NewClusterClient NewUniversalClient",
	"golang.org/x/tools/go/packages": "Load", // runs go list
	module + "/client":               "Dial",
	module + "/internal/pgtest":      "*",
	module + "/internal/redistest":   "*",
	module + "/internal/servertest":  "*",
}

// clock has the names by which a test waits for the clock. Within a bubble of synctest that is the bubble's own clock.
var clock = map[string]string{
	"time": "Sleep After AfterFunc NewTimer NewTicker Tick",
}

func lists(table map[string]string, n name) bool {
	names := table[n.pkg]

	return names == "*" || slices.Contains(strings.Fields(names), n.name)
}

// name is a name at the top level of a package. Methods have the name of their type.
type name struct{ pkg, name string }

// use is a name that a declaration uses.
type use struct {
	name
	bubbled bool // used in an argument of a function that calls the argument in a bubble
	method  bool // used in a method or a variable, which is called wherever its value is used
}

// program has the declarations of all test files, and of the packages that exist for tests.
type program struct {
	uses  map[name][]use
	tests []name

	// bubbles has the functions that run an argument in a bubble: synctest.Test, and those that pass an argument on to
	// it.
	bubbles map[name]bool
}

// forTests reports whether a file is a test or supports tests.
func forTests(file string) bool {
	dir := path.Dir(file)

	return strings.HasSuffix(file, "_test.go") || strings.HasSuffix(dir, "test") || strings.HasSuffix(dir, "testkit")
}

// newProgram reads parsed files, by their paths within the module.
func newProgram(files map[string]*ast.File) *program {
	p := &program{bubbles: map[name]bool{{"testing/synctest", "Test"}: true}}

	// A function can only be recognized after those that it calls, so the files are read until no more are found.
	for known := 0; known < len(p.bubbles); {
		known = len(p.bubbles)
		p.uses = map[name][]use{}
		p.tests = nil
		for _, file := range slices.Sorted(maps.Keys(files)) {
			p.read(path.Join(module, path.Dir(file)), files[file])
		}
	}

	return p
}

func (p *program) read(pkg string, file *ast.File) {
	imports := map[string]string{}
	for _, spec := range file.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		imports[importedAs(spec, imported)] = imported
	}

	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			p.readFunction(name{pkg, d.Name.Name}, imports, d)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				p.readSpec(pkg, imports, spec)
			}
		}
	}
}

var version = regexp.MustCompile(`/v\d+$`)

// importedAs returns the name under which a file imports a package. Without the package's source this is the last part
// of its path.
func importedAs(spec *ast.ImportSpec, imported string) string {
	if spec.Name != nil {
		return spec.Name.Name
	}

	return strings.TrimPrefix(path.Base(version.ReplaceAllString(imported, "")), "go-")
}

func (p *program) readFunction(n name, imports map[string]string, d *ast.FuncDecl) {
	r := reader{program: p, of: n, imports: imports}
	if d.Recv != nil {
		r.of.name = receiver(d.Recv.List[0].Type)
		r.method = true
	} else if strings.HasPrefix(n.name, "Test") && n.name != "TestMain" {
		p.tests = append(p.tests, n)
	}

	for _, field := range d.Type.Params.List {
		if _, ok := field.Type.(*ast.FuncType); ok {
			for _, param := range field.Names {
				r.params = append(r.params, param.Name)
			}
		}
	}

	if d.Body != nil {
		ast.Walk(r, d.Body)
	}
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}

	return ""
}

func (p *program) readSpec(pkg string, imports map[string]string, spec ast.Spec) {
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		ast.Walk(reader{program: p, of: name{pkg, spec.Name.Name}, imports: imports}, spec.Type)
	case *ast.ValueSpec:
		for _, n := range spec.Names {
			for _, value := range spec.Values {
				ast.Walk(reader{program: p, of: name{pkg, n.Name}, imports: imports, method: true}, value)
			}
		}
	}
}

// reader walks one declaration.
type reader struct {
	*program
	of      name
	imports map[string]string
	params  []string // names of the parameters that are functions
	bubbled bool
	method  bool
}

// Visit notes the names that a node uses.
func (r reader) Visit(n ast.Node) ast.Visitor {
	switch n := n.(type) {
	case *ast.FuncType: // names types and makes no value of them
		return nil

	case *ast.CallExpr:
		if called, ok := r.resolve(n.Fun); ok && r.bubbles[called] {
			r.readBubble(called, n.Args)
			return nil
		}

	case *ast.KeyValueExpr:
		if _, ok := n.Key.(*ast.Ident); !ok { // which is a field
			ast.Walk(r, n.Key)
		}
		r.readValue(n.Value)
		return nil

	case *ast.CompositeLit:
		if n.Type != nil {
			ast.Walk(r, n.Type)
		}
		for _, element := range n.Elts {
			r.readValue(element)
		}
		return nil

	case *ast.Field:
		ast.Walk(r, n.Type)
		return nil

	case *ast.AssignStmt:
		for _, value := range n.Rhs {
			r.readValue(value)
		}
		for _, to := range n.Lhs {
			ast.Walk(r, to)
		}
		return nil

	case *ast.SelectorExpr:
		if full, ok := r.resolve(n); ok {
			r.note(full)
		} else {
			ast.Walk(r, n.X)
		}
		return nil

	case *ast.Ident:
		if n.Name != "_" {
			r.note(name{r.of.pkg, n.Name})
		}
	}

	return r
}

func (r reader) readBubble(called name, args []ast.Expr) {
	r.note(called)

	inside := r
	inside.bubbled = true
	for _, arg := range args {
		ast.Walk(inside, arg)
		ast.Inspect(arg, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && slices.Contains(r.params, id.Name) {
				r.bubbles[r.of] = true
			}
			return true
		})
	}
}

// readValue treats a function in a variable or a table like a method: it may be called in a bubble that begins later.
func (r reader) readValue(value ast.Expr) {
	if _, ok := value.(*ast.FuncLit); ok {
		r.method = true
	}

	ast.Walk(r, value)
}

func (r reader) note(n name) {
	r.uses[r.of] = append(r.uses[r.of], use{n, r.bubbled, r.method})
}

// resolve returns the name that an expression may stand for: one of this package, or of an imported one.
func (r reader) resolve(e ast.Expr) (n name, ok bool) {
	switch e := e.(type) {
	case *ast.Ident:
		return name{r.of.pkg, e.Name}, true
	case *ast.IndexExpr:
		return r.resolve(e.X)
	case *ast.SelectorExpr:
		if x, isName := e.X.(*ast.Ident); isName {
			imported, isImport := r.imports[x.Name]
			return name{imported, e.Sel.Name}, isImport
		}
	}

	return name{}, false
}

// leaves returns the names through which a test reaches something that a pure test may not use. It is empty for a pure
// test. The code of the product is not examined. A local name counts as the function of the package with the same name:
// rename the local.
func (p *program) leaves(test name) (way []string) {
	type place struct {
		name
		bubbled bool
	}

	entersBubble := p.entersBubble(test)
	from := map[place]place{}
	for todo := []place{{name: test}}; len(todo) > 0; todo = todo[1:] {
		for _, u := range p.uses[todo[0].name] {
			// A value that is made before the bubble may be used in it.
			to := place{u.name, todo[0].bubbled || u.bubbled || u.method && entersBubble}

			// A name is visited once inside a bubble and once outside: sleeping is wrong only in the second case.
			if _, known := from[to]; known || to.name == test {
				continue
			}

			from[to] = todo[0]
			todo = append(todo, to)
			if lists(outside, to.name) || !to.bubbled && lists(clock, to.name) {
				for to.name != test {
					way = append(way, strings.TrimPrefix(to.pkg, module+"/")+"."+to.name.name)
					to = from[to]
				}
				slices.Reverse(way)

				return way
			}
		}
	}

	return nil
}

// entersBubble reports whether a test reaches a call of a bubble.
func (p *program) entersBubble(test name) bool {
	known := map[name]bool{test: true}
	for todo := []name{test}; len(todo) > 0; todo = todo[1:] {
		if p.bubbles[todo[0]] {
			return true
		}

		for _, u := range p.uses[todo[0]] {
			if !known[u.name] {
				known[u.name] = true
				todo = append(todo, u.name)
			}
		}
	}

	return false
}

// wrongKinds returns a line for each test whose name does not say its kind.
func (p *program) wrongKinds() (wrong []string) {
	for _, test := range p.tests {
		way := p.leaves(test)
		where := strings.TrimPrefix(test.pkg, module+"/") + "." + test.name

		if real := inRealTime.MatchString(test.name); real && way == nil {
			wrong = append(wrong, where+" is pure: its name is to say so")
		} else if !real && way != nil {
			wrong = append(wrong, where+" is not pure, it reaches "+strings.Join(way, ", "))
		}
	}

	return wrong
}

// sources parses the wanted files of the module. Paths begin in the directory of the module.
func sources(t *testing.T, wanted func(file string) bool) map[string]*ast.File {
	t.Helper()

	files := map[string]*ast.File{}
	err := filepath.WalkDir(".", func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && slices.Contains([]string{"node_modules", "testdata", ".git"}, d.Name()) {
			return fs.SkipDir
		}

		file = filepath.ToSlash(file)
		if strings.HasSuffix(file, ".go") && wanted(file) {
			files[file], err = parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	return files
}

// TestNamesSayTheKind: the name of each test in all packages says its kind.
func TestNamesSayTheKind(t *testing.T) {
	p := newProgram(sources(t, forTests))

	// Read from another directory, the walk would find no tests, and none of them would be wrong.
	if len(p.tests) < 500 {
		t.Errorf("%d tests are found: is this test looking at the module?", len(p.tests))
	}

	for _, line := range p.wrongKinds() {
		t.Error(line)
	}
}

// TestWrongKindsAreFound checks small programs: the body of a test, and the other declarations of its package.
func TestWrongKindsAreFound(t *testing.T) {
	const head = `package p
		import ("net"; "net/http/httptest"; "os/exec"; "testing"; "testing/synctest"; "time"
			"headcount/internal/redistest"; "headcount/presence/presencetest")
		`
	support := map[string]string{
		"internal/redistest/redistest.go": `package redistest; func Start() {}`,
		"presence/presencetest/presencetest.go": `package presencetest; import "time"
			func Run() { wait() }
			func wait() { time.Sleep(1) }
			func Count() {}`,
	}

	for title, tc := range map[string]struct {
		source string
		want   string // empty: the name is right
	}{
		"pure": {`func TestX(t *testing.T) { f() }
			func f() { g() }
			func g() { f() }`, ""},
		"a socket":           {`func TestX(t *testing.T) { net.Listen("tcp", "") }`, "net.Listen"},
		"a pipe":             {`func TestX(t *testing.T) { net.Pipe() }`, ""},
		"a server of HTTP":   {`func TestX(t *testing.T) { httptest.NewServer(nil) }`, "net/http/httptest.NewServer"},
		"a recorder of HTTP": {`func TestX(t *testing.T) { httptest.NewRecorder() }`, ""},
		"a process":          {`func TestX(t *testing.T) { exec.Command("x") }`, "os/exec.Command"},
		"Redis":              {`func TestX(t *testing.T) { redistest.Start() }`, "internal/redistest.Start"},
		"sleep":              {`func TestX(t *testing.T) { time.Sleep(1) }`, "time.Sleep"},
		"a time":             {`func TestX(t *testing.T) { time.Now() }`, ""},
		"through functions": {`func TestX(t *testing.T) { f() }
			func f() { g() }
			func g() { time.Sleep(1) }`, "p.f, p.g, time.Sleep"},
		"through a value": {`func TestX(t *testing.T) { use(f) }
			func use(func()) {}
			func f() { net.Dial("", "") }`, "p.f, net.Dial"},
		"through a table": {`func TestX(t *testing.T) { _ = all }
			var all = map[string]func(){"f": f}
			func f() { time.Tick(1) }`, "p.all, p.f, time.Tick"},
		"a table beside a bubble": {`func TestX(t *testing.T) { for _, g := range all { synctest.Test(t, func(*testing.T) { g() }) } }
			var all = []func(){f}
			func f() { time.Sleep(1) }`, ""},
		"through a method": {`func TestX(t *testing.T) { use(&T{}) }
			func use(any) {}
			type T struct{}
			func (*T) f() { <-time.After(1) }`, "p.T, time.After"},
		"through a part": {`func TestX(t *testing.T) { _ = S{} }
			type S struct{ t *T }
			type T struct{}
			func (*T) f() { time.Sleep(1) }`, "p.S, p.T, time.Sleep"},
		"through a package": {
			`func TestX(t *testing.T) { presencetest.Run() }`,
			"presencetest.Run, presence/presencetest.wait, time.Sleep",
		},
		"another name of a package": {`func TestX(t *testing.T) { presencetest.Count() }`, ""},
		"sleep in a bubble": {`func TestX(t *testing.T) { synctest.Test(t, func(t *testing.T) { f() }) }
			func f() { time.Sleep(1) }`, ""},
		"sleep beside a bubble": {`func TestX(t *testing.T) { synctest.Test(t, func(t *testing.T) { f() }); f() }
			func f() { time.Sleep(1) }`, "p.f, time.Sleep"},
		"a socket in a bubble": {`func TestX(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { net.Dial("", "") }) }`, "net.Dial"},
		"a bubble of the package": {`func TestX(t *testing.T) { with(t, func() { time.Sleep(1) }) }
			func with(t *testing.T, fn func()) { synctest.Test(t, func(*testing.T) { fn() }) }`, ""},
		"a value beside a bubble": {`func TestX(t *testing.T) { v := &T{}; synctest.Test(t, func(t *testing.T) { v.f() }) }
			type T struct{}
			func (*T) f() { time.Sleep(1) }`, ""},
		"a function beside a bubble": {`func TestX(t *testing.T) { f := func() { time.Sleep(1) }
			synctest.Test(t, func(t *testing.T) { f() }) }`, ""},
		"a function without a bubble": {
			`func TestX(t *testing.T) { f := func() { time.Sleep(1) }; f() }`, "time.Sleep",
		},
		"a server that listens":        {`func TestServerX(t *testing.T) { net.Listen("tcp", "") }`, ""},
		"a clock that is read":         {`func TestClockX(t *testing.T) { time.Sleep(1) }`, ""},
		"a server without a server":    {`func TestServerX(t *testing.T) { time.Now() }`, "is pure"},
		"a word that begins as a kind": {`func TestServersX(t *testing.T) { time.Now() }`, "is pure"},
	} {
		t.Run(title, func(t *testing.T) {
			files := map[string]*ast.File{}
			for file, source := range support {
				files[file] = parse(t, source)
			}

			files["p/p_test.go"] = parse(t, head+tc.source)

			// Exactly one line: the support packages have functions that sleep, but no test of their own to report.
			got := newProgram(files).wrongKinds()
			if tc.want == "" && len(got) > 0 || tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func parse(t *testing.T, source string) *ast.File {
	t.Helper()

	file, err := parser.ParseFile(token.NewFileSet(), "", source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}

	return file
}
