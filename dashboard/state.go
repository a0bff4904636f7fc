package dashboard

import (
	"fmt"
	"strings"
)

// silence is how long a region may be silent before the dashboard shows a warning.
const silence = 5 // seconds

// state is the overall state, as a level and sentences, the worst first.
type state struct {
	Level string `json:"level"` // good; warn: counts may lag or lack users; or bad: the counts shown may be old
	Text  string `json:"text"`
}

// alone has the texts for viewers who may not see processes and regions, by level.
var alone = map[string]string{
	"good": "All is well.",
	"warn": "Counts may lag, or lack something.",
	"bad":  "Counts may be the last that were known.",
}

func (b *Board) state(is *answer) state {
	// Collected apart, because the worst sentences stand first, wherever they come from.
	var bad, warn []string
	if err := b.cfg.Ready(); err != nil {
		bad = append(bad, fmt.Sprintf("This process is not ready: %s.", err))
	}

	switch {
	case is.Site == nil:
		bad = append(bad, "The store does not answer, so counts are the last that were known.")
	case is.Site.Stale:
		warn = append(warn, "Counts are not complete at the moment.")
	}

	// One sentence for all of them: a lost network would otherwise fill the page.
	var silent []string
	for _, p := range is.Processes {
		if p.Load == nil {
			silent = append(silent, p.Name)
		}
	}
	if len(silent) > 0 {
		processes := no(len(is.Processes), "process", "processes")
		warn = append(warn, fmt.Sprintf("No answer from %d of %s: %s.",
			len(silent), processes, strings.Join(silent, ", ")))
	}

	for _, r := range is.Regions {
		age := max(r.Heard, r.Lag)
		if r.LeftOut {
			warn = append(warn, fmt.Sprintf("The region %s is silent, and totals leave it out.", r.Name))
		} else if age > silence {
			warn = append(warn, fmt.Sprintf(
				"The region %s has not been heard for %.0f s; totals have what it said last.", r.Name, age))
		}
	}

	said := strings.Join(append(bad, warn...), " ")
	if len(bad) > 0 {
		return state{"bad", said}
	}
	if len(warn) > 0 {
		return state{"warn", said}
	}

	text := "All is well: the store and " + no(len(is.Processes), "process", "processes") + " answer"
	if n := len(is.Regions); n > 0 {
		text += ", and " + no(n, "other region is heard", "other regions are heard")
	}

	return state{"good", text + "."}
}

func no(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}

	return fmt.Sprint(n, " ", many)
}
