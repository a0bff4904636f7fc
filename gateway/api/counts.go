package api

import (
	"context"
	"errors"
	"html"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Page returns the name (see presence.Site.Qualify) of the page in the path, if check accepts the page and
// the sender may use it. query says whether the URL's parameters count. If ok is false, it has written the error answer.
func (w *Callers) Page(c *gin.Context, check func(string) error, query bool) (name string, ok bool) {
	if name, ok = pageInPath(c, check); ok {
		ok = w.admitPrivate(c, query, name)
	}
	return name, ok
}

// pageInPath returns the name of the page in the path, if check accepts the page. If ok is false, it has written the error
// answer.
func pageInPath(c *gin.Context, check func(string) error) (name string, ok bool) {
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

// counts returns the counts of pages, in the order of pages, as this process knows them. If it
// returns false, it has written the error answer.
func (a *API) counts(c *gin.Context, pages ...string) ([]presence.Count, bool) {
	return a.countsWith(c, a.parts.Counts.Newest, pages)
}

// countsWith is counts with another way to read them.
func (a *API) countsWith(c *gin.Context, read func(context.Context, []presence.Topic) ([]presence.Update, bool), pages []string) ([]presence.Count, bool) {
	if err := a.Serving(); err != nil {
		Unavailable(c, err)
		return nil, false
	}
	updates, ok := read(c.Request.Context(), presence.CountTopics(pages))
	if !ok {
		Unavailable(c, presence.ErrUnavailable)
		return nil, false
	}
	counts := make([]presence.Count, len(pages))
	for i, u := range updates {
		counts[i], _ = presence.CountOf(u)
	}
	return counts, true
}

func (a *API) getCounter(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	name, ok := a.callers.Page(c, presence.CheckReadable, false)
	if !ok || !a.callers.Public(c) || !a.admitPages(c, name) {
		return
	}
	counts, ok := a.counts(c, name)
	if !ok {
		return
	}
	a.callers.Cacheable(c, name)
	switch {
	case httppolicy.WantsHTML(c.Request):
		write(c, "text/html; charset=utf-8", counterPage(counts[0]))
	case c.Query("regions") == "1":
		write(c, "application/json", a.countWithParts(c.Request.Context(), counts[0]))
	case httppolicy.NotModified(c, etag(counts[0])):
	default:
		write(c, "application/json", append(counts[0].AppendJSON(nil), '\n'))
	}
}

// etag names the JSON of a count.
func etag(count presence.Count) string {
	if count.Stale || count.Without != "" {
		return `"` + count.Version.String() + `-s"`
	}
	return `"` + count.Version.String() + `"`
}

// countWithParts returns the counter as JSON with each region's share. The shares are
// left out if the store cannot be read or the count is stale.
func (a *API) countWithParts(ctx context.Context, count presence.Count) []byte {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	whole, parts, err := a.cfg.Regions.Parts(ctx, count.Page)
	if err == nil && !whole.Stale {
		count = whole // one read returned both, so the parts add up to the total
	} else {
		parts = nil
	}
	body := append([]byte(nil), '{')
	body = count.AppendMembers(body)
	for i, p := range parts {
		if i == 0 {
			body = append(body, `,"regions":{`...)
		} else {
			body = append(body, ',')
		}
		body = presence.AppendString(body, p.Region)
		body = append(body, ':')
		body = strconv.AppendInt(body, p.Users, 10)
	}
	if len(parts) > 0 {
		body = append(body, '}')
	}
	return append(body, "}\n"...)
}

// counterPage returns a count as a page for people.
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
<main>
<h1>{users}</h1>
<p>viewing <strong>{where}</strong> now{known}</p>
<p>`+change+`</p>
</main>
</html>
`, "users", strconv.FormatInt(count.Users, 10), "page", key, "where", where, "known", known, "at", count.Updated.UTC().Format("2006-01-02T15:04:05Z"))
}

// markup returns a text of ours with each {name} replaced by its value. Values are escaped for texts and
// for attributes in quotes. html/template would find the right escaping for each place, but it calls
// methods by names that are known only at run time: with it in the program the linker keeps every method
// of every type, which is a quarter of the program's size.
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

func (a *API) getCounters(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	pages, ok := counterapi.Several(c, "page", "pages", presence.CheckReadable)
	if !ok {
		return
	}
	for i, page := range pages {
		pages[i] = siteOf(c).Qualify(page)
	}
	if !a.callers.Public(c) || !a.callers.admitPrivate(c, false, pages...) || !a.admitPages(c, pages...) {
		return
	}
	counts, ok := a.counts(c, pages...)
	if !ok {
		return
	}
	a.callers.Cacheable(c, pages...)
	body := []byte(`{"counters":[`)
	for i, count := range counts {
		if i > 0 {
			body = append(body, ',')
		}
		body = count.AppendJSON(body)
	}
	write(c, "application/json", append(body, "]}\n"...))
}

func (a *API) putCounter(c *gin.Context) {
	name, ok := a.callers.Page(c, presence.CheckPage, false)
	if !ok {
		return
	}
	id, ok := a.callers.Identify(c)
	if !ok {
		return
	}
	action, _, ok := readAction(c, nil, "increment", "decrement")
	if !ok {
		return
	}
	on := action == "increment"
	if !a.admitIdentity(c, id) || on && !a.admitPages(c, name) {
		return
	}
	if a.callers.Crawler(c.Request) {
		if counts, ok := a.counts(c, name); ok {
			write(c, "application/json", append(counts[0].AppendJSON(nil), '\n'))
		}
		return
	}
	if count, ok := a.hold(c, id.User, name, on); ok {
		a.callers.Issue(c, id)
		write(c, "application/json", append(count.AppendJSON(nil), '\n'))
	}
}

// putPresence begins (on) or ends a hold of the user that a server names in the path.
func (a *API) putPresence(c *gin.Context, on bool) {
	user, ok := a.callers.userInPath(c)
	if !ok {
		return
	}
	name, ok := a.callers.Page(c, presence.CheckPage, false)
	if !ok {
		return
	}
	if _, ok := readMembers(c, "{}"); !ok {
		return
	}
	if count, ok := a.hold(c, user, name, on); ok {
		write(c, "application/json", append(count.AppendJSON(nil), '\n'))
	}
}

// hold begins (on) or ends a user's hold on a page, and returns the page's count, which includes
// the change. If ok is false, it has written the error answer.
func (a *API) hold(c *gin.Context, user, name string, on bool) (count presence.Count, ok bool) {
	if err := a.Ready(); err != nil {
		Unavailable(c, err)
		return count, false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), presence.HoldTimeout)
	defer cancel()
	user = siteOf(c).Qualify(user)
	hash := a.callers.Identities.Hash(user)
	if err := a.parts.Cluster.Hold(ctx, hash, name, on); err != nil {
		if errors.Is(err, presence.ErrTooMany) {
			httppolicy.Problem(c.Writer, http.StatusTooManyRequests, err.Error(), httppolicy.RetryAfter(retryAfter))
			return count, false
		}
		Unavailable(c, presence.ErrUnavailable)
		return count, false
	}
	if on {
		a.cfg.Arrivals.Arrived(hash, user)
	}
	counts, ok := a.countsWith(c, a.parts.Counts.Read, []string{name})
	if !ok {
		return count, false
	}
	if counts[0].Stale && !a.callers.Grace.Doubtful() { // a stale count may lack the change
		Unavailable(c, presence.ErrUnavailable)
		return count, false
	}
	return counts[0], true
}
