package api

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
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

// getNotifications lists the pages with unread changes.
func (a *API) getNotifications(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, id, err := a.callers.follower(c)
	if err != nil {
		return calls.Answer{}, err
	}

	var list []unread.Notification
	var count int64
	err = a.carryOut(c, storeTimeout, func(ctx context.Context) (err error) {
		list, count, err = a.parts.Follows.Notifications(ctx, user, maxNotifications)
		return err
	})
	if err != nil {
		return calls.Answer{}, err
	}

	answer := notifications{count, []notification{}}
	for _, n := range list {
		// The page may have become private since it was followed.
		if !a.callers.sees(c, id, n.Page) {
			continue
		}
		answer.Notifications = append(answer.Notifications, notification{
			Page:    presence.KeyOf(n.Page),
			Count:   n.Count,
			Updated: presence.Moment{Time: n.At},
			Title:   foreign(n.Title),
			URL:     foreign(n.URL),
		})
	}

	return answerJSON(answer), nil
}

// deleteNotification marks the changes of one page as read.
func (a *API) deleteNotification(c *gin.Context) (calls.Answer, error) {
	follow, err := a.followed(c)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.NoContent, a.carryOut(c, storeTimeout, func(ctx context.Context) error {
		_, err := a.parts.Follows.Reset(ctx, follow.user, follow.page)
		return err
	})
}

func (a *API) getFollows(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, id, err := a.callers.follower(c)
	if err != nil {
		return calls.Answer{}, err
	}
	query := counterapi.ReadQuery(c, "?after=page")
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	var s unread.State
	next := ""
	after := siteOf(c).Qualify(query.Get("after"))
	err = a.carryOut(c, storeTimeout, func(ctx context.Context) (err error) {
		s, next, err = a.followsAfter(ctx, user, after)
		return err
	})
	if err != nil {
		return calls.Answer{}, err
	}

	answer := follows{Follows: []string{}, Unread: map[string]int64{}, Next: presence.KeyOf(next)}
	for i, f := range s.Follows {
		// The page may have become private since it was followed.
		if !a.callers.sees(c, id, f.Page) {
			continue
		}

		page := presence.KeyOf(f.Page)
		answer.Follows = append(answer.Follows, page)
		if n := f.Unread(s.Levels[i], s.Owns[i]); n > 0 {
			answer.Unread[page] = n
		}
	}

	return answerJSON(answer), nil
}

// followsAfter returns the follows after a page for one answer, and the page at which the next answer continues; empty:
// there are no more.
func (a *API) followsAfter(
	ctx context.Context, user unread.User, after string,
) (s unread.State, next string, err error) {
	records, err := a.parts.Unread.Records(ctx, []unread.User{user})
	if err != nil {
		return s, "", err
	}

	// The page after may not be followed any more, so only its place in the order matters.
	r := records[0]
	from, found := r.Find(after)
	if found {
		from++
	}
	r.Follows = r.Follows[from:]
	if len(r.Follows) > maxFollows {
		r.Follows = r.Follows[:maxFollows]
		next = r.Follows[maxFollows-1].Page
	}

	s, err = a.parts.Follows.State(ctx, user, r)

	return s, next, err
}

func (a *API) putFollow(c *gin.Context) (calls.Answer, error) {
	follow, err := a.followed(c)
	if err != nil {
		return calls.Answer{}, err
	}

	// Earlier releases knew away_only; it has no effect.
	if _, err := readMembers(c, "{}", "away_only"); err != nil {
		return calls.Answer{}, err
	}
	if forgets(c, follow.id) {
		return calls.Answer{}, errForgotten
	}
	if err := a.admitIdentity(c, follow.id); err != nil {
		return calls.Answer{}, err
	}

	err = a.carryOut(c, storeTimeout, func(ctx context.Context) error {
		return a.parts.Follows.Follow(ctx, follow.user, follow.page)
	})
	if err != nil {
		return calls.Answer{}, err
	}

	// The follow is stored, so now the identity is worth keeping.
	a.callers.SetCookie(c, follow.id)

	return calls.NoContent, nil
}

var errForgotten = calls.Bad("A browser keeps no cookie of this server for pages of another site, so nobody would " +
	"have this follow. Keep the id in the header " + identity.Header + " of this answer, and send it in the same " +
	"header, now and from then on; headcount.follow(page) of the browser client does so.")

// forgets reports whether a browser will not keep the new identity, because the call is from a page of another site.
func forgets(c *gin.Context, id identity.Identity) bool {
	return id.Fresh && c.GetHeader("Sec-Fetch-Site") == "cross-site" && c.GetHeader(identity.Header) == ""
}

func (a *API) deleteFollow(c *gin.Context) (calls.Answer, error) {
	follow, err := a.followed(c)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.NoContent, a.carryOut(c, storeTimeout, func(ctx context.Context) error {
		return a.parts.Follows.Unfollow(ctx, follow.user, follow.page)
	})
}

// follow is the subject of a call about one follow.
type follow struct {
	page string // its name
	user unread.User
	id   identity.Identity // of a caller without API key
}

// followed returns the page of the path, and the user whose follow the request is about.
func (a *API) followed(c *gin.Context) (follow, error) {
	user, id, err := a.callers.follower(c)
	if err != nil {
		return follow{}, err
	}
	name, err := pageInPath(c, "page", presence.CheckPage)
	if err != nil {
		return follow{}, err
	}

	// A follow of a page that has become private may still be ended.
	if c.Request.Method == http.MethodPut {
		err = a.callers.admitPrivate(c, false, name)
	}

	return follow{page: name, user: user, id: id}, err
}

func (a *API) getUnread(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, _, err := a.callers.follower(c)
	if err != nil {
		return calls.Answer{}, err
	}

	var count int64
	var updated time.Time
	err = a.carryOut(c, storeTimeout, func(ctx context.Context) (err error) {
		count, updated, err = a.parts.Follows.Unread(ctx, user)
		return err
	})
	if err != nil {
		return calls.Answer{}, err
	}

	return answerUnread(count, updated), nil
}

func (a *API) putUnread(c *gin.Context) (calls.Answer, error) {
	user, id, err := a.callers.follower(c)
	if err != nil {
		return calls.Answer{}, err
	}
	_, given, err := readAction(c, []string{"page"}, "reset")
	if err != nil {
		return calls.Answer{}, err
	}
	pages, err := given.pages(siteOf(c))
	if err != nil {
		return calls.Answer{}, err
	}
	if err := a.admitIdentity(c, id); err != nil {
		return calls.Answer{}, err
	}

	var s unread.State
	err = a.carryOut(c, storeTimeout, func(ctx context.Context) (err error) {
		s, err = a.parts.Follows.Reset(ctx, user, pages...)
		return err
	})
	if err != nil {
		return calls.Answer{}, err
	}
	a.callers.SetCookie(c, id)
	count, updated := s.Unread()

	return answerUnread(count, updated), nil
}

// pages returns the name of the page whose changes are read; none means those of all pages.
func (m members) pages(site presence.Site) ([]string, error) {
	raw, given := m["page"]
	if !given {
		return nil, nil
	}

	name, err := textOf(raw)
	if err == nil {
		err = presence.CheckPage(name)
	}
	if err != nil {
		return nil, calls.Bad(`"page" is the page whose changes are read: ` + err.Error() + "; leave it out for all.")
	}

	return []string{site.Qualify(name)}, nil
}

func answerUnread(count int64, updated time.Time) calls.Answer {
	return answerJSON(unreadSum{count, presence.Moment{Time: updated}})
}
