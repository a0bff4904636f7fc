package gateway

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/policy"
)

const maxBody = 4096 // bytes of a request

const tooLong = "A body has at most 4096 bytes."

// readBody reads the body. If it returns false, it has written the error answer.
func readBody(c *gin.Context) ([]byte, bool) {
	if c.Request.ContentLength > maxBody { // a client that waits for 100 Continue gets this before it sends the body
		policy.TooLarge(c.Writer, tooLong)
		return nil, false
	}
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		policy.TooLarge(c.Writer, tooLong)
		return nil, false
	case err != nil:
		badRequest(c, "The body could not be read.")
		return nil, false
	}
	return body, true
}

// readAction reads a body of the form {"action":"…"}. If it returns false, it has
// written the error answer.
func readAction(c *gin.Context, actions ...string) (string, bool) {
	body, ok := readBody(c)
	if !ok {
		return "", false
	}
	var members map[string]json.RawMessage
	var action *string
	if err := json.Unmarshal(body, &members); err != nil || members == nil {
		badRequest(c, `The body is a JSON object: {"action":"`+actions[0]+`"}`+because(err)+".")
		return "", false
	}
	if err := json.Unmarshal(members["action"], &action); err != nil || action == nil || !slices.Contains(actions, *action) {
		badRequest(c, `"action" is one of: `+strings.Join(actions, ", ")+".")
		return "", false
	}
	return *action, true
}

// readMembers reads a body that is a JSON object, or empty. If it returns false,
// it has written the error answer.
func readMembers(c *gin.Context, example string) (map[string]json.RawMessage, bool) {
	body, ok := readBody(c)
	if !ok || len(body) == 0 {
		return nil, ok
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil || members == nil {
		badRequest(c, "The body is empty or a JSON object: "+example+because(err)+".")
		return nil, false
	}
	return members, true
}
