package gateway

import (
	"context"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/conn"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// topPagesKind is the kind of the topics of the pages with the most users. A topic's key is the length of the
// list, with publicList behind it if visitors may see the list. Its values are JSON.
var topPagesKind = presence.KindOf("toppages")

const (
	publicList    = " public"
	shortTopPages = 10 // the length of a list unless the request says another one
)

// getTopPageEvents answers with the event stream of the pages with the most users.
func (g *Gateway) getTopPageEvents(c *gin.Context) (calls.Answer, error) {
	all, err := g.callers.TopPages(c)
	if err != nil {
		return calls.Answer{}, err
	}

	query := counterapi.ReadQuery(c, "?n=10")
	n := query.Number("n", shortTopPages, 1, presence.TopPages)
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	key := strconv.FormatUint(n, 10)
	if !all {
		// What visitors may see is another list, so it is another topic.
		key += publicList
	}
	topic := presence.Topic{Site: g.callers.Site(c), Kind: topPagesKind, Key: key}

	// web/live-top.js reopens a stream that has been silent for a minute.
	return g.serveEvents(c, conn.Events{Topics: []presence.Topic{topic}, Often: true})
}

// topPages has the lists of the pages with the most users, which the dashboard's data contains. It implements
// fanout.Polled.
type topPages struct{ g *Gateway }

// Values implements fanout.Polled. There are at most 2*presence.TopPages topics of a site.
func (s topPages) Values(ctx context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	// One list of each site is read, and cut to the length of each topic.
	sites := map[presence.Site]presence.TopList{}
	for _, t := range topics {
		top, known := sites[t.Site]
		if !known {
			var err error
			top, err = s.g.cfg.API.Dashboard.Top(ctx, t.Site)
			if err != nil { // ctx has ended
				return
			}

			sites[t.Site] = top
		}

		length, public := strings.CutSuffix(t.Key, publicList)
		n, _ := strconv.Atoi(length) // getTopPageEvents wrote it

		list := []presence.PageUsers{} // in JSON [], not null
		for _, p := range top.Pages {
			if len(list) < n && (!public || s.g.callers.PublicTop.Has(p.Page)) {
				list = append(list, p)
			}
		}

		found(t, string(httppolicy.JSON(map[string]any{"top": list})), top.Stale || s.g.hub.Doubtful())
	}
}
