package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"

	"headcount/presence"
)

// maxAnswer bounds the body of an answer that is read; a report is far below.
const maxAnswer = 1 << 20

// wireReport is a presence.Report as JSON:
//
//	{"load":{"headcount_connections":12},"top":[{"page":"p","users":3}]}
type wireReport struct {
	Load map[string]float64 `json:"load"`
	Top  []wirePage         `json:"top"`
}

type wirePage struct {
	Page  string `json:"page"`
	Users int64  `json:"users"`
}

func writeReport(w http.ResponseWriter, r presence.Report) {
	wire := wireReport{Load: map[string]float64{}, Top: make([]wirePage, len(r.Top))}
	for name, value := range r.Load {
		if !math.IsNaN(value) && !math.IsInf(value, 0) { // which JSON has not
			wire.Load[name] = value
		}
	}
	for i, p := range r.Top {
		wire.Top[i] = wirePage(p)
	}
	body, err := json.Marshal(wire)
	if err != nil {
		panic(err) // plain members
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	_, _ = w.Write(body) // who asked may be gone
}

// Report asks the process at addr how it is. Its errors are those of Hold. The
// answer is not signed, so it is for people to look at and nothing else.
func (c *Client) Report(ctx context.Context, addr string) (presence.Report, error) {
	body, err := c.ask(ctx, addr, reportPath, []byte("{}"), http.StatusOK)
	if err != nil {
		return presence.Report{}, fmt.Errorf("cluster: report of %s: %w", addr, err)
	}
	r, err := parseReport(body)
	if err != nil {
		return presence.Report{}, fmt.Errorf("cluster: report of %s: %w", addr, err)
	}
	return r, nil
}

func parseReport(body []byte) (presence.Report, error) {
	var wire wireReport
	if err := json.Unmarshal(body, &wire); err != nil {
		return presence.Report{}, err
	}
	if len(wire.Top) > presence.TopPages {
		return presence.Report{}, errors.New("it has too many pages")
	}
	r := presence.Report{Load: wire.Load, Top: make([]presence.PageUsers, len(wire.Top))}
	for i, p := range wire.Top {
		if err := presence.CheckPage(p.Page); err != nil {
			return presence.Report{}, err
		}
		r.Top[i] = presence.PageUsers(p)
	}
	return r, nil
}
