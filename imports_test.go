package headcount_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "headcount"

// layer is a package, or with "/..." a package and those below it, and what of
// ours it may import, beside packages of the same entry.
type layer struct {
	name string
	may  []string
}

// layers is the direction of imports, from the bottom up:
//
//	cmd → gateway, dispatcher, presence/member, stores → presence
//
// The four in the middle do not know each other; cmd joins them. The first
// entry that fits a package is its layer, and a package that fits none has no
// place yet: give it one here.
var layers = []layer{
	{"presence", nil}, // the words: nothing of ours
	{"machine", nil},
	{"setting", nil},
	{"presence/seal", nil},
	{"presence/hashkey", nil},
	{"tracing", nil},      // spans below a request that is traced
	{"tracing/otlp", nil}, // to a collector
	{"presence/heartbeat", []string{"presence", "presence/seal"}},
	{"presence/rpc", []string{"presence", "presence/seal"}},
	{"presence/ring", nil},
	{"presence/pncounter", nil},
	{"presence/region", []string{"presence", "presence/pncounter", "setting"}},
	{"presence/unread", []string{"presence"}},
	{"presence/minutes", []string{"presence", "counter/hyperloglog"}},                                       // what pages remember
	{"presence/storetest", []string{"internal/testkit", "presence", "presence/minutes", "presence/unread"}}, // for the tests of stores; only they import it
	{"boltfile", nil},         // opens the files of a data directory
	{"servertest", nil},       // processes of servers for tests
	{"internal/testkit", nil}, // what tests of all packages share
	{"internal/mutants", nil}, // deliberate faults for the tests to find
	{"presence/redistest", []string{"internal/testkit", "servertest"}}, // real servers for tests
	{"counter/limit", nil}, // arithmetic
	{"counter", []string{"presence", "counter/hyperloglog", "counter/limit"}},                                          // words, rules, combining
	{"counter/transfer", []string{"counter", "presence"}},                                                              // the file of an export
	{"counter/hyperloglog", nil},                                                                                       // registers of kind unique
	{"counter/storetest", []string{"counter", "counter/hyperloglog", "counter/limit", "internal/testkit", "presence"}}, // for the tests of stores; only they import it
	{"counter/memstore", []string{"counter", "counter/hyperloglog", "counter/limit", "presence"}},
	{"counter/boltstore", []string{"boltfile", "counter", "counter/hyperloglog", "counter/limit", "presence"}},
	{"counter/pgstore", []string{"counter", "counter/hyperloglog", "counter/limit", "outage", "presence", "tracing"}},
	{"counter/pgtest", []string{"servertest"}}, // real servers for tests
	{"counter/redisstore", []string{"counter", "counter/hyperloglog", "counter/limit", "presence", "redisconn", "scripts"}},
	{"counter/shares", []string{"counter", "counter/hyperloglog"}},                                                                            // what regions share of a counter, as arithmetic
	{"counter/regions", []string{"counter", "counter/redisstore"}},                                                                            // links between regions
	{"counter/hot", []string{"counter", "counter/redisstore"}},                                                                                // spreads hot sums
	{"counter/persistent", []string{"counter", "counter/hyperloglog", "counter/limit", "counter/pgstore", "counter/redisstore", "redisconn"}}, // the one in front of the other
	{"scripts", nil},
	{"outage", nil}, // what the log says of something that is away
	{"redisconn", []string{"outage", "scripts", "tracing"}}, // a connection to Redis: what stores there are built on
	{"web", nil},
	{"deploy", nil}, // tests alone
	{"presence/memstore/...", []string{"boltfile", "presence", "presence/minutes", "presence/unread", "presence/hashkey", "counter/hyperloglog"}},
	{"presence/redisstore/...", []string{"presence", "presence/minutes", "presence/unread", "presence/hashkey", "presence/pncounter", "redisconn", "scripts", "setting"}},
	{"presence/node/...", []string{"outage", "presence", "presence/heartbeat", "setting"}},                                           // no store but by the contract
	{"presence/member", []string{"presence", "presence/heartbeat", "presence/ring", "presence/node/...", "presence/rpc", "setting"}}, // neither gateway nor dispatcher but by interface
	{"dispatcher/...", []string{"outage", "presence"}},
	{"webhook", []string{"counter", "presence"}}, // what is told, and sending it
	{"webhook/storetest", []string{"webhook"}},   // for the tests of stores; only they import it
	{"webhook/memstore", []string{"boltfile", "webhook"}},
	{"webhook/redisstore", []string{"redisconn", "scripts", "webhook"}},
	{"dashboard", []string{"presence"}},
	{"gateway/socket", nil},                                     // bytes to and from clients
	{"gateway/websocket", nil},                                  // RFC 6455, without any I/O
	{"gateway/policy", []string{"counter/limit"}},               // what holds for all of HTTP
	{"gateway/identity", []string{"counter/limit", "presence"}}, // who a request is from
	{"gateway/fanout", []string{"presence"}},                    // updates to those who want them
	{"gateway/unread", []string{"presence", "presence/unread"}}, // sums of the users here
	{"gateway/counters", []string{"counter", "counter/limit", "presence", "gateway/identity", "gateway/policy", "tracing"}}, // the calls of counters that last
	{"gateway/openapi", nil}, // describes calls and frames
	{"gateway", []string{
		"counter", "counter/limit", "gateway/counters", "gateway/openapi",
		"gateway/socket", "gateway/websocket", "gateway/policy", "gateway/identity", "gateway/fanout", "gateway/unread",
		"presence", "presence/minutes", "presence/unread", "presence/heartbeat",
	}},
	{"cmd/rig", []string{"servertest"}}, // a core for the program, another for its clients
	{"cmd/bench", []string{"cmd/rig", "counter/pgtest", "presence/redistest", "servertest"}},       // runs the program
	{"cmd/hostile", []string{"client", "cmd/rig", "counter", "counter/hyperloglog", "servertest"}}, // runs the program
	{"cmd/headcount/flags", []string{"setting"}},                                                   // a command line into structs
	{"client", nil}, // for other programs: a module of its own
	{"internal/simulate", []string{"client"}}, // a black box client
	{"cmd/headcount/top", nil},                // the dashboard in a terminal
	{"cmd/headcount/e2e", nil},                // tests alone
	{"cmd/headcount/faults", nil},             // tests alone
	{"cmd/release", nil},                      // builds the archives
	{"cmd/headcount", []string{
		"boltfile", "counter", "counter/memstore", "counter/boltstore", "counter/pgstore", "counter/redisstore", "counter/persistent", "counter/hot", "counter/regions", "counter/transfer", "gateway/counters",
		"presence", "presence/minutes", "presence/unread", "presence/heartbeat", "presence/memstore/...", "presence/redisstore/...",
		"presence/member", "presence/ring", "presence/rpc", "presence/node/...", "presence/region", "dispatcher/...", "dashboard", "gateway", "gateway/identity", "web", "machine", "setting", "tracing", "tracing/otlp", "webhook", "webhook/memstore", "webhook/redisstore", "cmd/headcount/flags", "internal/simulate", "cmd/headcount/top",
	}},
}

func (l layer) fits(pkg string) bool { return fits(l.name, pkg) }

func fits(pattern, pkg string) bool {
	root, tree := strings.CutSuffix(pattern, "/...")
	return pkg == root || tree && strings.HasPrefix(pkg, root+"/")
}

// ours is a package's name within the module.
func ours(path string) (pkg string, ok bool) {
	if path == module {
		return ".", true
	}
	return strings.CutPrefix(path, module+"/")
}

// wrongImports returns a line for each import against the direction, in order.
// The graph has the direct imports of every package, by import path.
func wrongImports(graph map[string][]string) []string {
	var wrong []string
	for path, imports := range graph {
		pkg, ok := ours(path)
		if !ok || pkg == "." && len(imports) == 0 { // the root holds this test only
			continue
		}
		i := slices.IndexFunc(layers, func(l layer) bool { return l.fits(pkg) })
		if i < 0 {
			wrong = append(wrong, fmt.Sprintf("%s has no layer; give it one in imports_test.go", pkg))
			continue
		}
		for _, path := range imports {
			imported, ok := ours(path)
			if !ok || layers[i].fits(imported) || slices.ContainsFunc(layers[i].may, func(p string) bool { return fits(p, imported) }) {
				continue
			}
			wrong = append(wrong, fmt.Sprintf("%s imports %s", pkg, imported))
		}
	}
	slices.Sort(wrong)
	return wrong
}

// unusedPermits returns a line for each import that a layer may have and has not.
func unusedPermits(graph map[string][]string) []string {
	var unused []string
	for _, l := range layers {
		for _, permitted := range l.may {
			used := false
			for path, imports := range graph {
				pkg, ok := ours(path)
				used = used || ok && l.fits(pkg) && slices.ContainsFunc(imports, func(path string) bool {
					imported, ok := ours(path)
					return ok && fits(permitted, imported)
				})
			}
			if !used {
				unused = append(unused, fmt.Sprintf("%s may import %s, and does not", l.name, permitted))
			}
		}
	}
	return unused
}

// TestImportsPointOneWay reads what the packages import, without their tests,
// which may join what they like.
func TestImportsPointOneWay(t *testing.T) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", module+"/...")
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		t.Fatalf("go list: %v\n%s", err, exit.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	graph := map[string][]string{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		graph[p.ImportPath] = p.Imports
	}
	for _, must := range []string{"presence", "gateway", "cmd/headcount"} {
		if len(graph[module+"/"+must]) == 0 {
			t.Errorf("go list knows no %s: is this test looking at the module?", must)
		}
	}
	for _, line := range append(wrongImports(graph), unusedPermits(graph)...) {
		t.Error(line)
	}
}

func TestWrongImportsAreFound(t *testing.T) {
	for name, tc := range map[string]struct {
		from, to string
		want     string // nothing for an import that is right
	}{
		"downward":                    {"gateway", "presence", ""},
		"to a part":                   {"gateway", "gateway/socket", ""},
		"upward":                      {"presence/member", "gateway", "presence/member imports gateway"},
		"from a part":                 {"gateway/socket", "gateway", "gateway/socket imports gateway"},
		"to the outside":              {"presence", "github.com/x/presence", ""},
		"to a name that begins alike": {"presence", "headcounter/gateway", ""},
		"a package without a layer":   {"utils", "fmt", "utils has no layer; give it one in imports_test.go"},
	} {
		t.Run(name, func(t *testing.T) {
			to := tc.to
			if !strings.Contains(to, ".") && to != "fmt" && !strings.HasPrefix(to, "headcounter/") {
				to = module + "/" + to
			}
			var want []string
			if tc.want != "" {
				want = []string{tc.want}
			}
			if got := wrongImports(map[string][]string{module + "/" + tc.from: {"fmt", to}}); !slices.Equal(got, want) {
				t.Errorf("%s → %s: got %q, want %q", tc.from, tc.to, got, want)
			}
		})
	}
}
