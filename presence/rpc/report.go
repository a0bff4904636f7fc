package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"headcount/presence"
)

// maxAnswer bounds the body of an answer. The largest report, with 2*TopPages pages of
// MaxSites sites, is below it.
const maxAnswer = 20 << 20

func writeAnswer(w http.ResponseWriter, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	// A report is of one moment.
	h.Set("Cache-Control", "no-store")
	_, _ = w.Write(body) // the client may be gone
}

// Report asks the process at addr for its report. Its errors are those of Hold. The
// answer is not signed, so only people may rely on it, on a dashboard.
func (c *Client) Report(ctx context.Context, addr string) (presence.Report, error) {
	answer, err := c.ask(ctx, addr, reportPath, []byte("{}"), http.StatusOK)
	if err != nil {
		return presence.Report{}, fmt.Errorf("rpc: report of %s: %w", addr, err)
	}

	r, err := parseReport(answer)
	if err != nil {
		return presence.Report{}, fmt.Errorf("rpc: report of %s: %w", addr, err)
	}

	return r, nil
}

func parseReport(body []byte) (r presence.Report, err error) {
	if err := json.Unmarshal(body, &r); err != nil {
		return presence.Report{}, err
	}
	if len(r.Peers) > presence.MaxPeers {
		return presence.Report{}, errors.New("too many peers")
	}

	// Answers are not signed, so what they say is bounded here.
	pages := map[presence.Site]int{}
	for _, p := range r.Top {
		if err := presence.CheckName(p.Page); err != nil {
			return presence.Report{}, err
		}

		site, _ := presence.SplitName(p.Page)
		pages[site]++
		if pages[site] > 2*presence.TopPages || len(pages) > presence.MaxSites {
			return presence.Report{}, errors.New("too many pages")
		}
	}

	return r, nil
}
