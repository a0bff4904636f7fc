// Package dashboard collects the data of the operator's dashboard: the pages with the
// most users, the processes and their load, the other regions, and recent events.
//
// A dispatcher receives every count of its buckets, so it knows the pages with the most
// users there: pages that had subscribers when it began to serve the bucket, and pages
// that changed since. A page that has only old holds may be missing until it changes.
// Every process reports its statistics, and a dispatcher also reports these pages. The
// gateway that serves the dashboard asks all processes by signed calls, 16 at a time and
// within 1.5 s in all. It caches the data for almost a second, for any number of viewers and
// of event streams of the pages with the most users. A process that does not answer is shown
// without load, and the pages that it alone knows are missing until it answers or another
// dispatcher serves its buckets. The answers of processes are not signed, because they are
// only shown to people. The dashboard page draws the last two minutes from data that it
// collects while it is open, and days from the statistics of pages. Every process records
// events of its own and of the processes and regions that it sees.
//
// Names of pages may be private. So with API keys both the dashboard page and its data
// need a key. A browser cannot send a key when it opens an address, so it gets the page
// with status 401. The page itself has no data. It asks for the key and keeps the key
// until the tab is closed. The demo page needs the same key for the button that modifies a
// page, and to show the pages with the most users unless visitors may see them.
package dashboard

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"headcount/presence"
)

const (
	// cacheTime is how long the collected data is used. In this time this process asks
	// each other process at most once, for any number of viewers.
	cacheTime = 800 * time.Millisecond
	// timeout is for the answers of all processes together; one without an answer by then is shown without load. The
	// store has as much time after that.
	timeout  = 1500 * time.Millisecond
	parallel = 16 // processes asked at the same time
)

// Members lists the processes.
type Members interface{ Members() []presence.Process }

// Reporter reports the statistics of this process.
type Reporter interface {
	Report() presence.Report
	// Peers is the part of Report with that name, which costs little.
	Peers() []presence.PeerStats
}

// Others gets the report of another process.
type Others interface {
	Report(ctx context.Context, name string) (presence.Report, error)
}

// Config names the sources of a Board. Several goroutines call them at once.
type Config struct {
	Self    string            // this process's name
	Members Members           // lists the processes, Self among them
	Report  Reporter          // reports for this process
	Others  Others            // reports for the other processes; nil: there are none
	Counts  presence.Counters // reads counts from the store
	Ready   func() error      // returns why this process cannot serve its roles now, or nil
	Region  string
	Sites   []presence.Site // of the server; nil: only the default site
	Log     zerolog.Logger
}

// Board collects the dashboard's data. Any goroutine may use it.
type Board struct {
	cfg Config

	// turn is a lock of the fields below, held for little more than twice the timeout. A caller whose context ends
	// stops waiting.
	turn    chan struct{}
	members []presence.Process
	reports []*presence.Report // of members; nil for a process that did not answer
	at      time.Time          // when members and reports were collected
	bodies  map[view][]byte    // made from members and reports; at most two for each site

	events events
}

// view is the data that a viewer may see: a site and, unless alone, the data of all sites.
type view struct {
	site  presence.Site
	alone bool
}

// New returns a Board. It asks no process before the first call of JSON.
func New(cfg Config) *Board { return &Board{cfg: cfg, turn: make(chan struct{}, 1)} }

// JSON returns the dashboard's data about a site, no older than a second:
//
//	{"at":unix ms,"region":"local","state":{"level":"good","text":"All is well: …"},
//	 "site":{counter} or null,"pages":[{"page":"p","count":3}],
//	 "processes":[{"name":"…","roles":["gateway"],"since":unix ms,"load":{"headcount_connections":12} or null}],
//	 "regions":[{"name":"eu","lag":0.2,"heard":0.9,"left_out":false}],
//	 "events":[{"at":unix ms,"text":"The store is away."}]}
//
// If a viewer may choose among several sites, the first members are
// "sites":["shop","blog"],"shown":"shop".
//
// Load is null for a process that did not answer. Pages are the TopPages pages with the most
// users. Processes and events belong to all sites, so alone leaves them out, and the text of
// the state does not mention them. The only error is ctx's, if it ends while another call
// collects data.
func (b *Board) JSON(ctx context.Context, site presence.Site, alone bool) (body []byte, err error) {
	v := view{site, alone}
	err = b.collected(ctx, func(ctx context.Context) {
		// Many viewers see the same data, so it is encoded once for each view.
		if b.bodies[v] == nil {
			b.bodies[v] = b.body(ctx, v)
		}
		body = b.bodies[v]
	})

	return body, err
}

// Top returns the pages of a site that processes report, most users first. It is no older than a second
// and lacks the pages of dispatchers that did not answer; then it is stale. The only error is that of JSON.
func (b *Board) Top(ctx context.Context, site presence.Site) (top presence.TopList, err error) {
	err = b.collected(ctx, func(context.Context) {
		top = presence.TopList{Pages: topPages(b.answers(), site), Stale: b.lacksPages()}
	})

	return top, err
}

// lacksPages reports whether a dispatcher did not answer, or cannot reach the store.
func (b *Board) lacksPages() bool {
	for i, m := range b.members {
		known := b.reports[i] != nil && !b.reports[i].Away
		if !known && slices.Contains(m.Roles, presence.RoleDispatcher) {
			return true
		}
	}

	return false
}

// collected calls use under the lock when there is data no older than cacheTime.
func (b *Board) collected(ctx context.Context, use func(ctx context.Context)) error {
	select {
	case b.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-b.turn }()

	// The data is for other callers, too, so it is collected even if this one leaves.
	ctx = context.WithoutCancel(ctx)

	// Whoever waited for the lock meanwhile finds the data of the one before, so no process is asked twice.
	if b.bodies == nil || time.Since(b.at) >= cacheTime {
		b.collect(ctx)
		b.at = time.Now()
		b.bodies = map[view][]byte{}
	}

	use(ctx)
	return nil
}

type (
	answer struct {
		Sites     []string             `json:"sites,omitempty"`
		Shown     string               `json:"shown,omitempty"`
		At        int64                `json:"at"` // unix ms; the page computes rates from two answers
		Region    string               `json:"region"`
		State     state                `json:"state"`
		Site      *presence.Count      `json:"site"`
		Pages     []page               `json:"pages"`
		Processes []process            `json:"processes"`
		Regions   []presence.PeerStats `json:"regions"`
		Events    []event              `json:"events"` // the newest first
	}
	page struct {
		Page  string `json:"page"`
		Count int64  `json:"count"`
	}
	process struct {
		Name  string   `json:"name"`
		Roles []string `json:"roles"`
		Since int64    `json:"since"`
		Load  *load    `json:"load"`
	}
)

// collect asks all processes for their reports.
func (b *Board) collect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	members := b.cfg.Members.Members()
	reports := make([]*presence.Report, len(members))

	var all errgroup.Group
	all.SetLimit(parallel)
	for i, m := range members {
		// This process may not reach itself at its advertised address, and need not.
		if m.Name == b.cfg.Self {
			own := b.cfg.Report.Report()
			reports[i] = &own
			continue
		}
		all.Go(func() error {
			report, err := b.cfg.Others.Report(ctx, m.Name)
			if err != nil {
				// One silent process must not take the others' answers along, so no error ends the group.
				b.cfg.Log.Debug().Err(err).Msg("a process did not report its statistics")
				return nil
			}

			reports[i] = &report
			return nil
		})
	}

	_ = all.Wait() // no function returns an error
	// Both are replaced together, because reports are found by the index of their process.
	b.members = members
	b.reports = reports
}

// body returns the collected data as a viewer may see it.
func (b *Board) body(ctx context.Context, v view) []byte {
	out := answer{At: b.at.UnixMilli(), Region: b.cfg.Region, Processes: []process{}}
	for i, m := range b.members {
		out.Processes = append(out.Processes, process{
			Name:  m.Name,
			Roles: slices.Clone(m.Roles),
			Since: presence.Started(m.Incarnation).UnixMilli(),
			Load:  loadOf(b.reports[i]),
		})
	}

	reports := b.answers()
	top := topPages(reports, v.site)
	out.Regions = regions(reports)
	out.Pages = []page{} // not null
	for _, p := range top[:min(len(top), presence.TopPages)] {
		out.Pages = append(out.Pages, page{p.Page, p.Users})
	}

	if len(b.cfg.Sites) > 1 && !v.alone {
		for _, site := range b.cfg.Sites {
			out.Sites = append(out.Sites, site.Name())
		}
		out.Shown = v.site.Name()
	}

	// The store has a time of its own: a process that does not answer has used up the one for the others.
	asking, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	// From the store, not from a dispatcher: what operators want to see is whether the store answers.
	counts, err := b.cfg.Counts.Counts(asking, []string{v.site.Qualify(presence.AllPages)})
	if err == nil {
		out.Site = &counts[0]
	}

	// The state is judged from all parts above, before the parts that this viewer may not see are taken out.
	out.State = b.state(&out)
	out.Events = b.events.newest()
	if v.alone {
		out.Processes = []process{}
		out.Events = []event{}
		out.State.Text = alone[out.State.Level]
	}

	body, err := json.Marshal(out)
	if err != nil {
		panic(err) // every value of a report can be encoded
	}

	return append(body, '\n')
}

// answers returns the reports of the processes that answered.
func (b *Board) answers() []*presence.Report {
	return slices.DeleteFunc(slices.Clone(b.reports), func(r *presence.Report) bool { return r == nil })
}

// topPages merges the pages of a site that dispatchers report, most users first. While a bucket changes
// its owner, two dispatchers may report the same page; topPages takes the larger count.
func topPages(reports []*presence.Report, of presence.Site) []presence.PageUsers {
	users := map[string]int64{}
	for _, r := range reports {
		for _, p := range r.Top {
			site, name := presence.SplitName(p.Page)
			if site == of {
				users[name] = max(users[name], p.Users)
			}
		}
	}

	top := make([]presence.PageUsers, 0, len(users))
	for name, n := range users {
		top = append(top, presence.PageUsers{Page: name, Users: n})
	}

	slices.SortFunc(top, presence.PageUsers.Compare)
	return top
}

// regions merges the figures that processes report about the other regions. For each
// region it takes the worst values.
func regions(reports []*presence.Report) []presence.PeerStats {
	peers := map[string]*presence.PeerStats{}
	for _, r := range reports {
		for _, p := range r.Peers {
			// The dispatchers see a peer each for buckets of their own; the slowest one decides.
			of := peers[p.Name]
			if of == nil {
				of = &presence.PeerStats{Name: p.Name}
				peers[p.Name] = of
			}

			of.Lag = max(of.Lag, p.Lag)
			of.Heard = max(of.Heard, p.Heard)
			of.LeftOut = of.LeftOut || p.LeftOut
		}
	}

	// Not null in JSON, so that the page need not ask.
	all := []presence.PeerStats{}
	for _, name := range slices.Sorted(maps.Keys(peers)) {
		all = append(all, *peers[name])
	}

	return all
}
