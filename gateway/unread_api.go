package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

const (
	listPages     = 100             // follows in one answer
	storePatience = 3 * time.Second // how long a request waits for the store
)

// unreadRoutes adds the routes of changes, follows and unread counts.
func (g *Gateway) unreadRoutes(e *gin.Engine) {
	e.POST("/:page/changes", g.postChange)
	for root, who := range map[string]whose{"/-/me": caller{g}, "/-/users/:user": named{g}} {
		httppolicy.Get(e, root+"/follows", func(c *gin.Context) { g.getFollows(c, who) })
		e.PUT(root+"/follows/:page", func(c *gin.Context) { g.putFollow(c, who) })
		e.DELETE(root+"/follows/:page", func(c *gin.Context) { g.deleteFollow(c, who) })
		httppolicy.Get(e, root+"/unread", func(c *gin.Context) { g.getUnread(c, who) })
		e.PUT(root+"/unread", func(c *gin.Context) { g.putUnread(c, who) })
		httppolicy.Get(e, root+"/notifications", func(c *gin.Context) { g.getNotifications(c, who) })
		e.DELETE(root+"/notifications/:page", func(c *gin.Context) { g.deleteNotification(c, who) })
	}
}

// carryOut calls the store for a request, with a deadline of storePatience. If it
// returns false, it has written the error answer.
func (g *Gateway) carryOut(c *gin.Context, do func(context.Context) error) bool {
	return g.carryOutIn(c, storePatience, do)
}

// carryOutIn is carryOut with another deadline.
func (g *Gateway) carryOutIn(c *gin.Context, patience time.Duration, do func(context.Context) error) bool {
	if err := g.serving(); err != nil {
		unavailable(c, err)
		return false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), patience)
	defer cancel()
	err := do(ctx)
	switch {
	case err == nil:
	case errors.Is(err, presence.ErrTooMany):
		badRequest(c, err.Error())
	default:
		g.cfg.Log.Debug().Err(err).Str("route", c.FullPath()).Msg("the store did not carry out a request")
		unavailable(c, presence.ErrUnavailable)
	}
	return err == nil
}

// postChange stores that a page was modified.
func (g *Gateway) postChange(c *gin.Context) {
	if !g.server(c) {
		return
	}
	name, ok := page(c, presence.CheckPage)
	if !ok {
		return
	}
	change, ok := g.readChange(c)
	if !ok {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.cfg.Unread.Change(ctx, name, change) }) {
		return
	}
	done(c)
}

func (g *Gateway) readChange(c *gin.Context) (change unread.Change, ok bool) {
	key, problem := httppolicy.IdempotencyKey(c.Request)
	if problem != "" {
		badRequest(c, problem)
		return change, false
	}
	change.Key = key
	members, ok := readMembers(c, `{"by":"the user who did it","title":"…","url":"…"}`, "by", "title", "url")
	if !ok {
		return change, false
	}
	if change.Title, ok = readNote(c, members, "title", func(string) bool { return true }); !ok {
		return change, false
	}
	if change.URL, ok = readNote(c, members, "url", isLink); !ok {
		return change, false
	}
	if raw, given := members["by"]; given {
		var by *string
		err := json.Unmarshal(raw, &by)
		if err != nil || by == nil {
			err = errors.New("it is no string")
		} else {
			err = identity.CheckUser(*by)
		}
		if err != nil {
			badRequest(c, `"by" is the id of a user`+because(err)+".")
			return change, false
		}
		user := g.userOf(siteOf(c), *by)
		change.By = &user
	}
	return change, true
}

const (
	maxNote       = 300 // characters of a title or an URL
	notifications = 50  // pages in the list
)

// readNote reads a title or an URL, empty if there is none. If ok is false, it has
// written the error answer.
func readNote(c *gin.Context, members map[string]json.RawMessage, name string, can func(string) bool) (text string, ok bool) {
	raw, given := members[name]
	if !given {
		return "", true
	}
	var value *string
	if err := json.Unmarshal(raw, &value); err != nil || value == nil || *value == "" || utf8.RuneCountInString(*value) > maxNote ||
		strings.ContainsFunc(*value, func(r rune) bool { return unicode.IsControl(r) || r == utf8.RuneError }) || !can(*value) {
		badRequest(c, fmt.Sprintf("%q is 1 to %d characters without control characters; a url begins with http://, https:// or a single slash.", name, maxNote))
		return "", false
	}
	return *value, true
}

// isLink reports whether a page may show text as a link: it leads to the web or stays on
// the site, and runs no script.
func isLink(text string) bool {
	u, err := url.Parse(text)
	if err != nil || strings.Contains(text, "\\") {
		return false
	}
	return (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" || u.Scheme == "" && u.Host == "" && strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//")
}

// getNotifications lists the pages with unread changes.
func (g *Gateway) getNotifications(c *gin.Context, who whose) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := who.whose(c)
	if !ok {
		return
	}
	var list []unread.Notification
	var count int64
	if !g.carryOut(c, func(ctx context.Context) (err error) {
		list, count, err = g.unread.Follows().Notifications(ctx, user, notifications)
		return err
	}) {
		return
	}
	body := strconv.AppendInt([]byte(`{"count":`), count, 10)
	body = append(body, `,"notifications":[`...)
	for i, n := range list {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, `{"page":`...)
		body = presence.AppendString(body, presence.KeyOf(n.Page))
		body = append(body, `,"count":`...)
		body = strconv.AppendInt(body, n.Count, 10)
		body = append(body, `,"updated_at":`...)
		body = presence.AppendTime(body, n.At)
		if n.Title != "" {
			body = append(body, `,"title":`...)
			body = appendQuoted(body, n.Title)
		}
		if n.URL != "" {
			body = append(body, `,"url":`...)
			body = appendQuoted(body, n.URL)
		}
		body = append(body, '}')
	}
	write(c, "application/json", append(body, "]}\n"...))
}

// deleteNotification marks the changes of one page as seen.
func (g *Gateway) deleteNotification(c *gin.Context, who whose) {
	name, user, _, ok := g.followed(c, who)
	if ok && g.carryOut(c, func(ctx context.Context) error {
		_, err := g.unread.Follows().Reset(ctx, user, name)
		return err
	}) {
		done(c)
	}
}

func (g *Gateway) getFollows(c *gin.Context, who whose) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := who.whose(c)
	if !ok {
		return
	}
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		badRequest(c, "The query cannot be read: "+err.Error()+". Ask as ?after=page, percent-encoded.")
		return
	}
	var s unread.State
	next := ""
	if !g.carryOut(c, func(ctx context.Context) error {
		records, err := g.cfg.Unread.Records(ctx, []unread.User{user})
		if err != nil {
			return err
		}
		r := records[0]
		from, found := r.Find(siteOf(c).Qualify(query.Get("after")))
		if found {
			from++
		}
		if r.Follows = r.Follows[from:]; len(r.Follows) > listPages {
			r.Follows = r.Follows[:listPages]
			next = r.Follows[listPages-1].Page
		}
		s, err = g.unread.Follows().State(ctx, user, r)
		return err
	}) {
		return
	}
	body, some := []byte(`{"follows":[`), []byte(nil)
	for i, f := range s.Follows {
		if i > 0 {
			body = append(body, ',')
		}
		body = presence.AppendString(body, presence.KeyOf(f.Page))
		if n := f.Unread(s.Levels[i], s.Owns[i]); n > 0 {
			some = append(some, ',')
			some = append(presence.AppendString(some, presence.KeyOf(f.Page)), ':')
			some = strconv.AppendInt(some, n, 10)
		}
	}
	body = append(body, ']')
	if len(some) > 0 {
		body = append(append(append(body, `,"unread":{`...), some[1:]...), '}')
	}
	if next != "" {
		body = append(body, `,"next":`...)
		body = presence.AppendString(body, presence.KeyOf(next))
	}
	write(c, "application/json", append(body, "}\n"...))
}

func (g *Gateway) putFollow(c *gin.Context, who whose) {
	name, user, id, ok := g.followed(c, who)
	if !ok {
		return
	}
	if _, ok := readMembers(c, "{}", "away_only"); !ok { // which earlier releases knew; it has no effect
		return
	}
	if id.Fresh && c.GetHeader("Sec-Fetch-Site") == "cross-site" && c.GetHeader(identity.Header) == "" {
		badRequest(c, "A browser keeps no cookie of this server for pages of another site, so nobody would have this follow. Keep the id in the header "+
			identity.Header+" of this answer, and send it in the same header, now and from then on; headcount.follow(page) of the browser client does so.")
		return
	}
	if !g.admit(c, id) {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.unread.Follows().Follow(ctx, user, name) }) {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	done(c)
}

func (g *Gateway) deleteFollow(c *gin.Context, who whose) {
	name, user, _, ok := g.followed(c, who)
	if !ok {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.unread.Follows().Unfollow(ctx, user, name) }) {
		return
	}
	done(c)
}

// followed returns the page of the path, and the user whose follow the request is
// about. If ok is false, it has written the error answer.
func (g *Gateway) followed(c *gin.Context, who whose) (name string, user unread.User, id identity.Identity, ok bool) {
	if user, id, ok = who.whose(c); ok {
		name, ok = page(c, presence.CheckPage)
	}
	return name, user, id, ok
}

func (g *Gateway) getUnread(c *gin.Context, who whose) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := who.whose(c)
	if !ok {
		return
	}
	var count int64
	var updated time.Time
	if g.carryOut(c, func(ctx context.Context) (err error) {
		count, updated, err = g.unread.Follows().Unread(ctx, user)
		return err
	}) {
		writeUnread(c, count, updated)
	}
}

func (g *Gateway) putUnread(c *gin.Context, who whose) {
	user, id, ok := who.whose(c)
	if !ok {
		return
	}
	_, members, ok := readActionAnd(c, []string{"page"}, "reset")
	if !ok {
		return
	}
	var pages []string
	if raw, given := members["page"]; given {
		var name *string
		err := json.Unmarshal(raw, &name)
		if err == nil && name != nil {
			err = presence.CheckPage(*name)
		}
		if err != nil || name == nil {
			badRequest(c, `"page" is the page whose changes are read`+because(err)+"; leave it out for all.")
			return
		}
		pages = []string{siteOf(c).Qualify(*name)}
	}
	if !g.admit(c, id) {
		return
	}
	var s unread.State
	if !g.carryOut(c, func(ctx context.Context) (err error) {
		s, err = g.unread.Follows().Reset(ctx, user, pages...)
		return err
	}) {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	count, updated := s.Unread()
	writeUnread(c, count, updated)
}

func writeUnread(c *gin.Context, count int64, updated time.Time) {
	body := strconv.AppendInt([]byte(`{"count":`), count, 10)
	body = append(body, `,"updated_at":`...)
	body = presence.AppendTime(body, updated)
	write(c, "application/json", append(body, "}\n"...))
}
