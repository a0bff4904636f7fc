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

	"headcount/gateway/calls"
	"headcount/presence"
)

const maxBody = 4096 // bytes of a request

// readBody reads a body of at most most bytes.
func readBody(c *gin.Context, most int64) ([]byte, error) {
	errTooLong := calls.Refuse(calls.ErrTooLarge, fmt.Sprintf("A body has at most %d bytes.", most))

	// A client that waits for 100 Continue is refused before it sends the body.
	if c.Request.ContentLength > most {
		return nil, errTooLong
	}

	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, most))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, errTooLong
	case err != nil:
		return nil, calls.Bad("The body could not be read; send as many bytes as Content-Length says.")
	}

	return body, nil
}

// members are the members of a JSON object.
type members map[string]json.RawMessage

// readAction parses a body of the form {"action":"…"}, which may also have members with the given names.
func readAction(c *gin.Context, names []string, actions ...string) (action string, given members, err error) {
	body, err := readBody(c, maxBody)
	if err != nil {
		return "", nil, err
	}

	want := `The body must be a JSON object, such as {"action":"` + actions[0] + `"}`
	given, err = parseMembers(body, want, append(names, "action")...)
	if err != nil {
		return "", nil, err
	}

	action, err = textOf(given["action"])
	if err != nil || !slices.Contains(actions, action) {
		return "", nil, calls.Bad(`"action" is one of: ` + strings.Join(actions, ", ") + ".")
	}

	return action, given, nil
}

// textOf returns a member that is a string.
func textOf(member json.RawMessage) (string, error) {
	var text *string // nil: null
	if err := json.Unmarshal(member, &text); err != nil || text == nil {
		return "", errors.New("it is no string")
	}

	return *text, nil
}

// readMembers parses a body that is empty or a JSON object with members of the given names.
func readMembers(c *gin.Context, example string, names ...string) (members, error) {
	body, err := readBody(c, maxBody)
	if err != nil || len(body) == 0 {
		return nil, err
	}

	return parseMembers(body, "The body must be empty or a JSON object, such as "+example, names...)
}

// parseMembers parses a JSON object that has only members of the given names. A misspelt member must be refused, or it
// would count as missing.
func parseMembers(body []byte, want string, names ...string) (members, error) {
	if err := presence.CheckUnicode(body); err != nil {
		return nil, calls.Bad("The body cannot be used: " + err.Error() + ".")
	}
	if len(body) == 0 {
		return nil, calls.Bad("The body is missing. " + want + ".")
	}

	var given members
	// A null leaves given nil, and is no object either.
	if err := json.Unmarshal(body, &given); err != nil || given == nil {
		detail := want + "."
		// Other errors contain names of Go types.
		if errors.As(err, new(*json.SyntaxError)) {
			detail = "The body is not JSON: " + err.Error() + ". " + detail
		}
		return nil, calls.Bad(detail)
	}

	for name := range given {
		if !slices.Contains(names, name) {
			return nil, calls.Bad(fmt.Sprintf("The body has a member %q, which this call does not know. %s.",
				presence.Excerpt(name), want))
		}
	}

	return given, nil
}
