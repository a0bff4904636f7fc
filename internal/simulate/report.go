package simulate

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// A Report is what a run found. Its JSON is stable: members may be added, but none changes its name or meaning.
type Report struct {
	Scenario string   `json:"scenario"` // mixed, replay, or the one that was asked for
	Seed     uint64   `json:"seed"`
	URLs     []string `json:"urls"`
	OK       bool     `json:"ok"`                 // completed, and no count was wrong
	Error    string   `json:"error,omitempty"`    // why it was not completed
	Seconds  float64  `json:"seconds"`            // from first to last connection
	Users    int      `json:"users"`              // distinct ones, including watchers and probes
	Pages    int      `json:"pages"`              // without those of probes
	Counters int      `json:"counters,omitempty"` // of the scenario counters

	Connects          int64   `json:"connects"`            // connections that were welcomed
	ConnectsPerSecond float64 `json:"connects_per_second"` // in the best second
	RefusedUpgrades   int64   `json:"refused_upgrades"`    // answered with a status, 503 for example
	Drops             int64   `json:"drops"`               // connections that the run did not end
	SentAway          int64   `json:"sent_away"`           // reconnect frames

	Messages      int64 `json:"messages"`       // received
	Counts        int64 `json:"counts"`         // count frames among them
	StaleCounts   int64 `json:"stale_counts"`   // of these, marked stale
	BytesReceived int64 `json:"bytes_received"` // on the wire after the handshake, frame headers and pings too

	// From when a user sends a join until another client, subscribed to that page, holds a count that includes the
	// user. Probes measure it on pages of their own.
	JoinToSeen Latency `json:"join_to_seen_ms"`

	RefusedJoins int64            `json:"refused_joins"` // bad_page errors
	ErrorFrames  map[string]int64 `json:"error_frames"`  // by code

	WrongCounts      int64    `json:"wrong_counts"` // everything that breaks the contract, including the next two
	NegativeCounts   int64    `json:"negative_counts"`
	BackwardVersions int64    `json:"backward_versions"`
	Wrong            []string `json:"wrong"` // the first of WrongCounts, in words

	SiteChecked bool         `json:"site_checked"` // `*` was compared, because nobody else changed it at the start
	Checkpoints []Checkpoint `json:"checkpoints"`

	Churn   *ChurnReport       `json:"churn,omitempty"`
	Replay  *ReplayReport      `json:"replay,omitempty"`
	Figures map[string]float64 `json:"figures,omitempty"` // of a scenario, with the unit in the name
	Server  *ServerReport      `json:"server,omitempty"`  // with --pid
}

// Latency is a distribution in milliseconds.
type Latency struct {
	Samples int64   `json:"samples"`
	P50     float64 `json:"p50"`
	P99     float64 `json:"p99"`
	Max     float64 `json:"max"`
	Missed  int64   `json:"missed"` // not seen within 10 s
}

// stats has counts that the clients' goroutines add to.
type stats struct {
	connects, refusedUpgrades, drops, sentAway atomic.Int64
	messages, counts, stale, bytes             atomic.Int64
	negative, backward                         atomic.Int64

	bestSecond atomic.Int64 // connects; the progress goroutine measures it

	mu     sync.Mutex
	errors map[string]int64 // bounded: codes beyond maxCodes are counted as "other"
}

const maxCodes = 32

func (s *stats) errorFrame(code string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.errors == nil {
		s.errors = map[string]int64{}
	}

	_, known := s.errors[code]
	if !known && len(s.errors) >= maxCodes {
		code = "other"
	}
	s.errors[code]++
}

func (s *stats) errorFrames() map[string]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()

	codes := maps.Clone(s.errors)
	if codes == nil {
		codes = map[string]int64{} // {} in JSON, not null
	}

	return codes
}

// upsets returns how many connections the run did not end itself.
func (s *stats) upsets() int64 { return s.drops.Load() + s.sentAway.Load() }

// faults counts what was wrong, and keeps the first texts about it: later ones are often consequences.
type faults struct {
	mu    sync.Mutex
	n     int
	texts []string
}

const maxTexts = 20

func (f *faults) add(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()

	f.n++
	if len(f.texts) < maxTexts {
		f.texts = append(f.texts, fmt.Sprintf(format, args...))
	}
}

// merge adds the faults of g, to which nobody adds any more.
func (f *faults) merge(g *faults) {
	f.mu.Lock()
	defer f.mu.Unlock()

	f.n += g.n
	f.texts = append(f.texts, g.texts[:min(len(g.texts), maxTexts-len(f.texts))]...)
}

// take returns the texts, and begins anew.
func (f *faults) take() (texts []string) {
	f.mu.Lock()
	defer f.mu.Unlock()

	texts = f.texts
	if more := f.n - len(f.texts); more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}

	f.n = 0
	f.texts = nil

	return texts
}

func (f *faults) get() (n int, texts []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n, append([]string{}, f.texts...) // [] in JSON, not null
}

// report returns the report of the run. err says why the run was not completed; nil: it was.
func (c *crowd) report(err error) Report {
	s := &c.stats
	r := c.result
	r.Scenario = c.scenario
	r.Seed = c.cfg.Seed
	r.URLs = c.cfg.URL
	r.Seconds = time.Since(c.began).Seconds()
	r.Users = c.users
	r.Pages = len(c.pages)

	r.Connects = s.connects.Load()
	r.ConnectsPerSecond = float64(s.bestSecond.Load())
	r.RefusedUpgrades = s.refusedUpgrades.Load()
	r.Drops = s.drops.Load()
	r.SentAway = s.sentAway.Load()

	r.Messages = s.messages.Load()
	r.Counts = s.counts.Load()
	r.StaleCounts = s.stale.Load()
	r.BytesReceived = s.bytes.Load()
	r.NegativeCounts = s.negative.Load()
	r.BackwardVersions = s.backward.Load()
	r.ErrorFrames = s.errorFrames()
	r.RefusedJoins = r.ErrorFrames["bad_page"]
	r.JoinToSeen = c.probes.report()
	r.Server = c.server.report()

	n, wrong := c.faults.get()
	r.WrongCounts = int64(n)
	r.Wrong = wrong
	if err != nil {
		r.Error = err.Error()
	}
	r.OK = err == nil && n == 0

	return r
}

func (p *probes) report() Latency {
	l := &p.latency
	return Latency{l.count(), l.ms(0.5), l.ms(0.99), l.ms(1), p.missed.Load()}
}

func (r *Report) write(w io.Writer, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		return enc.Encode(r)
	}

	_, err := io.WriteString(w, r.text())
	return err
}

func (r *Report) text() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-14s %s\n", name, fmt.Sprintf(format, args...))
	}

	line("run", "%s, seed %d, %.1f s, %d users, %d pages, %d gateways",
		r.Scenario, r.Seed, r.Seconds, r.Users, r.Pages, len(r.URLs))
	line("connections", "%d welcomed, up to %.0f/s; %d upgrades refused, %d lost, %d sent away",
		r.Connects, r.ConnectsPerSecond, r.RefusedUpgrades, r.Drops, r.SentAway)
	line("received", "%d messages, %d of them counts (%d stale), %d bytes",
		r.Messages, r.Counts, r.StaleCounts, r.BytesReceived)

	if l := r.JoinToSeen; l.Samples+l.Missed > 0 {
		line("join to seen", "p50 %.1f ms, p99 %.1f ms, max %.1f ms (%d joins, %d not seen; "+
			"by another client on the same page)", l.P50, l.P99, l.Max, l.Samples, l.Missed)
	}

	if len(r.ErrorFrames) > 0 {
		line("errors", "%d joins refused; error frames: %v", r.RefusedJoins, r.ErrorFrames)
	}
	if c := r.Churn; c != nil {
		line("churn", "%s", c)
	}
	if p := r.Replay; p != nil {
		line("replay", "%s", p)
	}

	for _, name := range slices.Sorted(maps.Keys(r.Figures)) {
		value := strconv.FormatFloat(r.Figures[name], 'f', -1, 64)
		line("measured", "%s: %s", strings.ReplaceAll(name, "_", " "), value)
	}

	for _, cp := range r.Checkpoints {
		line("checkpoint", "%-6s at %.1f s: %d users, %d clients and %d GETs compared, %d wrong, "+
			"settled in %d ms after %d ms of quiet",
			cp.Name, cp.AtS, cp.Users, cp.Clients, cp.Gets, cp.Wrong, cp.SettleMS, cp.QuietMS)
	}

	if !r.SiteChecked {
		line("not checked", "the count of the whole site, because other people are on it")
	}
	if r.Error == errInterrupted.Error() {
		line("interrupted", "before its end, so its last counts were not compared")
	}

	for _, text := range r.Wrong {
		line("WRONG", "%s", text)
	}

	line("wrong counts", "%d", r.WrongCounts)
	return b.String()
}

// enterPhase names what the run is doing now and returns what it did before.
func (c *crowd) enterPhase(name string) (before string) {
	if old := c.phase.Swap(&name); old != nil {
		before = *old
	}
	return before
}

// showProgress writes the progress of the run. On a terminal it rewrites one line. Elsewhere it writes a line every few
// seconds and when the phase changes. stop ends the output.
func (c *crowd) showProgress(w io.Writer) (stop func()) {
	end := make(chan struct{})
	done := make(chan struct{})

	before := ""
	after := "\n"
	every := 5
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		before = "\r\x1b[K"
		after = ""
		every = 1
	}

	go func() {
		defer close(done)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()

		var counts, connects int64
		var shown *string // the phase of the last line

		for n := 1; ; n++ {
			select {
			case <-end:
				if after == "" {
					fmt.Fprint(w, before)
				}
				return
			case <-tick.C:
			}

			perSecond := c.stats.counts.Load() - counts
			counts += perSecond
			fresh := c.stats.connects.Load() - connects
			connects += fresh
			c.stats.bestSecond.Store(max(c.stats.bestSecond.Load(), fresh))

			phase := c.phase.Load()
			if n%every != 0 && phase == shown {
				continue
			}
			shown = phase
			wrong, _ := c.faults.get()
			fmt.Fprintf(w, "%s%4.0fs  %s: %d clients, %d counts/s, %d lost, %d wrong%s", before,
				time.Since(c.began).Seconds(), *phase, len(c.everyone()), perSecond, c.stats.drops.Load(), wrong, after)
		}
	}()

	return func() {
		close(end)
		<-done // no progress may be written into the report
	}
}
