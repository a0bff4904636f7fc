package api

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

const (
	maxFollows       = 100 // in one answer
	maxNotifications = 50  // in one answer
)

// followRoutes adds the routes of follows and unread changes, for users themselves and for servers.
func (a *API) followRoutes(e *gin.Engine) {
	for _, root := range []string{"/-/me", "/-/users/:user"} {
		httppolicy.Get(e, root+"/follows", a.getFollows)
		e.PUT(root+"/follows/:page", a.putFollow)
		e.DELETE(root+"/follows/:page", a.deleteFollow)
		httppolicy.Get(e, root+"/unread", a.getUnread)
		e.PUT(root+"/unread", a.putUnread)
		httppolicy.Get(e, root+"/notifications", a.getNotifications)
		e.DELETE(root+"/notifications/:page", a.deleteNotification)
	}
}

// getNotifications lists the pages with unread changes.
func (a *API) getNotifications(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, id, ok := a.callers.follower(c)
	if !ok {
		return
	}
	var list []unread.Notification
	var count int64
	if !a.call(c, storeTimeout, func(ctx context.Context) (err error) {
		list, count, err = a.parts.Follows.Notifications(ctx, user, maxNotifications)
		return err
	}) {
		return
	}
	body := strconv.AppendInt([]byte(`{"count":`), count, 10)
	body = append(body, `,"notifications":[`...)
	list = slices.DeleteFunc(list, func(n unread.Notification) bool { return !a.callers.sees(c, id, n.Page) })
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

// deleteNotification marks the changes of one page as read.
func (a *API) deleteNotification(c *gin.Context) {
	name, user, _, ok := a.followed(c)
	if ok && a.call(c, storeTimeout, func(ctx context.Context) error {
		_, err := a.parts.Follows.Reset(ctx, user, name)
		return err
	}) {
		done(c)
	}
}

func (a *API) getFollows(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, id, ok := a.callers.follower(c)
	if !ok {
		return
	}
	query, ok := counterapi.Query(c, "?after=page")
	if !ok {
		return
	}
	var s unread.State
	next := ""
	if !a.call(c, storeTimeout, func(ctx context.Context) error {
		records, err := a.parts.Unread.Records(ctx, []unread.User{user})
		if err != nil {
			return err
		}
		r := records[0]
		from, found := r.Find(siteOf(c).Qualify(query.Get("after")))
		if found {
			from++
		}
		if r.Follows = r.Follows[from:]; len(r.Follows) > maxFollows {
			r.Follows = r.Follows[:maxFollows]
			next = r.Follows[maxFollows-1].Page
		}
		s, err = a.parts.Follows.State(ctx, user, r)
		return err
	}) {
		return
	}
	body, some := []byte(`{"follows":[`), []byte(nil)
	listed := 0
	for i, f := range s.Follows {
		if !a.callers.sees(c, id, f.Page) {
			continue
		}
		if listed++; listed > 1 {
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

func (a *API) putFollow(c *gin.Context) {
	name, user, id, ok := a.followed(c)
	if !ok {
		return
	}
	if _, ok := readMembers(c, "{}", "away_only"); !ok { // earlier releases knew away_only; it has no effect
		return
	}
	if id.Fresh && c.GetHeader("Sec-Fetch-Site") == "cross-site" && c.GetHeader(identity.Header) == "" {
		badRequest(c, "A browser keeps no cookie of this server for pages of another site, so nobody would have this follow. Keep the id in the header "+
			identity.Header+" of this answer, and send it in the same header, now and from then on; headcount.follow(page) of the browser client does so.")
		return
	}
	if !a.admitIdentity(c, id) {
		return
	}
	if !a.call(c, storeTimeout, func(ctx context.Context) error { return a.parts.Follows.Follow(ctx, user, name) }) {
		return
	}
	a.callers.SetCookie(c, id)
	done(c)
}

func (a *API) deleteFollow(c *gin.Context) {
	name, user, _, ok := a.followed(c)
	if !ok {
		return
	}
	if !a.call(c, storeTimeout, func(ctx context.Context) error { return a.parts.Follows.Unfollow(ctx, user, name) }) {
		return
	}
	done(c)
}

// followed returns the page of the path, and the user whose follow the request is
// about. If ok is false, it has written the error answer.
func (a *API) followed(c *gin.Context) (name string, user unread.User, id identity.Identity, ok bool) {
	if user, id, ok = a.callers.follower(c); ok {
		name, ok = pageInPath(c, presence.CheckPage)
	}
	if ok && c.Request.Method == http.MethodPut { // whoever follows a page that has become private may end that
		ok = a.callers.admitPrivate(c, false, name)
	}
	return name, user, id, ok
}

func (a *API) getUnread(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := a.callers.follower(c)
	if !ok {
		return
	}
	var count int64
	var updated time.Time
	if a.call(c, storeTimeout, func(ctx context.Context) (err error) {
		count, updated, err = a.parts.Follows.Unread(ctx, user)
		return err
	}) {
		writeUnread(c, count, updated)
	}
}

func (a *API) putUnread(c *gin.Context) {
	user, id, ok := a.callers.follower(c)
	if !ok {
		return
	}
	_, members, ok := readActionAnd(c, []string{"page"}, "reset")
	if !ok {
		return
	}
	var pages []string
	if raw, given := members["page"]; given {
		name, err := textOf(raw)
		if err == nil {
			err = presence.CheckPage(name)
		}
		if err != nil {
			badRequest(c, `"page" is the page whose changes are read: `+err.Error()+"; leave it out for all.")
			return
		}
		pages = []string{siteOf(c).Qualify(name)}
	}
	if !a.admitIdentity(c, id) {
		return
	}
	var s unread.State
	if !a.call(c, storeTimeout, func(ctx context.Context) (err error) {
		s, err = a.parts.Follows.Reset(ctx, user, pages...)
		return err
	}) {
		return
	}
	a.callers.SetCookie(c, id)
	count, updated := s.Unread()
	writeUnread(c, count, updated)
}

func writeUnread(c *gin.Context, count int64, updated time.Time) {
	body := strconv.AppendInt([]byte(`{"count":`), count, 10)
	body = append(body, `,"updated_at":`...)
	body = presence.AppendTime(body, updated)
	write(c, "application/json", append(body, "}\n"...))
}
