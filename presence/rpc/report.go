package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"headcount/presence"
)

// maxAnswer bounds the body of an answer. The largest report, with 2*TopPages pages of
// MaxSites sites, is below it.
const maxAnswer = 20 << 20

// wireReport is a presence.Report as JSON. The part about a role that the process does not
// have is left out:
//
//	{"process":{"memory":1048576,"cpu":1.5},"gateway":{"connections":12,"watched":3,"deliveries":40,"messages":9},
//	 "node":{"users":12,"partitions":271,"changes":30},"peers":[{"name":"eu","lag":0.2,"heard":0.9,"left_out":false}],
//	 "top":[{"page":"p","users":3}]}
//
// Times are seconds.
type wireReport struct {
	Process wireProcess  `json:"process"`
	Gateway *wireGateway `json:"gateway,omitempty"`
	Node    *wireNode    `json:"node,omitempty"`
	Peers   []wirePeer   `json:"peers,omitempty"`
	Top     []wirePage   `json:"top"`
}

type wireProcess struct {
	Memory int64   `json:"memory"`
	CPU    float64 `json:"cpu"`
}

type wireGateway struct {
	Connections int64 `json:"connections"`
	Watched     int64 `json:"watched"`
	Deliveries  int64 `json:"deliveries"`
	Messages    int64 `json:"messages"`
}

type wireNode struct {
	Users      int64 `json:"users"`
	Partitions int64 `json:"partitions"`
	Changes    int64 `json:"changes"`
}

type wirePeer struct {
	Name    string  `json:"name"`
	Lag     float64 `json:"lag"`
	Heard   float64 `json:"heard"`
	LeftOut bool    `json:"left_out"`
}

type wirePage struct {
	Page  string `json:"page"`
	Users int64  `json:"users"`
}

// duration converts the seconds of a report.
func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

func reportBody(r presence.Report) []byte {
	wire := wireReport{
		Process: wireProcess{r.Process.Memory, r.Process.CPU.Seconds()},
		Gateway: (*wireGateway)(r.Gateway), Node: (*wireNode)(r.Node),
		Peers: make([]wirePeer, len(r.Peers)), Top: make([]wirePage, len(r.Top)),
	}
	for i, p := range r.Peers {
		wire.Peers[i] = wirePeer{p.Name, p.Lag.Seconds(), p.Silence.Seconds(), p.LeftOut}
	}
	for i, p := range r.Top {
		wire.Top[i] = wirePage(p)
	}
	body, err := json.Marshal(wire)
	if err != nil {
		panic(err) // cannot happen: all fields are plain
	}
	return body
}

func writeAnswer(w http.ResponseWriter, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
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

func parseReport(body []byte) (presence.Report, error) {
	var wire wireReport
	if err := json.Unmarshal(body, &wire); err != nil {
		return presence.Report{}, err
	}
	if len(wire.Peers) > presence.MaxPeers {
		return presence.Report{}, errors.New("too many peers")
	}
	r := presence.Report{Top: make([]presence.PageUsers, len(wire.Top))}
	r.Process = presence.ProcessStats{Memory: wire.Process.Memory, CPU: duration(wire.Process.CPU)}
	r.Gateway, r.Node = (*presence.GatewayStats)(wire.Gateway), (*presence.NodeStats)(wire.Node)
	for _, p := range wire.Peers {
		r.Peers = append(r.Peers, presence.PeerStats{Name: p.Name, Lag: duration(p.Lag), Silence: duration(p.Heard), LeftOut: p.LeftOut})
	}
	pages := map[presence.Site]int{}
	for i, p := range wire.Top {
		if err := presence.CheckName(p.Page); err != nil {
			return presence.Report{}, err
		}
		site, _ := presence.SplitName(p.Page)
		if pages[site]++; pages[site] > 2*presence.TopPages || len(pages) > presence.MaxSites {
			return presence.Report{}, errors.New("too many pages")
		}
		r.Top[i] = presence.PageUsers(p)
	}
	return r, nil
}
