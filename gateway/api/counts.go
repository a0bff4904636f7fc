package api

import (
	"context"
	"errors"
	"html"
	"net/url"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Page returns the name (see presence.Site.Qualify) of the page in the path, if check accepts the page and
// the sender may use it. query says whether the URL's parameters count.
func (w *Callers) Page(c *gin.Context, check func(string) error, query bool) (name string, err error) {
	name, err = pageInPath(c, "page", check)
	if err != nil {
		return "", err
	}

	return name, w.admitPrivate(c, query, name)
}

// pageInPath returns the name of the page that is a parameter of the path, if check accepts the page.
func pageInPath(c *gin.Context, parameter string, check func(string) error) (name string, err error) {
	name, err = url.PathUnescape(c.Param(parameter))
	if err == nil {
		err = check(name)
	}
	if err != nil {
		return "", calls.Bad(err.Error())
	}

	return siteOf(c).Qualify(name), nil
}

// counts returns the counts of pages, in the order of pages, as this process knows them.
func (a *API) counts(c *gin.Context, pages ...string) ([]presence.Count, error) {
	return a.countsWith(c, a.parts.Counts.Newest, pages)
}

// newest reads the newest update of each topic.
type newest func(context.Context, []presence.Topic) (updates []presence.Update, ok bool)

// countsWith is counts with another way to read them.
func (a *API) countsWith(c *gin.Context, read newest, pages []string) ([]presence.Count, error) {
	if err := a.Serving(); err != nil {
		return nil, Unavailable(err)
	}
	updates, ok := read(c.Request.Context(), presence.CountTopics(pages))
	if !ok {
		return nil, Unavailable(presence.ErrUnavailable)
	}

	counts := make([]presence.Count, len(pages))
	for i, u := range updates {
		counts[i], _ = presence.CountOf(u)
	}

	return counts, nil
}

// count returns the count of a page as this process knows it. The checks of the caller come first: a page that has to
// be read from the store uses up the caller's limit, which refused requests must not.
func (a *API) count(c *gin.Context, page string) (presence.Count, error) {
	// The common case, which costs no lists: somebody watches the page.
	u, known := a.parts.Counts.Known(presence.CountTopic(page))
	if known && a.Serving() == nil {
		count, _ := presence.CountOf(u)
		return count, nil
	}

	if err := a.admitPages(c, page); err != nil {
		return presence.Count{}, err
	}
	counts, err := a.counts(c, page)
	if err != nil {
		return presence.Count{}, err
	}

	return counts[0], nil
}

func (a *API) getCounter(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	name, err := a.callers.Page(c, presence.CheckReadable, false)
	if err != nil {
		return calls.Answer{}, err
	}
	if err := a.callers.Public(c); err != nil {
		return calls.Answer{}, err
	}
	if asks(c, "explain") {
		if err := a.admitPages(c, name); err != nil {
			return calls.Answer{}, err
		}
		return a.explainCounter(c, name)
	}

	count, err := a.count(c, name)
	if err != nil {
		return calls.Answer{}, err
	}
	// Only now, so that no proxy keeps a refusal.
	a.callers.Cacheable(c, name)

	// Only the plain JSON of a count has an ETag. The version identifies it, but the shares of regions can change
	// without a new version.
	switch {
	case httppolicy.WantsHTML(c.Request):
		return calls.Packed(htmlType, counterPage(count)), nil
	case asks(c, "regions"):
		return calls.PackedJSON(a.countWithParts(c.Request.Context(), count)), nil
	case httppolicy.NotModified(c, etag(count)):
		return calls.Unchanged, nil
	}

	return answerCount(count), nil
}

// asks reports whether the URL has a parameter with the value 1.
func asks(c *gin.Context, parameter string) bool {
	// The first condition spares a URL without parameters the map that Query makes.
	return c.Request.URL.RawQuery != "" && c.Query(parameter) == "1"
}

func answerCount(count presence.Count) calls.Answer {
	buffer := calls.Buffer()
	*buffer = count.AppendJSON(*buffer)

	answer := calls.BufferedJSON(buffer)
	answer.Packed = true

	return answer
}

const htmlType = "text/html; charset=utf-8"

// etag returns the ETag of a count's JSON.
func etag(count presence.Count) string {
	end := `"`
	if count.Stale || count.Without != "" {
		end = `-s"`
	}

	return `"` + count.Version.String() + end
}

// countWithParts returns the counter as JSON with each region's share. The shares are
// left out if the store cannot be read or the count is stale.
func (a *API) countWithParts(ctx context.Context, count presence.Count) []byte {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()

	whole, parts, err := a.cfg.Regions.Parts(ctx, count.Page)
	if err == nil && !whole.Stale {
		count = whole // both come from one read, so the parts add up to the total
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

	return append(body, '}')
}

// counterPage returns a count as an HTML page for people.
func counterPage(count presence.Count) []byte {
	key := presence.KeyOf(count.Page)
	where := key
	// The key of a total would tell people nothing.
	if key == presence.AllPages {
		where = "the whole site"
	}

	known := ""
	if count.Stale {
		known = " (last known)"
	}
	if count.Without != "" {
		known += " (without " + count.Without + ", not heard for long)"
	}

	change := "Nobody has been here yet."
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
`, "users", strconv.FormatInt(count.Users, 10), "page", key, "where", where, "known", known,
		"at", count.Updated.UTC().Format("2006-01-02T15:04:05Z"))
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

func (a *API) getCounters(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	pages, err := a.pagesAsked(c)
	if err != nil {
		return calls.Answer{}, err
	}

	counts, err := a.counts(c, pages...)
	if err != nil {
		return calls.Answer{}, err
	}
	// Only now, because a refusal must not be kept by a cache.
	a.callers.Cacheable(c, pages...)

	body := []byte(`{"counters":[`)
	for i, count := range counts {
		if i > 0 {
			body = append(body, ',')
		}
		body = count.AppendJSON(body)
	}

	return calls.PackedJSON(append(body, "]}"...)), nil
}

// pagesAsked returns the names of the pages that a request names, if the sender may read all of them.
func (a *API) pagesAsked(c *gin.Context) ([]string, error) {
	pages, err := counterapi.Several(c, "page", "pages", presence.CheckReadable)
	if err != nil {
		return nil, err
	}
	for i, page := range pages {
		pages[i] = siteOf(c).Qualify(page)
	}

	if err := a.callers.Public(c); err != nil {
		return nil, err
	}
	if err := a.callers.admitPrivate(c, false, pages...); err != nil {
		return nil, err
	}

	// Last, because what is refused for another reason must not use up the caller's new pages.
	return pages, a.admitPages(c, pages...)
}

func (a *API) putCounter(c *gin.Context) (calls.Answer, error) {
	name, err := a.callers.Page(c, presence.CheckPage, false)
	if err != nil {
		return calls.Answer{}, err
	}
	id, err := a.callers.Identify(c)
	if err != nil {
		return calls.Answer{}, err
	}
	action, _, err := readAction(c, nil, "increment", "decrement")
	if err != nil {
		return calls.Answer{}, err
	}
	begins := action == "increment"

	if err := a.admitIdentity(c, id); err != nil {
		return calls.Answer{}, err
	}

	// A request that ends a hold does not count as naming a new page.
	if begins {
		if err := a.admitPages(c, name); err != nil {
			return calls.Answer{}, err
		}
	}

	// A crawler gets the same answer, but holds nothing.
	if a.callers.Crawler(c.Request) {
		counts, err := a.counts(c, name)
		if err != nil {
			return calls.Answer{}, err
		}
		return answerCount(counts[0]), nil
	}

	count, err := a.hold(c, id.User, name, begins)
	if err != nil {
		return calls.Answer{}, err
	}
	// Only a hold that was taken makes a new identity worth keeping.
	a.callers.Issue(c, id)

	return answerCount(count), nil
}

// putPresence begins a hold of the user that a server names in the path.
func (a *API) putPresence(c *gin.Context) (calls.Answer, error) { return a.holdUser(c, true) }

// deletePresence ends a hold of the user that a server names in the path.
func (a *API) deletePresence(c *gin.Context) (calls.Answer, error) { return a.holdUser(c, false) }

// holdUser begins (on) or ends a hold of the user that a server names in the path.
func (a *API) holdUser(c *gin.Context, on bool) (calls.Answer, error) {
	user, err := a.callers.userInPath(c)
	if err != nil {
		return calls.Answer{}, err
	}
	name, err := a.callers.Page(c, presence.CheckPage, false)
	if err != nil {
		return calls.Answer{}, err
	}
	if _, err := readMembers(c, "{}"); err != nil {
		return calls.Answer{}, err
	}

	count, err := a.hold(c, user, name, on)
	if err != nil {
		return calls.Answer{}, err
	}

	return answerCount(count), nil
}

// hold begins (on) or ends a user's hold on a page, and returns the page's count, which includes
// the change.
func (a *API) hold(c *gin.Context, user, name string, on bool) (count presence.Count, err error) {
	// A hold needs the presence nodes now, so to have been ready once is not enough.
	if err := a.Ready(); err != nil {
		return count, Unavailable(err)
	}

	ctx, cancel := context.WithTimeout(c.Request.Context(), presence.HoldTimeout)
	defer cancel()
	user = siteOf(c).Qualify(user)
	hash := a.callers.Identities.Hash(user)
	err = a.parts.Cluster.Hold(ctx, hash, name, on)
	switch {
	case errors.Is(err, presence.ErrTooMany):
		return count, calls.Refuse(calls.ErrRate, err.Error(), httppolicy.RetryAfter(calls.ComeBack))
	case err != nil:
		return count, storeAway(err)
	}
	// Only now it is certain that the store has the user.
	if on {
		a.cfg.Arrivals.Arrived(hash, user)
	}

	// Read, not Newest: the answer must include this hold.
	counts, err := a.countsWith(c, a.parts.Counts.Read, []string{name})
	if err != nil {
		return count, err
	}
	// A stale count may lack the change.
	if counts[0].Stale && !a.callers.Restart.Doubtful() {
		return count, Unavailable(presence.ErrUnavailable)
	}

	return counts[0], nil
}
