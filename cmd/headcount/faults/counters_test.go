package faults

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// rounds is how often each of the tests below kills something and then checks all counters. In make test it is a few
// times. To be sure:
//
//	go test ./cmd/headcount/faults -run TestClockCountersLast -count 1 -timeout 60m -rounds 50
var rounds = flag.Int("rounds", 2, "checkpoints of counters, each after a kill -9")

// lasting is a deployment with durable counters, and the faults that may hit it.
type lasting struct {
	processes []*member
	strikes   []strike // one fault after the other, repeatedly
}

// strike kills something and starts it again.
type strike struct {
	name string
	hits func(t *testing.T)
}

const counterKey = "the key of the simulator"

// serves adds a process with all roles.
func (l *lasting) serves(flags ...string) {
	m := &member{
		name: fmt.Sprintf("process %d", len(l.processes)), addr: servertest.FreeAddr(), admin: servertest.FreeAddr(),
	}
	m.flags = append([]string{
		"serve", "--listen=" + m.addr, "--admin-listen=" + m.admin, "--log-format=json", "--shutdown-timeout=15s",
		"--api-key=" + counterKey, "--id-secret=" + strings.Repeat("of the faults ", 3),
	}, flags...)

	l.processes = append(l.processes, m)
	l.strikes = append(l.strikes, strike{m.name, func(t *testing.T) {
		m.kill()
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}})
}

// server adds a server of a store, which can be killed.
func (l *lasting) server(name string, kill func(), restart func(testing.TB)) {
	l.strikes = append(l.strikes, strike{name, func(t *testing.T) {
		kill()
		time.Sleep(rand.N(300 * time.Millisecond))
		restart(t)
	}})
}

// TestClockCountersLast: while simulated clients change and watch counters, processes and stores are killed again and
// again. Whenever the clients rest, every counter has exactly the acknowledged changes.
func TestClockCountersLast(t *testing.T) {
	t.Parallel()
	for name, deploy := range map[string]func(t *testing.T, l *lasting){
		"data directory": func(t *testing.T, l *lasting) {
			l.serves("--data-dir=" + t.TempDir())
		},
		"Redis": func(t *testing.T, l *lasting) {
			// An acknowledged change is as durable as Redis, so Redis writes it to the disk at once.
			redis := redistest.Start(t, redistest.Durable...)
			l.server("Redis", redis.Kill, redis.Restart)
			for range 2 {
				l.serves("--redis="+redis.URL(), "--cluster-listen="+servertest.FreeAddr())
			}
		},
		"PostgreSQL": func(t *testing.T, l *lasting) {
			postgres := pgtest.Start(t)
			l.server("PostgreSQL", postgres.Kill, postgres.Restart)
			l.serves("--postgres=" + postgres.Database(t))
		},
		"Redis in front of PostgreSQL": func(t *testing.T, l *lasting) {
			redis := redistest.Start(t, redistest.Durable...)
			postgres := pgtest.Start(t)
			l.server("Redis", redis.Kill, redis.Restart)
			l.server("PostgreSQL", postgres.Kill, postgres.Restart)
			database := postgres.Database(t)
			for range 2 {
				l.serves("--redis="+redis.URL(), "--postgres="+database, "--cluster-listen="+servertest.FreeAddr())
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &lasting{}
			deploy(t, l)

			startAll(t, l.processes...)
			awaitReady(t, l.processes...)

			l.survive(t, *rounds)

			for _, m := range l.processes {
				if line := lossLines.FindString(m.log.String()); line != "" {
					t.Errorf("%s: %s, although nothing was lost", m.name, line)
				}
			}
		})
	}
}

// counterReport has the relevant part of the simulator's report.
type counterReport struct {
	OK          bool
	Error       string
	Wrong       []string
	Checkpoints []struct {
		Name            string
		Wrong, Failures int
	}
	Figures map[string]float64
}

// survive runs the simulator until that many of its checkpoints followed a fault that its clients felt.
func (l *lasting) survive(t *testing.T, rounds int) {
	strikes, felt, looked, unfelt := 0, 0, 0, 0
	for felt < rounds {
		report, n := l.simulate(t, rounds-felt, strikes)
		strikes += n

		before := felt

		// A checkpoint proves something only if the clients felt the fault before it.
		for _, c := range report.Checkpoints {
			looked++
			if c.Failures > 0 {
				felt++
			}
			if c.Wrong > 0 {
				t.Errorf("checkpoint %s has %d wrong values", c.Name, c.Wrong)
			}
		}

		t.Logf("%d strikes, %d of %d checkpoints after one: %v", strikes, felt, looked, report.Figures)
		if t.Failed() {
			return
		}

		unfelt++
		if felt > before {
			unfelt = 0
		}

		// Clients may miss one outage, for instance one of PostgreSQL behind Redis, but not every outage of one server.
		if unfelt == len(l.strikes)+1 {
			t.Fatalf("the clients felt nothing of the last strikes, %d of them in the last run", n)
		}
	}
}

// simulate runs the simulator for that many rounds of 2 s, and strikes meanwhile.
func (l *lasting) simulate(t *testing.T, rounds, strikes int) (report counterReport, struck int) {
	args := []string{
		"simulate", "--scenario=counters", "--json", "--api-key=" + counterKey, "--users=12", "--pages=3",
		fmt.Sprintf("--duration=%ds", 2*rounds), fmt.Sprintf("--seed=%d", rand.Uint32()),
	}
	for _, m := range l.processes {
		args = append(args, "--url=http://"+m.addr)
	}

	var out bytes.Buffer
	var progress servertest.Log
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = &out, &progress
	var p servertest.Process
	if err := p.Start(cmd); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(p.Kill)
	testkit.Eventually(t, "the simulator's first round", func() bool {
		return !p.Runs() || strings.Contains(progress.String(), "counting:")
	})

	for {
		select {
		case <-p.Ended():
			status := p.Wait(testkit.Timeout)
			if err := json.Unmarshal(out.Bytes(), &report); status != 0 || err != nil || !report.OK {
				t.Errorf("status %d, %v: %s %s\n%s\n%s",
					status, err, report.Error, strings.Join(report.Wrong, "\n"), args, &progress)
			}
			return report, struck
		case <-time.After(300*time.Millisecond + rand.N(1200*time.Millisecond)):
		}

		// The faults take turns, also across runs.
		s := l.strikes[(strikes+struck)%len(l.strikes)]
		s.hits(t)
		struck++
		awaitReady(t, l.processes...)
	}
}
