package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/goccy/go-yaml"
	"github.com/rs/zerolog"

	"headcount/cmd/headcount/config"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
	"headcount/presence"
)

// running is a server within this process that ends with the test.
type running struct{ public, admin string } // addresses

// run starts the program with these flags, and waits until it is ready.
func run(t testing.TB, args ...string) running {
	t.Helper()
	r := running{servertest.FreeAddr(), servertest.FreeAddr()}
	cfg := settings(t, append(args, "--listen", r.public, "--admin-listen", r.admin)...)

	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, cfg, zerolog.Nop()) }()

	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	testkit.Eventually(t, "a server that is ready", func() bool {
		select {
		case err := <-ended:
			ended <- nil
			t.Fatalf("the server ended: %v", err)
		default:
		}
		return servertest.Ready(t.Context(), r.admin) == nil
	})

	return r
}

// settings returns the settings of serve with only these flags.
func settings(t testing.TB, args ...string) config.Server {
	t.Helper()
	var c commands
	p := program{args: append([]string{"serve"}, args...), stdout: io.Discard, stderr: io.Discard}
	if _, err := p.parse(&c); err != nil {
		t.Fatal(err)
	}

	return c.Serve.Config
}

func fetch(t testing.TB, method, url, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}

	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}

	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// series has the labels of all series, by the name of the metric.
type series map[string][]map[string]string

var (
	sampleLine = regexp.MustCompile(`(?m)^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$`)
	labelPair  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
)

func parseSeries(text string) series {
	all := series{}
	for _, line := range sampleLine.FindAllStringSubmatch(text, -1) {
		labels := map[string]string{}
		for _, l := range labelPair.FindAllStringSubmatch(line[2], -1) {
			labels[l[1]] = l[2]
		}
		all[line[1]] = append(all[line[1]], labels)
	}

	return all
}

// query has the names in a PromQL expression.
type query struct {
	metrics   []string
	matchers  [][]matcher // the label matchers of each metric
	grouped   []string    // labels in by and on
	functions []string
}

type matcher struct{ label, op, value string }

var (
	word        = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*`)
	number      = regexp.MustCompile(`^[0-9][0-9.a-zA-Z]*`)
	selection   = regexp.MustCompile(`^\s*\{([^}]*)\}`)
	oneMatcher  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	inBrackets  = regexp.MustCompile(`^\s*\(([^()]*)\)`)
	groupings   = []string{"by", "without", "on", "ignoring", "group_left", "group_right"}
	operators   = []string{"and", "or", "unless", "bool", "offset"}
	knownToProm = []string{
		"sum", "max", "min", "avg", "count", "rate", "increase", "histogram_quantile", "group", "last_over_time",
		"absent_over_time", "label_values",
	}
)

func parseQuery(expr string) (q query) {
	for expr != "" {
		name := word.FindString(expr)
		switch {
		case expr[0] == '[': // the range of a vector
			_, expr, _ = strings.Cut(expr, "]")
		case name == "":
			expr = expr[max(1, len(number.FindString(expr))):]
		case slices.Contains(operators, name):
			expr = expr[len(name):]
		case slices.Contains(groupings, name):
			expr = expr[len(name):]
			if labels := inBrackets.FindStringSubmatch(expr); labels != nil {
				q.grouped = append(q.grouped, regexp.MustCompile(`\w+`).FindAllString(labels[1], -1)...)
				expr = expr[len(labels[0]):]
			}
		default:
			expr = expr[len(name):]

			// A name before a parenthesis or a grouping is a function. Any other name is a metric.
			rest := strings.TrimSpace(expr)
			grouping := word.FindString(rest)
			if strings.HasPrefix(rest, "(") || slices.Contains(groupings[:2], grouping) {
				q.functions = append(q.functions, name)
				continue
			}

			q.metrics = append(q.metrics, name)
			var all []matcher
			if s := selection.FindStringSubmatch(expr); s != nil {
				for _, m := range oneMatcher.FindAllStringSubmatch(s[1], -1) {
					all = append(all, matcher{m[1], m[2], m[3]})
				}
				expr = expr[len(s[0]):]
			}

			q.matchers = append(q.matchers, all)
		}
	}

	return q
}

// scraped has the labels that Prometheus adds.
var scraped = []string{"job", "instance"}

// faults returns the names in an expression that do not exist, and the labels that a text shows without effect.
func (all series) faults(expr string, shown ...string) (wrong []string) {
	q := parseQuery(expr)
	for _, f := range q.functions {
		if !slices.Contains(knownToProm, f) {
			wrong = append(wrong, "no function "+f)
		}
	}

	if len(q.metrics) == 0 {
		wrong = append(wrong, "no metric")
	}

	has := func(metric, label string, fits func(string) bool) bool {
		return slices.Contains(scraped, label) || slices.ContainsFunc(all[metric], func(labels map[string]string) bool {
			value, ok := labels[label]
			return ok && fits(value)
		})
	}
	anything := func(string) bool { return true }
	for i, metric := range q.metrics {
		if len(all[metric]) == 0 {
			wrong = append(wrong, "no metric "+metric)
			continue
		}

		for _, m := range q.matchers[i] {
			fits := anything
			switch m.op {
			case "=":
				fits = func(v string) bool { return v == m.value }
			case "=~":
				if !strings.Contains(m.value, "$") {
					fits = regexp.MustCompile("^(?:" + m.value + ")$").MatchString
				}
			}
			if !has(metric, m.label, fits) {
				wrong = append(wrong, fmt.Sprintf("no %s with %s%s%q", metric, m.label, m.op, m.value))
			}
		}
	}

	for _, label := range slices.Concat(q.grouped, shown) {
		if !slices.ContainsFunc(q.metrics, func(metric string) bool { return has(metric, label, anything) }) {
			wrong = append(wrong, "no label "+label)
		}
	}

	return wrong
}

var shownLabel = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}`)

func shownLabels(text string) (labels []string) {
	for _, m := range shownLabel.FindAllStringSubmatch(text, -1) {
		labels = append(labels, m[1])
	}
	return labels
}

// boundedLabels has the labels with few values. No label has a page, a user, a key or the address of a client. A host
// is that of a webhook.
var boundedLabels = []string{
	"le",
	"cause", "code", "direction", "host", "limit", "lost", "method", "outcome", "path", "peer", "reason", "route",
	"status", "store", "type", "webhook",
}

func TestServerDashboardAndAlertsNameWhatExists(t *testing.T) {
	t.Parallel()
	const withKey = "--api-key=a key that is long enough"
	redis, peer, postgres := redistest.Start(t), redistest.Start(t), pgtest.Start(t)

	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuses" {
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	defer receiver.Close()

	// A server with everything that has metrics, and one in another region.
	r := run(t, withKey, "--redis", redis.URL(), "--postgres", postgres.Database(t), "--cluster-listen",
		servertest.FreeAddr(),
		"--pages-table", "*",
		"--webhook", "page:p="+receiver.URL, "--webhook", "page:p="+receiver.URL+"/refuses", "--webhook-secret",
		"whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))

	begun := parseSeries(fetch(t, "GET", "http://"+r.admin+"/metrics", ""))
	region := run(t, append(certificateFor(t, time.Now(), time.Now().Add(time.Hour), "counter.example.com"),
		withKey, "--region", "eu", "--redis", peer.URL(), "--peer", "us="+redistest.Start(t).URL(), "--cluster-listen",
		servertest.FreeAddr())...)

	// Some metrics begin with the first event.
	fetch(t, "GET", "http://"+r.public+"/p/counter", "")
	ws, _, err := websocket.Dial(t.Context(), "ws://"+r.public+"/-/ws", nil)
	if err != nil {
		t.Fatal(err)
	}

	defer ws.CloseNow()
	if err := ws.Write(t.Context(), websocket.MessageText, []byte(`{"type":"join","page":"p"}`)); err != nil {
		t.Fatal(err)
	}
	for counted := false; !counted; {
		_, text, err := ws.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		counted = strings.Contains(string(text), `"count":1,`)
	}

	fetch(t, "POST", "http://"+r.public+"/api/v1/counters/views:1/increment", "")
	metrics := ""
	testkit.Eventually(t, "messages to the receivers of webhooks in the metrics", func() bool {
		metrics = fetch(t, "GET", "http://"+r.admin+"/metrics", "")
		return strings.Contains(metrics, "headcount_webhook_messages_total{") &&
			strings.Contains(metrics, "headcount_webhook_failures_total{")
	})

	// No server has all metrics, and the metric up is made by Prometheus itself.
	metrics += fetch(t, "GET", "http://"+region.admin+"/metrics", "")
	all := parseSeries(metrics)
	all["up"] = []map[string]string{{}}

	for name, some := range all {
		family := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if strings.HasPrefix(name, "headcount_") &&
			!regexp.MustCompile(`(?m)^# HELP (`+name+`|`+family+`) \S.{10}`).MatchString(metrics) {
			t.Errorf("%s has no help", name)
		}

		for _, labels := range some {
			for label := range labels {
				if strings.HasPrefix(name, "headcount_") && !slices.Contains(boundedLabels, label) {
					t.Errorf("%s has a label %s: is the number of its values bounded?", name, label)
				}
			}
		}
	}

	for _, must := range []string{
		"headcount_join_to_seen_seconds_count", "headcount_change_to_acknowledged_seconds_count",
		"headcount_persist_lag_seconds", "headcount_persist_rows", "headcount_region_lag_seconds",
		"headcount_counters_region_lag_seconds", "headcount_pages_table_lag_seconds",
	} {
		if len(all[must]) == 0 {
			t.Errorf("the metric %s does not exist", must)
		}
	}

	// Every expression of the dashboard and of the alerts names metrics and labels that exist.
	text, err := os.ReadFile("../../deploy/grafana.json")
	if err != nil {
		t.Fatal(err)
	}

	var board struct {
		Panels []struct {
			Title, Type string
			Targets     []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}

	panels := 0
	for _, p := range board.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q has no expressions", p.Title)
		}

		for _, target := range p.Targets {
			panels++
			for _, wrong := range all.faults(target.Expr, shownLabels(target.LegendFormat)...) {
				t.Errorf("panel %q: %s\n\t%s", p.Title, wrong, target.Expr)
			}
		}
	}

	text, err = os.ReadFile("../../deploy/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var alerts struct {
		Groups []struct {
			Name, Interval string
			Rules          []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.UnmarshalWithOptions(text, &alerts, yaml.Strict()); err != nil {
		t.Fatal(err)
	}

	rules := 0
	for _, group := range alerts.Groups {
		for _, rule := range group.Rules {
			rules++
			for _, wrong := range all.faults(rule.Expr,
				shownLabels(rule.Annotations["summary"]+rule.Annotations["mend"])...) {
				t.Errorf("alert %s: %s\n\t%s", rule.Alert, wrong, rule.Expr)
			}

			for _, metric := range parseQuery(rule.Expr).metrics {
				if rule.For == "" && len(begun[metric]) == 0 { // otherwise Prometheus misses the first event
					t.Errorf("alert %s: %s does not begin with 0", rule.Alert, metric)
				}
			}

			if rule.Annotations["summary"] == "" || rule.Annotations["mend"] == "" || rule.Labels["severity"] == "" {
				t.Errorf("alert %s does not say what is wrong, what to do, and how bad it is", rule.Alert)
			}
		}
	}

	if panels < 40 || rules < 20 {
		t.Errorf("%d expressions of panels and %d alerts were read", panels, rules)
	}

	partitions := fmt.Sprintf("job) headcount_ready) < %d\n", presence.DefaultPartitions)
	if !strings.Contains(string(text), partitions) {
		t.Error("the alert about partitions has another number of partitions than the program")
	}
}

// The functions of the test above find wrong names in panels and alerts.
func TestWhatDoesNotExistIsFound(t *testing.T) {
	all := parseSeries("# HELP a x\na{cause=\"lost\",peer=\"eu\"} 1\nb 2\nc_bucket{le=\"0.1\"} 3\n")
	for expr, want := range map[string]string{
		`a`:                                   "",
		`sum by (cause) (rate(a[5m])) > 0.01`: "",
		`sum(a{job=~"$job",cause="lost"})`:    "",
		`a{peer=~"eu|us"} or b == 1`:          "",
		`histogram_quantile(0.99, sum by (le, job) (rate(c_bucket[1m])))`: "",
		`sum(gone) / sum(b)`:      "no metric gone",
		`rate(b[5m]) > goneagain`: "no metric goneagain",
		`a{cause="found"}`:        `no a with cause="found"`,
		`a{why="lost"}`:           `no a with why="lost"`,
		`a{peer=~"us|asia"}`:      `no a with peer=~"us|asia"`,
		`sum by (reason) (a)`:     "no label reason",
		`summe(a)`:                "no function summe",
		`1 + 1`:                   "no metric",
	} {
		if got := strings.Join(all.faults(expr), "; "); got != want {
			t.Errorf("%s: %q, want %q", expr, got, want)
		}
	}

	got := all.faults("a", shownLabels("{{cause}} of {{ $labels.region }} is {{ $value }}")...)
	if !slices.Equal(got, []string{"no label region"}) {
		t.Errorf("the faults are %q, want the label region", got)
	}
}
