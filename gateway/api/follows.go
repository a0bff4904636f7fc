package api

import (
	"context"
	"net/http"
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

type (
	notifications struct {
		Count         int64          `json:"count"`
		Notifications []notification `json:"notifications"`
	}
	notification struct {
		Page    string          `json:"page"`
		Count   int64           `json:"count"`
		Updated presence.Moment `json:"updated_at"`
		Title   foreign         `json:"title,omitempty"`
		URL     foreign         `json:"url,omitempty"`
	}
	follows struct {
		Follows []string         `json:"follows"`
		Unread  map[string]int64 `json:"unread,omitempty"`
		Next    string           `json:"next,omitempty"`
	}
	unreadSum struct {
		Count   int64           `json:"count"`
		Updated presence.Moment `json:"updated_at"`
	}
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
	answer := notifications{count, []notification{}}
	for _, n := range list {
		if a.callers.sees(c, id, n.Page) {
			answer.Notifications = append(answer.Notifications, notification{
				presence.KeyOf(n.Page), n.Count, presence.Moment{Time: n.At}, foreign(n.Title), foreign(n.URL),
			})
		}
	}
	writeJSON(c, answer)
}

// deleteNotification marks the changes of one page as read.
func (a *API) deleteNotification(c *gin.Context) {
	name, user, _, ok := a.followed(c)
	if ok && a.call(c, storeTimeout, func(ctx context.Context) error {
		_, err := a.parts.Follows.Reset(ctx, user, name)
		return err
	}) {
		httppolicy.NoContent(c)
	}
}

func (a *API) getFollows(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, id, ok := a.callers.follower(c)
	if !ok {
		return
	}
	query := counterapi.ReadQuery(c, "?after=page")
	if !query.OK {
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
	answer := follows{Follows: []string{}, Unread: map[string]int64{}, Next: presence.KeyOf(next)}
	for i, f := range s.Follows {
		if !a.callers.sees(c, id, f.Page) {
			continue
		}
		answer.Follows = append(answer.Follows, presence.KeyOf(f.Page))
		if n := f.Unread(s.Levels[i], s.Owns[i]); n > 0 {
			answer.Unread[presence.KeyOf(f.Page)] = n
		}
	}
	writeJSON(c, answer)
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
	httppolicy.NoContent(c)
}

func (a *API) deleteFollow(c *gin.Context) {
	name, user, _, ok := a.followed(c)
	if ok && a.call(c, storeTimeout, func(ctx context.Context) error { return a.parts.Follows.Unfollow(ctx, user, name) }) {
		httppolicy.NoContent(c)
	}
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
	_, members, ok := readAction(c, []string{"page"}, "reset")
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
	writeJSON(c, unreadSum{count, presence.Moment{Time: updated}})
}
