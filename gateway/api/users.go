package api

import (
	"context"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

// getUsers answers whether users are here, in the order in which the request names them.
func (a *API) getUsers(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	users, ok := a.UsersAsked(c)
	if !ok {
		return
	}
	states, ok := a.userStates(c, users)
	if !ok {
		return
	}
	body := []byte(`{"users":[`)
	for i, user := range users {
		if i > 0 {
			body = append(body, ',')
		}
		body = AppendUser(body, user, states[i])
	}
	write(c, "application/json", append(body, "]}\n"...))
}

// getUser answers whether one user is here.
func (a *API) getUser(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, ok := a.callers.userInPath(c)
	if !ok {
		return
	}
	if states, ok := a.userStates(c, []string{user}); ok {
		write(c, "application/json", append(AppendUser(nil, user, states[0]), '\n'))
	}
}

// UsersAsked returns the users that a server's request names, each once. If ok is false, it has written the error answer.
func (a *API) UsersAsked(c *gin.Context) (users []string, ok bool) {
	if !a.callers.Server(c) {
		return nil, false
	}
	return counterapi.Several(c, "user", "users", identity.CheckUser)
}

// userStates returns the states of users of the request's site. If ok is false, it has written the error answer.
func (a *API) userStates(c *gin.Context, users []string) (states []presence.UserState, ok bool) {
	hashes := make([]presence.User, len(users))
	for i, user := range users {
		hashes[i] = a.callers.Identities.Hash(siteOf(c).Qualify(user))
	}
	ok = a.call(c, storeTimeout, func(ctx context.Context) (err error) {
		states, err = a.parts.Cluster.Users(ctx, hashes)
		return err
	})
	return states, ok
}

// AppendUser appends what is known of a user as JSON.
func AppendUser(b []byte, user string, state presence.UserState) []byte {
	b = append(b, `{"user":`...)
	b = presence.AppendString(b, user)
	if state.Since.IsZero() {
		b = append(b, `,"online":false`...)
		if !state.LastSeen.IsZero() {
			b = presence.AppendTime(append(b, `,"last_seen":`...), state.LastSeen)
		}
		return append(b, '}')
	}
	b = append(b, `,"online":true,"since":"`...)
	b = state.Since.UTC().AppendFormat(b, time.RFC3339)
	b = append(b, `","pages":`...)
	b = strconv.AppendInt(b, int64(state.Pages), 10)
	return append(b, '}')
}
