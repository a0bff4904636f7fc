package deploy_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// scrape is the time between two scrapes, and between two evaluations of the rules.
const scrape = 15 * time.Second

// open is how long the last sample stays in a window of two minutes, which most alerts have.
const open = 2*time.Minute - scrape

// trouble is a cause and the alerts that it must raise. All other alerts must stay silent.
type trouble struct {
	name string
	// series are the samples that Prometheus scrapes. "well ill" gives a gauge before and after the cause, and during
	// it; the value "stale" is not scraped. "+n" is a counter that grows by n per scrape during the cause. "/n" is a
	// gauge that grows likewise and falls to 0 afterwards. "n" never changes.
	series map[string]string
	lasts  time.Duration // default 20 min
	fires  map[string]moments
	brief  bool // even a single scrape of the cause raises the alert, since data is lost
}

// moments say how long after the beginning of the cause an alert fires, and how long after its end the alert ends.
type moments struct{ after, ends time.Duration }

// histogram returns one in which n calls between two scrapes take 2 to 4 s.
func histogram(name string, n int) map[string]string {
	of := func(le string) string { return fmt.Sprintf(`%s{job="us",instance="1",le=%q}`, name, le) }
	return map[string]string{of("2"): "0", of("4"): fmt.Sprint("+", n), of("+Inf"): fmt.Sprint("+", n)}
}

// troubles: the alerts fire and end at exact scrapes. After the end of a cause the window of a rate stays open for a
// while.
var troubles = []trouble{
	{name: "a region has ended, another one lives", series: map[string]string{
		`headcount_ready{job="us",instance="1"}`: "1", `up{job="us",instance="1"}`: "1",
		`headcount_ready{job="eu",instance="1"}`: "1 stale", `up{job="eu",instance="1"}`: "1 0",
	}, fires: map[string]moments{"HeadcountGone": {time.Minute, 0}}},
	{name: "a region is not found any more, another one lives", series: map[string]string{
		`headcount_ready{job="us",instance="1"}`: "1", `up{job="us",instance="1"}`: "1",
		`headcount_ready{job="eu",instance="1"}`: "1 stale", `up{job="eu",instance="1"}`: "1 stale",
	}, lasts: 70 * time.Minute, fires: map[string]moments{"HeadcountGone": {time.Minute, 0}}},
	{name: "one of two processes has ended", series: map[string]string{
		`headcount_ready{job="us",instance="1"}`: "1", `up{job="us",instance="1"}`: "1",
		`headcount_ready{job="us",instance="2"}`: "1 stale", `up{job="us",instance="2"}`: "1 0",
	}, fires: map[string]moments{"HeadcountProcessGone": {time.Minute, 0}}},
	{name: "a process cannot do its work",
		series: map[string]string{
			`headcount_ready{job="us",instance="1"}`:                  "1 0",
			`headcount_store_up{job="us",instance="1",store="redis"}`: "1",
		},
		fires: map[string]moments{"HeadcountNotReady": {time.Minute, 0}}},
	{name: "too few partitions are owned", series: map[string]string{
		`headcount_partitions_owned{job="us",instance="1"}`: "136",
		`headcount_partitions_owned{job="us",instance="2"}`: "135 134",
		`headcount_partitions_owned{job="eu",instance="1"}`: "271",
	}, fires: map[string]moments{"HeadcountPartitionsWithoutOwner": {time.Minute, 0}}},
	{name: "no presence node is left", series: map[string]string{
		`headcount_partitions_owned{job="us",instance="1"}`: "271 stale", `headcount_ready{job="us",instance="2"}`: "1",
		`headcount_partitions_owned{job="eu",instance="1"}`: "271",
	}, fires: map[string]moments{"HeadcountPartitionsWithoutOwner": {time.Minute, 0}}},
	{name: "Redis is away", series: map[string]string{
		`headcount_store_up{job="us",instance="1",store="redis"}`:                    "1 0",
		`headcount_ready{job="us",instance="1"}`:                                     "1 0",
		`headcount_counter_calls_total{job="us",instance="1",outcome="unavailable"}`: "+100",
		`headcount_region_heard_seconds{job="us",instance="1",peer="eu"}`:            "/15",
		`headcount_region_lag_seconds{job="us",instance="1",peer="eu"}`:              "/15",
	}, fires: map[string]moments{"HeadcountStoreAway": {30 * time.Second, 0}}},
	{name: "Redis is away for a minute", series: map[string]string{
		`headcount_store_up{job="us",instance="1",store="redis"}`:                    "1 0",
		`headcount_ready{job="us",instance="1"}`:                                     "1 0",
		`headcount_counter_calls_total{job="us",instance="1",outcome="unavailable"}`: "+100",
		`headcount_region_heard_seconds{job="us",instance="1",peer="eu"}`:            "/15",
	}, lasts: time.Minute, fires: map[string]moments{"HeadcountStoreAway": {30 * time.Second, 0}}},
	{name: "PostgreSQL behind Redis is away", series: map[string]string{
		`headcount_store_up{job="us",instance="1",store="redis"}`:                    "1",
		`headcount_store_up{job="us",instance="1",store="postgres"}`:                 "1 0",
		`headcount_ready{job="us",instance="1"}`:                                     "1",
		`headcount_counter_calls_total{job="us",instance="1",outcome="unavailable"}`: "+100",
		`headcount_persist_lag_seconds{job="us",instance="1"}`:                       "/15",
	}, fires: map[string]moments{
		"HeadcountStoreAway": {30 * time.Second, 0}, "HeadcountPersistLag": {2 * time.Minute, 0},
	}},
	{name: "Redis has lost data",
		series: map[string]string{
			`headcount_store_losses_total{job="us",instance="1"}`: "+1",
		}, lasts: scrape, brief: true,
		fires: map[string]moments{"HeadcountRedisLostData": {0, 10*time.Minute - scrape}}},
	{
		name: "Redis is slow", series: histogram("headcount_redis_script_seconds_bucket", 5),
		fires: map[string]moments{"HeadcountRedisSlow": {5 * time.Minute, open}},
	},
	{
		name: "publications are missed", series: map[string]string{
			`headcount_redis_publication_gaps_total{job="us",instance="1"}`: "+15",
		}, fires: map[string]moments{"HeadcountPublicationGaps": {10 * time.Minute, open}},
	},
	{
		name: "joins are slow", series: histogram("headcount_join_to_seen_seconds_bucket", 5),
		fires: map[string]moments{"HeadcountJoinsSlow": {5 * time.Minute, open}},
	},
	{name: "heartbeats are lost",
		series: map[string]string{
			`headcount_sessions_silent_total{job="us",instance="1"}`: "+60",
			`headcount_users{job="us",instance="1"}`:                 "100",
		},
		fires: map[string]moments{"HeadcountHeartbeatsMissing": {5*time.Minute + 2*scrape, open - 2*scrape}}},
	{name: "datagrams are refused",
		series: map[string]string{
			`headcount_datagrams_dropped_total{job="us",instance="1",direction="in",reason="key"}`: "+150",
		},
		fires: map[string]moments{"HeadcountDatagramsDropped": {5 * time.Minute, open}}},
	{name: "a process starts again and again",
		series: map[string]string{`headcount_ring_changes_total{job="us",instance="1"}`: "+1"}, lasts: 50 * time.Minute,
		fires: map[string]moments{"HeadcountOwnersChange": {30*time.Minute + 3*scrape, 10*time.Minute - 4*scrape}}},
	{
		name: "ten processes are replaced, one after the other", series: map[string]string{
			`headcount_ring_changes_total{job="us",instance="1"}`: "+1",
		}, lasts: 5 * time.Minute,
	},
	{
		name: "a gateway is full", series: map[string]string{
			`headcount_limits_hit_total{job="us",instance="1",limit="connections"}`: "+3",
		}, fires: map[string]moments{"HeadcountClientsRefused": {3 * time.Minute, open}},
	},
	{
		name: "a gateway is not reached", series: map[string]string{
			`headcount_push_failures_total{job="us",instance="1"}`: "+15",
		}, fires: map[string]moments{"HeadcountPushesFail": {5 * time.Minute, open}},
	},
	{
		name: "changes of counters are slow", series: histogram("headcount_change_to_acknowledged_seconds_bucket", 5),
		fires: map[string]moments{"HeadcountChangesSlow": {5 * time.Minute, open}},
	},
	{name: "the store of counters refuses changes",
		series: map[string]string{`headcount_counter_calls_total{job="us",instance="1",outcome="unavailable"}`: "+100"},
		fires:  map[string]moments{"HeadcountCountersUnavailable": {3 * time.Minute, open}}},
	{name: "counters have no owner", series: map[string]string{
		`headcount_owner_partitions{job="us",instance="1"}`: "32",
		`headcount_owner_partitions{job="us",instance="2"}`: "32 31",
		`headcount_owner_partitions{job="eu",instance="1"}`: "64",
	}, fires: map[string]moments{"HeadcountCountersWithoutOwner": {30 * time.Second, 0}}},
	{name: "no owner of counters is left", series: map[string]string{
		`headcount_owner_partitions{job="us",instance="1"}`: "64 stale", `headcount_ready{job="us",instance="2"}`: "1",
		`headcount_owner_partitions{job="eu",instance="1"}`: "64",
	}, fires: map[string]moments{"HeadcountCountersWithoutOwner": {30 * time.Second, 0}}},
	{name: "Redis has lost commits of counters",
		series: map[string]string{
			`headcount_owner_commits_total{job="us",instance="1",outcome="lost"}`: "+1",
		}, lasts: scrape, brief: true,
		fires: map[string]moments{"HeadcountCountersLost": {0, 10*time.Minute - scrape}}},
	{name: "an owner does not answer",
		series: map[string]string{`headcount_owner_calls_total{job="us",instance="1",outcome="unavailable"}`: "+15"},
		fires:  map[string]moments{"HeadcountOwnersUnavailable": {3 * time.Minute, open}}},
	{
		name: "PostgreSQL is slow", series: map[string]string{
			`headcount_persist_lag_seconds{job="us",instance="1"}`: "1 61",
		}, fires: map[string]moments{"HeadcountPersistLag": {time.Minute, 0}},
	},
	{
		name: "the table of pages is locked", series: map[string]string{
			`headcount_pages_table_lag_seconds{job="us",instance="1"}`: "1 61",
		}, fires: map[string]moments{"HeadcountPagesTableBehind": {time.Minute, 0}},
	},
	{name: "another region is silent",
		series: map[string]string{`headcount_region_heard_seconds{job="us",instance="1",peer="eu"}`: "/15"},
		fires:  map[string]moments{"HeadcountRegionSilent": {2 * time.Minute, 0}}},
	{name: "another region is left out",
		series: map[string]string{`headcount_region_left_out{job="us",instance="1",peer="eu"}`: "0 1"},
		fires:  map[string]moments{"HeadcountRegionSilent": {time.Minute, 0}}},
	{name: "another region lacks changes",
		series: map[string]string{`headcount_counters_region_lag_seconds{job="us",instance="1",peer="eu"}`: "0 31"},
		fires:  map[string]moments{"HeadcountRegionLag": {time.Minute, 0}}},
	{name: "another region is a stranger",
		series: map[string]string{`headcount_region_refused{job="us",instance="1",peer="eu"}`: "0 1"},
		fires:  map[string]moments{"HeadcountRegionRefused": {time.Minute, 0}}},
	{name: "a receiver of webhooks fails", series: map[string]string{
		`headcount_webhook_failures_total{job="us",instance="1",host="a",webhook="1"}`: "+0.125",
		`headcount_webhook_messages_total{job="us",instance="1",host="b",webhook="2"}`: "+1",
		// Another one of the same host.
		`headcount_webhook_messages_total{job="us",instance="1",host="a",webhook="3"}`: "+1",
	}, fires: map[string]moments{"HeadcountWebhookFails": {7 * time.Minute, 6*time.Minute - scrape}}},
	{name: "events are dropped",
		series: map[string]string{
			`headcount_webhook_dropped_total{job="us",instance="1",reason="old"}`: "+1",
		}, lasts: scrape, brief: true,
		fires: map[string]moments{"HeadcountWebhookEventsDropped": {0, 15*time.Minute - scrape}}},
	{name: "a certificate is overdue",
		series: map[string]string{
			`headcount_certificate_overdue{job="us",instance="1"}`: "0 1",
		}, lasts: 70 * time.Minute,
		fires: map[string]moments{"HeadcountCertificateEnds": {time.Hour, 0}}},
	{name: "a process stands still each minute",
		series: map[string]string{`headcount_suspensions_total{job="us",instance="1"}`: "+0.25"},
		fires:  map[string]moments{"HeadcountSuspended": {12 * time.Minute, 8*time.Minute - scrape}}},
	{name: "a request panics", series: map[string]string{`headcount_panics_total{job="us",instance="1"}`: "+1"},
		lasts: scrape, brief: true,
		fires: map[string]moments{"HeadcountPanics": {0, time.Hour - scrape}}},
}

const healthy = 5 * time.Minute // the time before a cause, in which all windows fill

// values writes a series in promtool's notation.
func values(spec string, well, ill, after int) string {
	from, to, two := strings.Cut(spec, " ")
	if two {
		return fmt.Sprintf("%s %s %s", run(from, well), run(to, ill), run(from, after))
	}

	n, err := strconv.ParseFloat(spec[1:], 64)
	if err != nil {
		return run(spec, well+ill+after)
	}

	grows := fmt.Sprintf("%s %g+%gx%d", run("0", well), n, n, ill-1)
	switch spec[0] {
	case '+':
		return grows + " " + run(fmt.Sprint(float64(ill)*n), after)
	case '/':
		return grows + " " + run("0", after)
	default:
		return run(spec, well+ill+after)
	}
}

// run returns a value n times.
func run(value string, n int) string {
	if value == "stale" {
		return strings.Repeat("stale ", n)
	}

	return fmt.Sprintf("%sx%d", value, n-1)
}

// TestServerAlertsFireAndEnd lets promtool evaluate the rules over hours of scrapes. Each trouble has jobs of its own.
func TestServerAlertsFireAndEnd(t *testing.T) {
	t.Parallel()
	type object = map[string]any
	const after = 65 * time.Minute // by then the longest window is over
	seen := map[string]bool{}
	test := func(all []trouble) object {
		var series, checks []object
		longest := time.Duration(0)
		for _, tr := range all {
			longest = max(longest, tr.lasts)
		}

		end := healthy + longest + after

		// Each trouble has regions of its own, so that no alert of another one counts.
		for i, tr := range all {
			own := strings.NewReplacer(`job="us"`, fmt.Sprintf("job=\"us %d\"", i), `job="eu"`,
				fmt.Sprintf("job=\"eu %d\"", i))

			for s, spec := range tr.series {
				series = append(series, object{
					"series": own.Replace(s),
					"values": values(spec, int(healthy/scrape), int(tr.lasts/scrape),
						int((end-healthy-tr.lasts)/scrape)),
				})
			}

			check := func(expr string, at time.Duration, want map[string]int) {
				samples := []object{}
				for alert, n := range want {
					samples = append(samples, object{"labels": fmt.Sprintf("{alertname=%q}", alert), "value": n})
				}
				checks = append(checks, object{
					"expr": fmt.Sprintf(expr, i), "eval_time": at.String(), "exp_samples": samples,
				})
			}

			// Where alerts fire at different times, only those whose time has come may fire.
			scrapes := map[string]int{} // in which each alert fires
			for alert, m := range tr.fires {
				seen[alert] = true
				scrapes[alert] = int((tr.lasts + m.ends - m.after) / scrape)
				before, then := map[string]int{}, map[string]int{}
				for other, o := range tr.fires {
					if o.after < m.after {
						before[other] = 1
					}
					if o.after <= m.after {
						then[other] = 1
					}
				}

				const firing = `group by (alertname) (ALERTS{alertstate="firing",job=~".. %d"})`
				// Just before and just after the alert begins to fire.
				check(firing, healthy+m.after-scrape, before)
				check(firing, healthy+m.after, then)
			}

			// Over the whole run an alert fires in as many scrapes as it should, and no other alert fires at all.
			check(`max by (alertname) (count_over_time(ALERTS{alertstate="firing",job=~".. %d"}[1d]))`,
				end-scrape, scrapes)
		}

		return object{"interval": scrape.String(), "input_series": series, "promql_expr_test": checks}
	}

	// Each cause also comes for one scrape only, which raises no alert unless something is lost.
	lasting, brief := troubles, []trouble(nil)

	for i := range lasting {
		lasting[i].lasts = cmp.Or(lasting[i].lasts, 20*time.Minute)
		if tr := lasting[i]; !tr.brief {
			brief = append(brief, trouble{name: tr.name, series: tr.series, lasts: scrape})
		}
	}
	// This Prometheus has never scraped a process.
	tests := []object{test(lasting), test(brief), {"interval": scrape.String(), "promql_expr_test": []object{
		{"expr": `count(ALERTS{alertstate="firing"})`, "eval_time": "45s"},
		{
			"expr": `count by (alertname) (ALERTS{alertstate="firing"})`, "eval_time": "1m",
			"exp_samples": []object{{"labels": `{alertname="HeadcountGone"}`, "value": 1}},
		},
	}}}

	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllSubmatch(file(t, "alerts.yaml"), -1) {
		if alert := string(m[1]); !seen[alert] {
			t.Errorf("no trouble of this test raises %s", alert)
		}
	}

	// promtool reads its tests from a file; JSON is YAML.
	rules, err := filepath.Abs("alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(object{
		"rule_files": []string{rules}, "evaluation_interval": scrape.String(), "tests": tests,
	})
	if err != nil {
		t.Fatal(err)
	}

	path := filepath.Join(t.TempDir(), "tests.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}

	if out, err := exec.Command("promtool", "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v (run make setup if promtool is missing)\n%s", err, out)
	}
}

// faster is the factor by which TestClockAlertsOfRealFaults scales time down: the durations of alerts.yaml, and those
// of the faults that it plants. The program's own times stay as they are, so a larger factor would mostly test those.
const faster = 10

// scaled returns rules with shorter durations, and with lower thresholds of ages in seconds.
func scaled(t *testing.T, rules string) string {
	t.Helper()
	units := map[string]int{"s": 1000, "m": 60_000, "h": 3_600_000, "w": 604_800_000}

	rules = regexp.MustCompile(`((?:for|interval): |\[)(\d+)([smhw])\b`).
		ReplaceAllStringFunc(rules, func(found string) string {
			at := strings.IndexAny(found, "0123456789")
			n, err := strconv.Atoi(found[at : len(found)-1])
			if err != nil {
				t.Fatal(err)
			}

			return fmt.Sprintf("%s%dms", found[:at], n*units[found[len(found)-1:]]/faster)
		})

	// Ages in seconds are compared with numbers, which lose their last zero.
	return regexp.MustCompile(`((?:heard|lag)_seconds > \d+)0\b`).ReplaceAllString(rules, "$1")
}

// jobs has the regions that Prometheus watches, and the file with the addresses of their processes.
type jobs struct {
	file string
	at   map[string][]string // admin addresses by job
}

// write replaces the file at once, as Prometheus reads it at any time.
func (j *jobs) write(t *testing.T) {
	t.Helper()
	groups := []map[string]any{}
	for job, targets := range j.at {
		groups = append(groups, map[string]any{"targets": targets, "labels": map[string]string{"job": job}})
	}

	text, err := json.Marshal(groups)
	if err == nil {
		err = errors.Join(os.WriteFile(j.file+".new", text, 0o600), os.Rename(j.file+".new", j.file))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// regional is a process of a region.
type regional struct {
	job, public, admin string
	flags              []string
	process            servertest.Process
	log                servertest.Log
}

func (r *regional) start(t *testing.T) {
	t.Helper()
	cmd := exec.Command(binary, r.flags...)
	cmd.Env = testkit.Environ()
	cmd.Stderr = &r.log
	if err := r.process.Start(cmd); err != nil {
		t.Fatal(err)
	}
}

// use changes counters and pages until the test ends, so that a failing store or owner shows in the metrics.
func (r *regional) use(ctx context.Context) {
	for ctx.Err() == nil {
		for _, path := range []string{"/api/v1/counters/views:1/increment", "/p/changes"} {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.public+path,
				strings.NewReader("{}"))
			if err != nil {
				return
			}

			req.Header.Set("X-API-Key", "a key that is long enough")
			req.Header.Set("Content-Type", "application/json")

			if resp, err := http.DefaultClient.Do(req); err == nil {
				_ = resp.Body.Close()
			}
		}

		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// TestClockAlertsOfRealFaults lets a real Prometheus watch real processes with all of these faults at once, each in a
// job of its own:
//
//	brief    Redis is away for 6 s: no alert
//	away     Redis is away for a minute: HeadcountStoreAway
//	gone     all processes end, and then service discovery forgets them: HeadcountGone
//	left     the region that shares counts with gone: HeadcountRegionSilent
//	part     one of two processes ends: HeadcountProcessGone
//	persist  PostgreSQL behind Redis is away: HeadcountStoreAway, HeadcountPersistLag
//	full     the disk of --data-dir is full: HeadcountStoreAway
//
// No other alert may fire, and each of these ends after its cause. Time is scaled, see faster;
// TestServerAlertsFireAndEnd has the true times.
func TestClockAlertsOfRealFaults(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var all []*regional
	j := &jobs{file: filepath.Join(dir, "jobs.json"), at: map[string][]string{}}

	add := func(job string, flags ...string) *regional {
		r := &regional{job: job, public: servertest.FreeAddr(), admin: servertest.FreeAddr()}
		r.flags = append([]string{
			"serve", "--listen=" + r.public, "--admin-listen=" + r.admin, "--cluster-listen=" + servertest.FreeAddr(),
			"--api-key=a key that is long enough",
		}, flags...)
		all = append(all, r)
		j.at[job] = append(j.at[job], r.admin)
		return r
	}

	// Each job has a Redis of its own, except the one with a data directory.
	redis := map[string]*redistest.Server{}
	for _, job := range []string{"brief", "away", "gone", "left", "part", "persist"} {
		redis[job] = redistest.Start(t, redistest.Durable...)
	}
	postgres := pgtest.Start(t)

	add("brief", "--redis="+redis["brief"].URL())
	add("away", "--redis="+redis["away"].URL())
	gone := add("gone", "--redis="+redis["gone"].URL(), "--region=gone", "--peer=left="+redis["left"].URL())
	add("left", "--redis="+redis["left"].URL(), "--region=left", "--peer=gone="+redis["gone"].URL())
	add("part", "--redis="+redis["part"].URL())
	part := add("part", "--redis="+redis["part"].URL(), "--roles=gateway")
	add("persist", "--redis="+redis["persist"].URL(), "--postgres="+postgres.Database(t))
	full := add("full", "--data-dir="+filepath.Join(dir, "data"))

	// Every process is in use, so that its metrics move.
	ctx, stop := context.WithCancel(t.Context())
	var users sync.WaitGroup
	t.Cleanup(func() {
		stop()
		users.Wait()
		for _, r := range all {
			r.process.Kill()
			if t.Failed() {
				t.Logf("%s: %s", r.job, &r.log)
			}
		}
	})

	for _, r := range all {
		r.start(t)
	}
	for _, r := range all {
		testkit.Eventually(t, r.job+" is ready", func() bool { return servertest.Ready(t.Context(), r.admin) == nil })
		users.Go(func() { r.use(ctx) })
	}

	j.write(t)

	rules := filepath.Join(dir, "alerts.yaml")
	config := filepath.Join(dir, "prometheus.yaml")
	web := servertest.FreeAddr()
	settings := fmt.Sprintf("global: {scrape_interval: %[1]dms, scrape_timeout: %[1]dms, evaluation_interval: "+
		"%[1]dms}\nrule_files: [%[2]s]\nscrape_configs:\n  - job_name: all\n    file_sd_configs: [{files: [%[3]s]}]\n",
		(scrape / faster).Milliseconds(), rules, j.file)
	if err := errors.Join(os.WriteFile(rules, []byte(scaled(t, string(file(t, "alerts.yaml")))), 0o600),
		os.WriteFile(config, []byte(settings), 0o600)); err != nil {
		t.Fatal(err)
	}

	background(t, 10*time.Second, "prometheus", "--config.file="+config,
		"--storage.tsdb.path="+filepath.Join(dir, "tsdb"), "--web.listen-address="+web, "--log.level=warn")

	// query returns the jobs and alerts of an expression's series.
	query := func(expr string) (of []string) {
		resp, err := http.Get("http://" + web + "/api/v1/query?query=" + url.QueryEscape(expr))
		if err != nil {
			return nil // Prometheus is starting
		}
		defer resp.Body.Close()

		var answer struct {
			Data struct {
				Result []struct{ Metric map[string]string }
			}
		}

		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			return nil
		}

		for _, r := range answer.Data.Result {
			of = append(of, strings.TrimSpace(r.Metric["job"]+" "+r.Metric["alertname"]))
		}

		slices.Sort(of)
		return slices.Compact(of)
	}
	const away = "away HeadcountStoreAway"
	causes := []string{
		"full HeadcountStoreAway", "gone HeadcountGone", "left HeadcountRegionSilent", "part HeadcountProcessGone",
		"persist HeadcountPersistLag", "persist HeadcountStoreAway",
	}

	begun := time.Now()
	over := map[string]time.Duration{}    // when the cause of an alert ended
	fired := map[string][]time.Duration{} // each alert that ever fired, and when it was seen

	// firing returns the alerts that fire now, except those that depend on the speed of this machine, and the one about
	// lost data, because a restarted Redis may count as a loss.
	const others = "HeadcountRedisSlow|HeadcountJoinsSlow|HeadcountChangesSlow|HeadcountSuspended|" +
		"HeadcountRedisLostData"
	firing := func() []string {
		time.Sleep(50 * time.Millisecond) // often enough to miss no alert
		now := query(`ALERTS{alertstate="firing",alertname!~"` + others + `"}`)
		for _, a := range causes {
			if _, ended := over[a]; !ended && fired[a] != nil && !slices.Contains(now, a) {
				t.Fatalf("%s ended before its cause did", a)
			}
		}

		for _, a := range now {
			fired[a] = append(fired[a], time.Since(begun))
		}

		return now
	}

	// An alert raised by the start would not be one of a fault.
	testkit.Eventually(t, "all processes are scraped and ready", func() bool {
		return len(query("headcount_ready == 1")) == len(j.at) && len(query("up == 0")) == 0
	})

	begun = time.Now()

	// The report says when each alert fired, in operators' time.
	defer func() {
		for a, when := range fired {
			scaled := func(d time.Duration) time.Duration { return (faster * d).Round(time.Second) }
			if until, must := over[a]; must {
				t.Logf("%s from %s to %s, the cause has ended after %s",
					a, scaled(when[0]), scaled(when[len(when)-1]), scaled(until))
			} else {
				t.Errorf("%s fired from %s to %s, without a cause", a, scaled(when[0]), scaled(when[len(when)-1]))
			}
		}
	}()

	// All faults but one begin.
	redis["brief"].Kill()
	redis["away"].Kill()
	gone.process.Kill()
	part.process.Kill()
	postgres.Kill()

	if err := unix.Prlimit(full.process.PID(), unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: unix.RLIM_INFINITY},
		nil); err != nil {
		t.Fatal(err)
	}

	// Six seconds without Redis are no alert.
	time.Sleep(time.Until(begun.Add(6 * time.Second / faster)))
	redis["brief"].Restart(t)

	testkit.Eventually(t, "an alert that Redis is away", func() bool { return slices.Contains(firing(), away) })

	time.Sleep(time.Until(begun.Add(time.Minute / faster)))
	redis["away"].Restart(t)
	over[away] = time.Since(begun)

	testkit.Eventually(t, "an alert that a region is gone",
		func() bool { return slices.Contains(firing(), "gone HeadcountGone") })
	// When service discovery forgets the machines of the region, the alert goes on.
	address := j.at["gone"]
	delete(j.at, "gone")
	j.write(t)
	testkit.Eventually(t, "a region that is not found", func() bool {
		firing()
		return len(query(`up{job="gone"}`)) == 0
	})
	testkit.Eventually(t, fmt.Sprintf("the alerts %q", causes), func() bool { return slices.Equal(firing(), causes) })
	// All faults end.
	j.at["gone"] = address
	j.write(t)
	gone.start(t)
	part.start(t)
	postgres.Restart(t)
	if err := unix.Prlimit(full.process.PID(), unix.RLIMIT_FSIZE,
		&unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil); err != nil {
		t.Fatal(err)
	}

	for _, a := range causes {
		over[a] = time.Since(begun)
	}
	testkit.Eventually(t, "the end of all alerts", func() bool { return len(firing()) == 0 })
	for time.Since(begun) < 5*time.Minute/faster { // in this time an alert would fire for what lingers in a window
		firing()
	}
}
