package gateway

import (
	"context"
	"errors"
	"html"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const readPatience = 3 * time.Second // how long a request waits for the store's answer

// page returns the Name of the page that the path names, if check accepts the page. If page
// returns false, it has written the error answer.
func page(c *gin.Context, check func(string) error) (string, bool) {
	name, err := url.PathUnescape(c.Param("page"))
	if err == nil {
		err = check(name)
	}
	if err != nil {
		badRequest(c, err.Error())
		return "", false
	}
	return siteOf(c).Qualify(name), true
}

// counts reads the counts of pages, in the order of pages. If it returns false, it
// has written the error answer.
func (g *Gateway) counts(c *gin.Context, pages ...string) ([]presence.Count, bool) {
	if err := g.serving(); err != nil {
		unavailable(c, err)
		return nil, false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readPatience)
	defer cancel()
	updates, ok := g.hub.Newest(ctx, presence.CountTopics(pages))
	if !ok {
		unavailable(c, presence.ErrUnavailable)
		return nil, false
	}
	counts := make([]presence.Count, len(pages))
	for i, u := range updates {
		counts[i], _ = presence.CountOf(u)
	}
	return counts, true
}

func (g *Gateway) getCounter(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	name, ok := page(c, presence.CheckReadable)
	if !ok || !g.public(c) || !g.admitPages(c, name) {
		return
	}
	counts, ok := g.counts(c, name)
	if !ok {
		return
	}
	if c.Query("regions") == "1" && !httppolicy.WantsHTML(c.Request) {
		write(c, "application/json", g.appendParts(c.Request.Context(), counts[0]))
		return
	}
	writeCounter(c, counts[0])
}

// appendParts returns the counter as JSON with each region's share. The shares are
// left out if the store cannot be read or the count is stale.
func (g *Gateway) appendParts(ctx context.Context, count presence.Count) []byte {
	parts := []presence.Part{{Region: g.cfg.Region, Users: count.Users}}
	if g.cfg.Regions != nil {
		parts = nil
		ctx, cancel := context.WithTimeout(ctx, readPatience)
		defer cancel()
		if whole, all, err := g.cfg.Regions.Parts(ctx, count.Page); err == nil && !whole.Stale {
			count, parts = whole, all // one read returned both, so the parts add up to the total
		}
	}
	body := append([]byte(nil), '{')
	body = count.AppendMembers(body)
	for i, p := range parts {
		if i == 0 {
			body = append(body, `,"regions":{`...)
		} else {
			body = append(body, ',')
		}
		body = appendQuoted(body, p.Region)
		body = append(body, ':')
		body = strconv.AppendInt(body, p.Users, 10)
	}
	if len(parts) > 0 {
		body = append(body, '}')
	}
	return append(body, "}\n"...)
}

// writeCounter answers with a counter, as JSON or, for people, as a page.
func writeCounter(c *gin.Context, count presence.Count) {
	if httppolicy.WantsHTML(c.Request) {
		write(c, "text/html; charset=utf-8", counterPage(count))
		return
	}
	write(c, "application/json", append(count.AppendJSON(nil), '\n'))
}

func counterPage(count presence.Count) []byte {
	key := presence.KeyOf(count.Page)
	where, known, change := key, "", "Nobody has been here yet."
	if key == presence.AllPages {
		where = "the whole site"
	}
	if count.Stale {
		known = " (last known)"
	}
	if count.Without != "" {
		known += " (without " + count.Without + ", not heard for long)"
	}
	if !count.Updated.IsZero() {
		change = "Last change <time>{at}</time>"
	}
	return markup(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="../-/icon.svg" type="image/svg+xml">
<title>{users} · {page}</title>
<h1>{users}</h1>
<p>viewing <strong>{where}</strong> now{known}</p>
<p>`+change+`</p>
</html>
`, "users", strconv.FormatInt(count.Users, 10), "page", key, "where", where, "known", known, "at", count.Updated.UTC().Format("2006-01-02T15:04:05Z"))
}

// markup is a text of ours with each {name} replaced by its value. Values are escaped, for texts and
// for attributes in quotes. html/template would know each place by itself, but it calls methods by
// names that only a run tells: with it in the program the linker keeps every method of every type,
// which is a quarter of the program's size.
func markup(text string, namesAndValues ...string) []byte {
	for i := range namesAndValues {
		if i%2 == 0 {
			namesAndValues[i] = "{" + namesAndValues[i] + "}"
		} else {
			namesAndValues[i] = html.EscapeString(namesAndValues[i])
		}
	}
	return []byte(strings.NewReplacer(namesAndValues...).Replace(text))
}

func (g *Gateway) getCounters(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		badRequest(c, "The query cannot be read: "+err.Error()+". Ask as ?page=a&page=b, percent-encoded.")
		return
	}
	site := siteOf(c)
	var pages []string
	for _, name := range query["page"] {
		if slices.Contains(pages, site.Qualify(name)) {
			continue
		}
		if err := presence.CheckReadable(name); err != nil {
			badRequest(c, err.Error())
			return
		}
		if pages = append(pages, site.Qualify(name)); len(pages) > presence.MaxPages {
			break
		}
	}
	if len(pages) == 0 || len(pages) > presence.MaxPages {
		badRequest(c, "Ask for 1 to 100 distinct pages, as ?page=a&page=b.")
		return
	}
	if !g.public(c) || !g.admitPages(c, pages...) {
		return
	}
	counts, ok := g.counts(c, pages...)
	if !ok {
		return
	}
	body := []byte(`{"counters":[`)
	for i, count := range counts {
		if i > 0 {
			body = append(body, ',')
		}
		body = count.AppendJSON(body)
	}
	write(c, "application/json", append(body, "]}\n"...))
}

func (g *Gateway) putCounter(c *gin.Context) {
	name, ok := page(c, presence.CheckPage)
	if !ok {
		return
	}
	id, err := g.identify(c, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	action, ok := readAction(c, "increment", "decrement")
	if !ok {
		return
	}
	on := action == "increment"
	if !g.admit(c, id) || on && !g.admitPages(c, name) {
		return
	}
	if count, ok := g.hold(c, id.Hash, name, on); ok {
		g.issue(c, id)
		write(c, "application/json", append(count.AppendJSON(nil), '\n'))
	}
}

// putPresence takes (on) or ends a hold of the user that a server names in the path.
func (g *Gateway) putPresence(c *gin.Context, on bool) {
	user, ok := g.userInPath(c)
	if !ok {
		return
	}
	name, ok := page(c, presence.CheckPage)
	if !ok {
		return
	}
	if _, ok := readMembers(c, "{}"); !ok {
		return
	}
	if count, ok := g.hold(c, g.cfg.Identities.Hash(siteOf(c).Qualify(user)), name, on); ok {
		write(c, "application/json", append(count.AppendJSON(nil), '\n'))
	}
}

// hold takes (on) or ends a user's hold on a page, and returns the page's count with
// the change in it. If ok is false, it has written the error answer.
func (g *Gateway) hold(c *gin.Context, user presence.User, name string, on bool) (count presence.Count, ok bool) {
	if err := g.ready(); err != nil {
		unavailable(c, err)
		return count, false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), presence.HoldTimeout)
	defer cancel()
	if err := g.cfg.Cluster.Hold(ctx, user, name, on); err != nil {
		if errors.Is(err, presence.ErrTooMany) {
			httppolicy.Problem(c.Writer, http.StatusTooManyRequests, err.Error(), httppolicy.RetryAfter(comeBack))
			return count, false
		}
		unavailable(c, presence.ErrUnavailable)
		return count, false
	}
	counts, ok := g.counts(c, name)
	if !ok {
		return count, false
	}
	if counts[0].Stale && !g.comebacks.doubtful() { // a stale count may lack the change
		unavailable(c, presence.ErrUnavailable)
		return count, false
	}
	return counts[0], true
}
