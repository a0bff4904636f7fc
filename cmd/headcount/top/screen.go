package top

import (
	"fmt"
	"strings"
	"time"
	"unicode"
)

// data is the data of the server's dashboard.
type data struct {
	At        int64     `json:"at"` // unix ms
	Region    string    `json:"region"`
	State     state     `json:"state"`
	Site      *count    `json:"site"`
	Pages     []count   `json:"pages"`
	Processes []process `json:"processes"`
	Regions   []region  `json:"regions"`
	Events    []event   `json:"events"` // the newest first
}

// state is the overall state; an older server sends none.
type state struct {
	Level string `json:"level"` // good, warn or bad
	Text  string `json:"text"`
}

type event struct {
	At   int64  `json:"at"` // unix ms
	Text string `json:"text"`
}

// shownEvents is how many events a terminal shows; --once prints all.
const shownEvents = 3

type count struct {
	Page  string `json:"page"`
	Count int64  `json:"count"`
	Stale bool   `json:"stale"`
}

type process struct {
	Name  string             `json:"name"`
	Roles []string           `json:"roles"`
	Since int64              `json:"since"` // unix ms
	Load  map[string]float64 `json:"load"`  // nil: it did not answer
}

type region struct {
	Name    string  `json:"name"`
	Lag     float64 `json:"lag"`
	Heard   float64 `json:"heard"`
	LeftOut bool    `json:"left_out"`
}

// screen is the content of the terminal: an answer, and the answer before it to compute rates.
type screen struct {
	before, now *data
	err         error // of the last request; if set, now is an older answer
}

// text returns the screen as text of that many columns and lines; 0: as many as needed.
func (s screen) text(width, height int) string {
	lines := []string{"Headcount  asking"}
	switch {
	case s.now != nil:
		lines = s.lines(height > 0)
	case s.err != nil:
		lines[0] = "Headcount  " + s.err.Error()
	}

	// Cut, not scrolled: the screen is drawn over itself.
	if height > 0 {
		lines = lines[:min(len(lines), height)]
	}

	for i, line := range lines {
		// Names of pages come from visitors, and may have control sequences.
		line = plain(line)
		if width > 0 {
			line = cut(line, width)
		}
		lines[i] = strings.TrimRight(line, " ")
	}

	return strings.Join(lines, "\n") + "\n"
}

// Formats of rows. The first column of processes and regions is padded already.
const (
	processRow = "%s %s %8s %6s %8s %8s %8s %9s %8s"
	regionRow  = "%s %8s %8s%s"
	eventRow   = "%-16s  %s"
	pageRow    = "%9s  %s"
)

// lines returns the lines of the answer. If few is set, it leaves out the older events.
func (s screen) lines(few bool) []string {
	d := s.now
	here := "?"
	if d.Site != nil {
		here = fmt.Sprint(d.Site.Count)
		if d.Site.Stale {
			here += " (stale)"
		}
	}

	status := ""
	if s.err != nil {
		status = "  " + s.err.Error()
	}

	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	at := time.UnixMilli(d.At).UTC().Format("15:04:05 UTC")
	// UTC, as in the log, whose times are compared with it.
	add("Headcount  region %s  users here %s  %s%s", d.Region, here, at, status)
	if d.State.Text != "" {
		add("%s%s", map[string]string{"warn": "!  ", "bad": "!! "}[d.State.Level], d.State.Text)
	}

	add("")
	add(processRow,
		pad("PROCESS", 24), pad("ROLES", 28), "UP", "CPU", "MEMORY", "CONNS", "USERS", "DELIV/S", "MSGS/S")
	for _, p := range d.Processes {
		add("%s", s.row(p))
	}

	if len(d.Regions) > 0 {
		add("")
		add(regionRow, pad("REGION", 24), "LAG", "HEARD", "")
		for _, r := range d.Regions {
			out := ""
			if r.LeftOut {
				out = "  left out of totals"
			}
			add(regionRow, pad(r.Name, 24), fmt.Sprintf("%.1fs", r.Lag), fmt.Sprintf("%.1fs", r.Heard), out)
		}
	}

	if events := d.Events; len(events) > 0 {
		// The pages below must stay on the screen.
		if few {
			events = events[:min(len(events), shownEvents)]
		}
		add("")
		add(eventRow, "TIME", "WHAT HAPPENED")
		for _, e := range events {
			add(eventRow, time.UnixMilli(e.At).UTC().Format("2006-01-02 15:04"), e.Text)
		}
	}

	add("")
	add(pageRow, "USERS", "PAGE")
	for _, p := range d.Pages {
		add(pageRow, fmt.Sprint(p.Count), p.Page)
	}

	return lines
}

// row returns the line of a process.
func (s screen) row(p process) string {
	up := time.Duration(s.now.At-p.Since) * time.Millisecond
	name := pad(p.Name, 24)
	roles := pad(strings.Join(p.Roles, ","), 28)
	if p.Load == nil {
		return fmt.Sprintf("%s %s %8s  does not answer", name, roles, age(up))
	}

	value := func(name string) string {
		v, ok := p.Load[name]
		if !ok {
			return "-"
		}
		return fmt.Sprintf("%.0f", v)
	}

	memory := "-"
	if v := p.Load["process_resident_memory_bytes"]; v > 0 {
		memory = fmt.Sprintf("%.0fM", v/(1<<20))
	}

	cpu := "-"
	if r, ok := s.rate(p, "process_cpu_seconds_total"); ok {
		cpu = fmt.Sprintf("%.0f%%", 100*r)
	}

	return fmt.Sprintf(processRow, name, roles, age(up), cpu, memory,
		value("headcount_connections"), value("headcount_users"),
		s.perSecond(p, "headcount_deliveries_total"), s.perSecond(p, "headcount_client_messages_total"))
}

// rate returns how much a counter of the process grows in a second. The rate is unknown after only one answer,
// after a restart of the process, and between two copies of the same answer.
func (s screen) rate(p process, name string) (float64, bool) {
	now, ok := p.Load[name]
	if s.before == nil || !ok {
		return 0, false
	}

	seconds := float64(s.now.At-s.before.At) / 1000
	for _, old := range s.before.Processes {
		// Since tells a restarted process, whose counters began at 0 again.
		if old.Name == p.Name && old.Since == p.Since && old.Load != nil && seconds > 0 {
			return max(now-old.Load[name], 0) / seconds, true
		}
	}

	return 0, false
}

func (s screen) perSecond(p process, name string) string {
	if r, ok := s.rate(p, name); ok {
		return fmt.Sprintf("%.0f", r)
	}

	return "-"
}

// age formats a duration in its largest unit.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(max(d, 0).Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

// pad returns text with exactly that many columns.
func pad(text string, limit int) string {
	text = cut(plain(text), limit)

	return text + strings.Repeat(" ", limit-columns(text))
}

// columns returns how many columns a terminal needs for text, at least: East Asian letters and emoji take two.
func columns(text string) (n int) {
	for _, r := range text {
		n += wide(r)
	}

	return n
}

func wide(r rune) int {
	// A rough rule instead of a table of Unicode: a wrong width only moves a column.
	eastAsian := r >= 0x2e80 && r != unicode.ReplacementChar
	hangul := r >= 0x1100 && r < 0x1200
	if eastAsian || hangul {
		return 2
	}

	return 1
}

// cut returns as much of text as fits into that many columns.
func cut(text string, limit int) string {
	if columns(text) <= limit {
		return text
	}

	n := 0
	// By letter, so that no letter is cut in the middle of its bytes.
	for i, r := range text {
		n += wide(r)
		if n >= limit { // one column is for the dots
			return text[:i] + "…"
		}
	}

	return text
}

// plain returns text without control characters of the terminal.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
