package api

import (
	"context"

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
	var answer struct {
		Users []User `json:"users"`
	}
	for i, user := range users {
		answer.Users = append(answer.Users, UserOf(user, states[i]))
	}
	writeJSON(c, answer)
}

// getUser answers whether one user is here.
func (a *API) getUser(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, ok := a.callers.userInPath(c)
	if !ok {
		return
	}
	if states, ok := a.userStates(c, []string{user}); ok {
		writeJSON(c, UserOf(user, states[0]))
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

// User is what is known of a user, as clients see it.
type User struct {
	User     string          `json:"user"`
	Online   bool            `json:"online"`
	LastSeen presence.Moment `json:"last_seen,omitzero"` // only of a user who is not here, as the others are only of one who is
	Since    presence.Moment `json:"since,omitzero"`
	Pages    int             `json:"pages,omitempty"`
}

// UserOf returns the User in that state.
func UserOf(user string, state presence.UserState) User {
	if state.Since.IsZero() {
		return User{User: user, LastSeen: presence.Moment{Time: state.LastSeen}}
	}
	return User{User: user, Online: true, Since: presence.Moment{Time: state.Since}, Pages: state.Pages}
}
