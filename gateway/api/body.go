package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const maxBody = 4096 // bytes of a request

const tooLong = "A body has at most 4096 bytes."

// readBody reads the body. If it returns false, it has written the error answer.
func readBody(c *gin.Context) ([]byte, bool) {
	if c.Request.ContentLength > maxBody { // a client that waits for 100 Continue gets this before it sends the body
		httppolicy.TooLarge(c.Writer, tooLong)
		return nil, false
	}
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		httppolicy.TooLarge(c.Writer, tooLong)
		return nil, false
	case err != nil:
		badRequest(c, "The body could not be read.")
		return nil, false
	}
	return body, true
}

// readAction reads a body of the form {"action":"…"}, which may have further members of these names. If it returns
// false, it has written the error answer.
func readAction(c *gin.Context, names []string, actions ...string) (action string, members map[string]json.RawMessage, ok bool) {
	body, ok := readBody(c)
	if !ok {
		return "", nil, false
	}
	members, ok = parseMembers(c, body, `The body must be a JSON object, such as {"action":"`+actions[0]+`"}`, append(names, "action")...)
	if !ok {
		return "", nil, false
	}
	if action, err := textOf(members["action"]); err == nil && slices.Contains(actions, action) {
		return action, members, true
	}
	badRequest(c, `"action" is one of: `+strings.Join(actions, ", ")+".")
	return "", nil, false
}

// textOf returns a member that is a string.
func textOf(member json.RawMessage) (string, error) {
	var text *string // nil: null
	if err := json.Unmarshal(member, &text); err != nil || text == nil {
		return "", errors.New("it is no string")
	}
	return *text, nil
}

// readMembers reads a body that is empty or a JSON object with members of these names.
// If it returns false, it has written the error answer.
func readMembers(c *gin.Context, example string, names ...string) (map[string]json.RawMessage, bool) {
	body, ok := readBody(c)
	if !ok || len(body) == 0 {
		return nil, ok
	}
	return parseMembers(c, body, "The body must be empty or a JSON object, such as "+example, names...)
}

// parseMembers reads a JSON object that has only members of these names: a misspelt one
// must not count as one that was left out. If it returns false, it has written the error
// answer.
func parseMembers(c *gin.Context, body []byte, want string, names ...string) (map[string]json.RawMessage, bool) {
	if err := presence.CheckUnicode(body); err != nil {
		badRequest(c, "The body cannot be used: "+err.Error()+".")
		return nil, false
	}
	if len(body) == 0 {
		badRequest(c, "The body is missing. "+want+".")
		return nil, false
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil || members == nil {
		detail := want + "."
		if errors.As(err, new(*json.SyntaxError)) { // other errors name types of Go
			detail = "The body is not JSON: " + err.Error() + ". " + detail
		}
		badRequest(c, detail)
		return nil, false
	}
	for name := range members {
		if !slices.Contains(names, name) {
			badRequest(c, fmt.Sprintf("The body has a member %q, which this call does not know. %s.", presence.Excerpt(name), want))
			return nil, false
		}
	}
	return members, true
}
