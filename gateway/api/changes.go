package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

const maxNote = 300 // characters of a title or an URL

// postChange stores that a page was modified.
func (a *API) postChange(c *gin.Context) {
	if !a.callers.Server(c) {
		return
	}
	name, ok := a.callers.Page(c, presence.CheckPage, false)
	if !ok {
		return
	}
	change, ok := a.readChange(c)
	if !ok {
		return
	}
	if a.call(c, storeTimeout, func(ctx context.Context) error { return a.parts.Unread.Change(ctx, name, change) }) {
		httppolicy.NoContent(c)
	}
}

// readChange reads the body of a change. If ok is false, it has written the error answer.
func (a *API) readChange(c *gin.Context) (change unread.Change, ok bool) {
	key, problem := httppolicy.IdempotencyKey(c.Request)
	if problem != "" {
		badRequest(c, problem)
		return change, false
	}
	change.Key = key
	members, ok := readMembers(c, `{"by":"the user who did it","title":"…","url":"…"}`, "by", "title", "url")
	if !ok {
		return change, false
	}
	if change.Title, ok = readNote(c, members, "title", func(string) bool { return true }); !ok {
		return change, false
	}
	if change.URL, ok = readNote(c, members, "url", isLink); !ok {
		return change, false
	}
	if raw, given := members["by"]; given {
		by, err := textOf(raw)
		if err == nil {
			err = identity.CheckUser(by)
		}
		if err != nil {
			badRequest(c, `"by" is the id of a user: `+err.Error()+".")
			return change, false
		}
		user := a.callers.UserOf(siteOf(c), by)
		change.By = &user
	}
	return change, true
}

// readNote reads a title or an URL, empty if there is none. If ok is false, it has
// written the error answer.
func readNote(c *gin.Context, members map[string]json.RawMessage, name string, valid func(string) bool) (text string, ok bool) {
	raw, given := members[name]
	if !given {
		return "", true
	}
	text, err := textOf(raw)
	if err != nil || text == "" || utf8.RuneCountInString(text) > maxNote ||
		strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) || r == utf8.RuneError }) || !valid(text) {
		badRequest(c, fmt.Sprintf("%q is 1 to %d characters without control characters; a url begins with http://, https:// or a single slash.", name, maxNote))
		return "", false
	}
	return text, true
}

// isLink reports whether a page may show text as a link: one that leads to the web or stays on
// the site, and runs no script.
func isLink(text string) bool {
	u, err := url.Parse(text)
	if err != nil || strings.Contains(text, "\\") {
		return false
	}
	return (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" || u.Scheme == "" && u.Host == "" && strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//")
}
