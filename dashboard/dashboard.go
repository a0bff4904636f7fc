// Package dashboard gathers what an operator wants to see at a glance: the
// pages most people are on, the processes and their load, the other regions.
package dashboard

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"headcount/presence"
)

const (
	// fresh is how long what was gathered is shown again, so that however many
	// people look, every process is asked at most once in it by this one.
	fresh    = 800 * time.Millisecond
	patience = 1500 * time.Millisecond // for all answers together; who has none by then is shown without
	atOnce   = 16                      // processes asked at the same time
)

// Config says where a Board finds things. All functions are called by one
// goroutine at a time, but for Ask.
type Config struct {
	Self    string                                                              // this process's name
	Members func() []presence.Process                                           // who is there, Self among them
	Report  func() presence.Report                                              // of this process
	Ask     func(ctx context.Context, name string) (presence.Report, error)     // of another one; nil: there is none
	Counts  func(ctx context.Context, pages []string) ([]presence.Count, error) // of the store
	Region  string
	Log     zerolog.Logger
}

// Board gathers. Any goroutine may use it.
type Board struct {
	cfg Config

	turn chan struct{} // holds one: whose turn it is may use all below; gathering takes patience at most
	body []byte
	at   time.Time
}

// New returns a Board that asks nobody before it is looked at.
func New(cfg Config) *Board { return &Board{cfg: cfg, turn: make(chan struct{}, 1)} }

// JSON returns what there is to see, no older than a second:
//
//	{"at":unix ms,"region":"local","site":{counter} or null,"pages":[{"page":"p","count":3}],
//	 "processes":[{"name":"…","roles":["gateway"],"since":unix ms,"load":{"headcount_connections":12} or null}],
//	 "regions":[{"name":"eu","lag":0.2,"heard":0.9,"left_out":false}]}
//
// Load is null of a process that did not answer; pages are the TopPages that
// most users are on. The error is ctx's, which may end the wait for others who
// look.
func (b *Board) JSON(ctx context.Context) ([]byte, error) {
	select {
	case b.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-b.turn }()
	if b.body == nil || time.Since(b.at) >= fresh {
		b.body = b.gather(context.WithoutCancel(ctx))
		b.at = time.Now()
	}
	return b.body, nil
}

type (
	answer struct {
		At        int64           `json:"at"` // rates are between two of these
		Region    string          `json:"region"`
		Site      *presence.Count `json:"site"`
		Pages     []page          `json:"pages"`
		Processes []process       `json:"processes"`
		Regions   []region        `json:"regions"`
	}
	page struct {
		Page  string `json:"page"`
		Count int64  `json:"count"`
	}
	process struct {
		Name  string             `json:"name"`
		Roles []string           `json:"roles"`
		Since int64              `json:"since"`
		Load  map[string]float64 `json:"load"`
	}
	region struct {
		Name    string  `json:"name"`
		Lag     float64 `json:"lag"`   // seconds that the oldest change has waited which it has not got
		Heard   float64 `json:"heard"` // seconds since it was
		LeftOut bool    `json:"left_out"`
	}
)

func (b *Board) gather(ctx context.Context) []byte {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	members := b.cfg.Members()
	reports := make([]presence.Report, len(members))
	var all errgroup.Group
	all.SetLimit(atOnce)
	for i, m := range members {
		if m.Name == b.cfg.Self {
			reports[i] = b.cfg.Report()
			continue
		}
		all.Go(func() error {
			var err error
			if reports[i], err = b.cfg.Ask(ctx, m.Name); err != nil {
				b.cfg.Log.Debug().Err(err).Msg("a process did not say how it is")
			}
			return nil
		})
	}
	_ = all.Wait() // nobody returns one

	out := answer{At: time.Now().UnixMilli(), Region: b.cfg.Region, Pages: topPages(reports), Processes: []process{}, Regions: regions(reports)}
	for i, m := range members {
		out.Processes = append(out.Processes, process{m.Name, slices.Clone(m.Roles), int64(m.Incarnation), reports[i].Load})
	}
	if counts, err := b.cfg.Counts(ctx, []string{presence.Site}); err == nil {
		out.Site = &counts[0]
	}
	body, err := json.Marshal(out)
	if err != nil {
		panic(err) // what a report may hold JSON has
	}
	return append(body, '\n')
}

// topPages joins what dispatchers know of their buckets. Two know a page while
// its bucket changes hands; the larger count is as good as the other.
func topPages(reports []presence.Report) []page {
	users := map[string]int64{}
	for _, r := range reports {
		for _, p := range r.Top {
			users[p.Page] = max(users[p.Page], p.Users)
		}
	}
	top := make([]presence.PageUsers, 0, len(users))
	for name, n := range users {
		top = append(top, presence.PageUsers{Page: name, Users: n})
	}
	slices.SortFunc(top, presence.PageUsers.Compare)
	pages := []page{}
	for _, p := range top[:min(len(top), presence.TopPages)] {
		pages = append(pages, page{p.Page, p.Users})
	}
	return pages
}

// Metrics about other regions, as Report.Load has them: name{peer}.
const (
	lagMetric   = "headcount_region_lag_seconds"
	heardMetric = "headcount_region_heard_seconds"
	outMetric   = "headcount_region_left_out"
)

// regions joins what processes say of the other regions: of several the worst.
func regions(reports []presence.Report) []region {
	peers := map[string]*region{}
	for _, r := range reports {
		for name, value := range r.Load {
			metric, peer, ok := strings.Cut(strings.TrimSuffix(name, "}"), "{")
			if !ok || metric != lagMetric && metric != heardMetric && metric != outMetric {
				continue
			}
			of := peers[peer]
			if of == nil {
				of = &region{Name: peer}
				peers[peer] = of
			}
			switch metric {
			case lagMetric:
				of.Lag = max(of.Lag, value)
			case heardMetric:
				of.Heard = max(of.Heard, value)
			case outMetric:
				of.LeftOut = of.LeftOut || value > 0
			}
		}
	}
	all := []region{}
	for _, name := range slices.Sorted(maps.Keys(peers)) {
		all = append(all, *peers[name])
	}
	return all
}
