package api

import (
	"context"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

// getUsers answers whether users are present, in the order in which the request names them.
func (a *API) getUsers(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	users, err := a.UsersAsked(c)
	if err != nil {
		return calls.Answer{}, err
	}

	states, err := a.userStates(c, users)
	if err != nil {
		return calls.Answer{}, err
	}

	var answer struct {
		Users []User `json:"users"`
	}
	for i, user := range users {
		answer.Users = append(answer.Users, UserOf(user, states[i]))
	}

	return answerJSON(answer), nil
}

// getUser answers whether one user is present.
func (a *API) getUser(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	user, err := a.callers.userInPath(c)
	if err != nil {
		return calls.Answer{}, err
	}

	states, err := a.userStates(c, []string{user})
	if err != nil {
		return calls.Answer{}, err
	}

	return answerJSON(UserOf(user, states[0])), nil
}

// UsersAsked returns the users that a server's request names, without duplicates.
func (a *API) UsersAsked(c *gin.Context) ([]string, error) {
	if err := a.callers.Server(c); err != nil {
		return nil, err
	}

	return counterapi.Several(c, "user", "users", identity.CheckUser)
}

// userStates returns the states of users of the request's site.
func (a *API) userStates(c *gin.Context, users []string) (states []presence.UserState, err error) {
	// Owners and stores never see the id itself.
	hashes := make([]presence.User, len(users))
	for i, user := range users {
		hashes[i] = a.callers.Identities.Hash(siteOf(c).Qualify(user))
	}

	err = a.carryOut(c, storeTimeout, func(ctx context.Context) (err error) {
		states, err = a.parts.Cluster.Users(ctx, hashes)
		return err
	})

	return states, err
}

// User is the state of a user, as clients see it.
type User struct {
	User   string `json:"user"`
	Online bool   `json:"online"`
	// LastSeen is set for users that are not present, Since and Pages for those that are.
	LastSeen presence.Moment `json:"last_seen,omitzero"`
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
