//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

// A bareServer is a server with one of Go's WebSocket libraries. It does no more than the clients of a scenario need.
type bareServer struct{ name, program, library string }

var bareServers = []bareServer{
	{"gobwas/ws", "gobwas", "over epoll"},
	{"nbio", "nbio", "with its own HTTP"},
}

const (
	beside       = "beside-"               // prefix of the scenarios that measure bare servers
	besideModule = "internal/bench/beside" // a Go module of its own, so that Headcount needs none of these libraries
	besideUsers  = 10_000                  // of the scenario with idle users
	fanoutPace   = "35ms"                  // between two counts of a page, as in the row of Headcount alone
)

// buildBare builds the bare servers. If their modules cannot be loaded, it returns no error, but the page says so. The
// returned function removes the programs.
func (b *bench) buildBare(ctx context.Context) (remove func(), err error) {
	b.bare, err = os.MkdirTemp("", "headcount-beside-")
	if err != nil {
		return nil, err
	}

	args := []string{"-C", besideModule, "build", "-o", b.bare + "/"}
	for _, s := range bareServers {
		args = append(args, "./"+s.program)
	}

	// Built before anything is measured, because compiling takes both cores.
	said, err := exec.CommandContext(ctx, "go", args...).CombinedOutput()
	if err != nil {
		// The last line of go build is the reason; the lines before it say what it downloaded.
		last := said[strings.LastIndex(strings.TrimSpace(string(said)), "\n")+1:]
		b.noBare = fmt.Errorf("go build in %s: %w: %s", besideModule, err, strings.TrimSpace(string(last)))
		fmt.Fprintln(os.Stderr, "bench: no rows beside bare servers:", b.noBare)
	}

	return func() { _ = os.RemoveAll(b.bare) }, ctx.Err()
}

// besideBare measures Headcount and then each bare server in the same way and at about the same time. NAME_times is
// Headcount's figure as a multiple of the bare server's. welcome is the type of the last frame that welcomes a client.
func besideBare(
	measure func(t *trial, start func(flags ...string) server, welcome string) figures,
) func(*trial) figures {
	return func(t *trial) figures {
		all := figures{}
		ours := measure(t, t.serve, "unread")
		for name, v := range ours {
			all["headcount_"+name] = v
		}

		for _, bare := range bareServers {
			start := func(...string) server { return t.serveBare(bare) }
			for name, v := range measure(t, start, "welcome") {
				all[bare.program+"_"+name] = v
				all[bare.program+"_"+name+"_times"] = ours[name] / v
			}
		}

		return all
	}
}

// serveBare starts a bare server.
func (t *trial) serveBare(bare bareServer) server {
	addr := servertest.FreeAddr()
	p := t.Start(benchenv.On(t.Context(), benchenv.ServerCore, t.bare+"/"+bare.program, addr, fanoutPace))

	listens := func(ctx context.Context) error { return servertest.Listens(ctx, addr) }
	if err := servertest.Await(p, benchenv.EndTime, listens); err != nil {
		t.Fatal(fmt.Errorf("%s: %w", bare.name, err))
	}

	return server{Process: p, addr: addr, url: "http://" + addr}
}

func fannedOutBeside(t *trial, start func(...string) server, _ string) figures {
	s := start(quick(fanoutPace)...)
	defer s.End(benchenv.EndTime)

	f := t.simulate(s, "--scenario", "fanout", "--users", "5000", "--pages", "1", "--duration", "5s")
	return figures{
		"cpu_s_per_million": f["server_cpu_s_per_million_counts"],
		"per_s":             f["counts_per_s"],
	}
}

func arrivedBeside(t *trial, start func(...string) server, welcome string) figures {
	s := start("--max-connections", "40000")
	defer s.End(benchenv.EndTime)

	f := t.arrive(s, welcome)
	return figures{"cpu_us_each": f["cpu_us_each"]}
}

func idleBeside(t *trial, start func(...string) server, _ string) figures {
	s := start()
	defer s.End(benchenv.EndTime)

	// Memory for each connection can be compared only if all three have the same number of them.
	n := min(besideUsers, mostSockets())
	f := t.simulate(s, "--scenario", "idle", "--users", strconv.Itoa(n), "--pages", "100", "--duration", "30s")

	return figures{
		"rss_kb_each":  f["server_rss_bytes_per_connection"] / 1e3,
		"core_percent": f["server_cpu_percent_of_a_core"],
		"users":        float64(n),
	}
}

// rowsBeside returns the rows of all bare servers.
func rowsBeside() (all []row) {
	for _, bare := range bareServers {
		next := func(what, scenario, figure string, digits int, also string) {
			ours := "{" + beside + scenario + " headcount_" + figure + "}"
			times := "{" + beside + scenario + " " + bare.program + "_" + figure + "_times}"
			all = append(all, row{
				what, beside + scenario + " " + bare.program + "_" + figure, 1, digits,
				"Headcount in the same runs: " + ours + ", " + times + " times" + also,
			})
		}

		users := "{" + beside + "idle " + bare.program + "_users}"
		what := "**Beside " + bare.name + "** " + bare.library + ", a bare server: CPU s per million deliveries"
		next(what+" to 5,000 subscribers", "fanout", "cpu_s_per_million", 1, "")
		next("… CPU µs to connect", "arrive", "cpu_us_each", 1, "")
		next("… KB of RSS for each of "+users+" idle connections", "idle", "rss_kb_each", 1, "")
		next("… % of a core for them", "idle", "core_percent", 2, "; both ping every 15 s")
	}

	return all
}

// bareServers returns what the page says about the bare servers.
func (b *bench) bareServers() string {
	if b.noBare != nil {
		return "\nThe rows beside bare servers are missing: " + strings.ReplaceAll(b.noBare.Error(), "\n", " ") + "\n"
	}

	// The text explains rows, so it is left out with them.
	for _, r := range rowsBeside() {
		if len(b.figures[r.figure]) > 0 {
			return bareText
		}
	}
	return ""
}

const bareText = "\nA bare server (`" + besideModule + "`) is what a program of a few hundred lines costs: it counts " +
	"connections, sends counts at the pace of Headcount's row,\nencodes a frame once for each page and change, and " +
	"pings. It has no identity (two tabs are two people), no rules of presence (who reconnects has left),\nno bounds " +
	"(a client that does not read costs memory without end), does not look for pongs, and has no metrics and no TLS. " +
	"\"Times\" is Headcount's figure divided by the\nbare server's; the servers of a run were measured one after the " +
	"other.\n"
