package headcount_test

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "headcount"

// layer is a package, or with "/..." a package and those below it. It lists the packages of ours that the layer may
// import, in addition to packages of the same entry.
type layer struct {
	name string
	may  []string
}

// layers is the direction of imports, from the bottom up:
//
//	cmd → gateway, dispatcher, presence/member, stores → presence
//
// The four in the middle do not know each other; cmd joins them. The first entry that fits a package is its layer. A
// package that fits none needs an entry here.
var layers = []layer{
	{"presence", nil}, // the words: nothing of ours
	{"internal/machine", nil},
	{"internal/wake", nil},     // signals and pauses
	{"internal/promises", nil}, // for programs that tests start, which end when they break one
	{"internal/marks", nil},    // places that simulations must reach; nothing in the program that people run
	{"internal/setting", nil},
	{"presence/seal", nil},
	{"presence/hashkey", nil},
	{"internal/tracing", nil},                               // spans below a request that is traced
	{"internal/tracing/otlp", []string{"internal/setting"}}, // to a collector
	{"presence/heartbeat", []string{"internal/wake", "presence", "presence/seal"}},
	{"presence/rpc", []string{"presence", "presence/seal"}},
	{"presence/ring", nil},
	{"presence/pncounter", nil},
	{
		"internal/replication", []string{
			"internal/outage", "internal/wake",
		},
	}, // what changes here, sent to another region
	{"presence/region", []string{"internal/replication", "presence", "presence/pncounter", "internal/setting"}},
	{"unread", []string{"internal/outage", "presence"}},
	// what is remembered of a page by the minute
	{"presence/minutes", []string{"presence", "hyperloglog"}},
	// for the tests of stores; only they import it
	{
		"presence/presencetest", []string{
			"internal/testkit", "presence", "presence/minutes", "presence/pncounter", "unread",
		},
	},
	{"internal/boltfile", nil},                       // opens the files of a data directory
	{"internal/servertest", nil},                     // processes of servers for tests
	{"internal/testkit", []string{"internal/marks"}}, // what tests of all packages share
	{"internal/mutants", nil},                        // deliberate faults for the tests to find
	// real servers for tests
	{"internal/redistest", []string{"internal/testkit", "internal/servertest", "internal/redisconn"}},
	{"counter/limit", nil}, // arithmetic
	{"counter", []string{"presence", "hyperloglog", "counter/limit", "internal/wake"}}, // words, rules, combining
	{"hyperloglog", nil},   // registers of kind unique
	{"internal/rows", nil}, // words and contract
	{"internal/rows/rowsmem", []string{"internal/rows"}},
	{"counter/share", []string{"counter", "hyperloglog"}}, // arithmetic
	{
		"counter/owner", []string{
			"counter", "hyperloglog", "counter/limit", "counter/share",
			"internal/marks", "internal/rows", "internal/wake", "presence",
		},
	},
	{"counter/link", []string{"counter", "counter/owner", "internal/rows"}},
	{
		"counter/call", []string{
			"counter", "counter/limit", "counter/owner", "internal/marks", "internal/rows", "internal/wake",
		},
	},
	{"internal/rows/rowsfile", []string{"internal/boltfile", "internal/rows"}},
	// counters that one process owns alone
	{
		"counter/local", []string{
			"internal/boltfile", "counter", "counter/call",
			"counter/owner", "internal/rows", "internal/rows/rowsfile",
			"internal/rows/rowsmem",
		},
	},
	{"internal/browser", nil},                       // the browser client in simulations; only tests import it
	{"counter/simtest", []string{"internal/marks"}}, // for simulations of counters; only tests import it
	// for the tests of stores; only they import it
	{
		"counter/countertest", []string{
			"counter", "counter/call", "counter/local",
			"hyperloglog", "counter/limit", "internal/testkit", "presence",
		},
	},
	{"internal/pgtest", []string{"internal/servertest"}}, // real servers for tests
	{"internal/rows/rowsredis", []string{"internal/redisconn", "internal/rows", "scripts"}},
	{"internal/rows/rowstier", []string{"internal/marks", "internal/rows", "internal/wake"}},
	// a connection to PostgreSQL: what stores there are built on
	{"internal/postgres", []string{"internal/outage", "internal/tracing"}},
	{"internal/rows/rowspg", []string{"internal/outage", "internal/postgres", "internal/rows"}},
	{"internal/rows/rowstest", []string{"internal/rows"}}, // for the tests of stores; only they import it
	{"internal/models/modeltest", nil},                    // traces as runs of models; only tests import it
	{
		"counter/exactpg", []string{
			"counter", "hyperloglog", "counter/owner", "internal/outage", "internal/postgres", "internal/rows",
			"internal/wake", "presence",
		},
	},
	{"counter/routed", []string{ // exact counters beside those of owners
		"counter", "counter/call", "counter/exactpg", "counter/owner", "internal/outage", "internal/postgres",
		"internal/rows", "internal/rows/rowspg",
		"internal/rows/rowstier",
	}},
	{
		"counter/region", []string{
			"counter", "counter/owner", "counter/share",
			"internal/replication", "internal/marks", "internal/rows", "internal/wake",
		},
	},
	{
		"counter/owners", []string{
			"counter/call", "counter/link", "counter/owner", "internal/rows", "internal/wake", "presence/ring",
		},
	},
	{"counter/cluster", []string{ // the counters of a cluster, in a process
		"counter", "counter/call", "counter/link", "counter/owner", "counter/owners", "counter/region",
		"counter/routed",
		"internal/redisconn", "internal/rows", "internal/rows/rowsredis", "presence",
	}},
	{"counter/transfer", []string{ // exports, and the stores that they read and write
		"counter", "counter/call", "counter/cluster", "counter/local", "counter/owner", "counter/routed",
		"internal/redisconn", "internal/rows", "internal/rows/rowsredis", "presence", "presence/presenceredis/...",
	}},
	// opens the counters of a process
	{
		"counter/pipeline", []string{
			"counter", "counter/cluster", "counter/limit", "counter/local", "counter/routed", "internal/wake",
		},
	},
	// counts of pages in PostgreSQL
	{"presence/pagestable", []string{"counter", "internal/outage", "internal/postgres", "presence"}},
	{"scripts", nil},
	// what the log says about a store that is away, and when it is tried again
	{"internal/outage", []string{"internal/wake"}},
	// a connection to Redis, which the stores there are built on
	{
		"internal/redisconn", []string{
			"internal/outage", "internal/wake", "internal/setting", "scripts", "internal/tracing",
		},
	},
	{"web", nil},
	{"deploy", nil}, // tests alone
	{
		"presence/presencemem/...", []string{
			"internal/boltfile", "internal/wake", "presence", "presence/minutes", "unread", "presence/hashkey",
			"hyperloglog",
		},
	},
	{
		"presence/presenceredis/...", []string{
			"presence", "presence/minutes", "unread", "presence/hashkey", "presence/pncounter", "internal/redisconn",
			"internal/outage", "internal/wake", "scripts",
		},
	},
	// it knows stores only by their contract
	{
		"presence/node/...", []string{
			"internal/machine", "internal/marks", "internal/outage", "internal/wake",
			"presence", "presence/heartbeat", "internal/setting",
		},
	},
	// it knows gateways, nodes and dispatchers only by interfaces
	{
		"presence/member", []string{
			"internal/machine", "internal/outage", "internal/wake", "presence", "presence/heartbeat", "presence/ring",
			"presence/seal", "internal/setting",
		},
	},
	{"dispatcher/...", []string{"internal/machine", "internal/outage", "internal/wake", "presence"}},
	// what webhooks tell, and how it is sent
	{
		"webhook", []string{
			"counter", "internal/outage", "internal/promises", "internal/setting", "internal/wake", "presence",
			"presence/hashkey",
		},
	},
	{"webhook/webhooktest", []string{"webhook"}}, // for tests of stores and simulations; only they import it
	{"webhook/webhookmem", []string{"internal/boltfile", "webhook"}},
	{"webhook/webhookredis", []string{"internal/redisconn", "scripts", "webhook"}},
	{"dashboard", []string{"presence"}},
	// bytes to and from clients
	{"gateway/socket", nil},
	// RFC 6455, without any I/O
	{"gateway/websocket", nil},
	// Pusher's events, without any I/O
	{"gateway/pusher", []string{"presence"}},
	// what holds for every HTTP request
	{"gateway/httppolicy", []string{"counter/limit", "internal/wake"}},
	// who a request is from
	{"gateway/identity", []string{"counter/limit", "internal/setting", "presence"}},
	// brings updates to the connections that want them
	{"gateway/fanout", []string{
		"internal/machine", "internal/outage", "internal/promises", "internal/wake", "presence",
	}},
	{"gateway/roster", []string{"internal/marks", "presence", "presence/heartbeat"}}, // who is here
	// sums of the users here
	{"gateway/notifier", []string{"internal/outage", "internal/wake", "presence", "unread"}},
	// the table of calls, and their answers
	{"gateway/calls", []string{"counter", "gateway/httppolicy", "gateway/identity", "presence"}},
	// what clients may cost
	{"gateway/bounds", []string{"counter/limit", "gateway/calls", "gateway/httppolicy", "presence"}},
	{"gateway/counterapi", []string{ // the calls of counters that last
		"counter", "counter/limit", "presence", "gateway/bounds", "gateway/calls", "gateway/fanout",
		"gateway/identity", "gateway/httppolicy",
		"internal/machine", "internal/outage", "internal/promises", "internal/tracing", "internal/wake",
	}},
	{"gateway/openapi", []string{"counter", "gateway/calls"}}, // describes calls and frames
	{"gateway/api", []string{ // calls that are answered at once
		"counter", "gateway/bounds", "gateway/calls", "gateway/counterapi", "gateway/httppolicy", "gateway/identity",
		"gateway/openapi",
		"gateway/pusher", "presence", "presence/minutes", "unread",
	}},
	{"gateway/conn", []string{ // the connections of clients
		"counter", "gateway/api", "gateway/bounds", "gateway/calls", "gateway/counterapi",
		"gateway/fanout", "gateway/httppolicy", "gateway/identity", "gateway/notifier", "gateway/pusher",
		"gateway/roster", "gateway/socket", "gateway/websocket", "internal/promises", "presence",
	}},
	{"gateway", []string{
		"gateway/api", "gateway/bounds", "gateway/calls", "gateway/conn", "gateway/counterapi",
		"gateway/socket", "gateway/websocket", "gateway/pusher", "gateway/httppolicy", "gateway/identity",
		"gateway/fanout", "gateway/notifier", "gateway/roster",
		"presence", "unread", "presence/heartbeat",
	}},
	{"internal/benchenv", []string{"internal/servertest"}}, // gives the program a core, and its clients another
	// runs the program
	{
		"internal/bench", []string{
			"client", "internal/benchenv", "internal/machine", "internal/pgtest", "internal/redisconn",
			"internal/redistest", "internal/servertest", "internal/testkit",
		},
	},
	// runs the program
	{"internal/attack", []string{"client", "internal/benchenv", "internal/servertest", "internal/testkit"}},
	{"cmd/headcount/flags", []string{"counter", "internal/setting"}}, // a command line into structs
	{"client", nil}, // for other programs: a module of its own
	{"internal/simulate", []string{"client"}},  // a black box client
	{"internal/prove", nil},                    // runs simulations
	{"internal/histories", []string{"client"}}, // another black box client, whose answers a checker judges
	{"examples/go", []string{"client"}},
	{"cmd/headcount/top", []string{"client", "internal/setting"}}, // the dashboard in a terminal
	{"cmd/headcount/certificates", []string{"internal/setting"}},  // the certificates that visitors are shown over TLS
	// export and import
	{
		"cmd/headcount/dump", []string{
			"counter", "counter/transfer", "internal/postgres", "internal/redisconn", "internal/setting", "presence",
		},
	},
	// the settings of a server
	{"cmd/headcount/config", []string{
		"counter", "gateway/api", "gateway/identity", "gateway/pusher", "internal/postgres", "internal/redisconn",
		"internal/setting", "presence", "presence/minutes", "presence/node/...", "presence/region", "webhook",
	}},
	// what a proxy passes on
	{"cmd/headcount/probe", []string{"gateway/counterapi", "gateway/identity", "internal/setting"}},
	{"cmd/headcount/e2e", nil},    // tests alone
	{"cmd/headcount/faults", nil}, // tests alone
	{"cmd/release", nil},          // builds the archives
	{"cmd/headcount", []string{
		"internal/boltfile", "counter", "counter/cluster", "counter/link", "counter/pipeline", "counter/routed",
		"counter/local", "counter/transfer", "gateway/counterapi",
		"presence", "presence/minutes", "unread", "presence/heartbeat", "presence/presencemem/...",
		"presence/presenceredis/...",
		"presence/member", "presence/rpc", "presence/node/...", "presence/pagestable", "presence/region",
		"presence/seal", "internal/postgres",
		"dispatcher/...", "dashboard", "gateway", "gateway/api", "gateway/identity", "gateway/pusher", "web",
		"internal/machine", "internal/redisconn", "internal/setting", "internal/tracing", "internal/tracing/otlp",
		"webhook", "webhook/webhookmem", "webhook/webhookredis", "cmd/headcount/certificates", "cmd/headcount/config",
		"cmd/headcount/dump", "cmd/headcount/flags", "cmd/headcount/probe", "internal/simulate", "cmd/headcount/top",
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
			if !ok || layers[i].fits(imported) || slices.ContainsFunc(layers[i].may, func(p string) bool {
				return fits(p, imported)
			}) {
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

// importGraph returns the direct imports of every package, by import path, on every system, without those of its tests.
func importGraph(t *testing.T) map[string][]string {
	graph := map[string][]string{}
	ofModule := func(file string) bool {
		isOfAnother := strings.HasPrefix(file, "web/e2e/") || strings.HasPrefix(file, "internal/bench/beside/")
		return !strings.HasSuffix(file, "_test.go") && !isOfAnother
	}

	for file, parsed := range sources(t, ofModule) {
		pkg := path.Join(module, path.Dir(file))
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}

			graph[pkg] = append(graph[pkg], imported)
		}
	}

	return graph
}

// TestImportsPointOneWay reads what the packages import, without their tests, which may import what they like.
func TestImportsPointOneWay(t *testing.T) {
	graph := importGraph(t)
	for _, must := range []string{"presence", "gateway", "cmd/headcount"} {
		if len(graph[module+"/"+must]) == 0 {
			t.Errorf("there is no package %s: is this test looking at the module?", must)
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
