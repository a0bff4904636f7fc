package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"headcount/presence"
)

// wireUsers is a question about users as JSON. A user has 16 hex digits, as in wireHold.
type wireUsers struct {
	Users []string `json:"users"`
}

// wireStates is the answer, in the same order.
type wireStates struct {
	Users []wireState `json:"users"`
}

type wireState struct {
	Since int64 `json:"since"` // unix seconds; 0: not present
	Pages int   `json:"pages"`
	Seen  int64 `json:"seen,omitempty"` // of a user who is not present: last seen, unix seconds; 0: not known
}

// Users asks the presence node at addr about users, at most presence.MaxAsked. Its errors are those of Hold.
func (c *Client) Users(ctx context.Context, addr string, users []presence.User) ([]presence.UserState, error) {
	wire := wireUsers{Users: make([]string, len(users))}
	for i, u := range users {
		wire.Users[i] = fmt.Sprintf("%016x", uint64(u))
	}

	body, err := json.Marshal(wire)
	if err != nil {
		return nil, fmt.Errorf("rpc: users: %w", err)
	}

	answer, err := c.ask(ctx, addr, usersPath, body, http.StatusOK)
	if err != nil {
		return nil, fmt.Errorf("rpc: users at %s: %w", addr, err)
	}

	var is wireStates
	// A state belongs to its user by its place alone.
	if err := json.Unmarshal(answer, &is); err != nil || len(is.Users) != len(users) {
		return nil, fmt.Errorf("rpc: users at %s: %w: %d states of %d users: %v",
			addr, presence.ErrUnavailable, len(is.Users), len(users), err)
	}

	states := make([]presence.UserState, len(users))
	for i, s := range is.Users {
		switch {
		case s.Since != 0:
			states[i] = presence.UserState{Since: time.Unix(s.Since, 0), Pages: s.Pages}
		case s.Seen != 0:
			states[i].LastSeen = time.Unix(s.Seen, 0)
		}
	}

	return states, nil
}

func parseUsers(body []byte) ([]presence.User, error) {
	var m wireUsers
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	// Each user costs the actor of a partition time, so a process asks for no more at once.
	if len(m.Users) > presence.MaxAsked {
		return nil, errors.New("too many users")
	}

	users := make([]presence.User, len(m.Users))
	for i, text := range m.Users {
		var err error
		users[i], err = parseUser(text)
		if err != nil {
			return nil, err
		}
	}

	return users, nil
}

func parseUser(text string) (presence.User, error) {
	n, err := strconv.ParseUint(text, 16, 64)
	if err != nil || len(text) != 16 {
		return 0, errors.New("user must be 16 hex digits")
	}

	return presence.User(n), nil
}

// users answers a question about users.
func (h *Handler) users(ctx context.Context, body []byte) ([]byte, error) {
	users, err := parseUsers(body)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}

	states, err := h.cfg.Users.ReceiveUsers(ctx, users)
	if err != nil {
		return nil, err
	}

	// A user who is present has no time of departure to tell, so the two never come together.
	wire := wireStates{Users: make([]wireState, len(states))}
	for i, s := range states {
		switch {
		case !s.Since.IsZero():
			wire.Users[i] = wireState{Since: s.Since.Unix(), Pages: s.Pages}
		case !s.LastSeen.IsZero():
			wire.Users[i] = wireState{Seen: s.LastSeen.Unix()}
		}
	}

	return json.Marshal(wire)
}
