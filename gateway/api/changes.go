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

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

const maxNote = 300 // characters of a title or an URL

// postChange stores that a page was modified.
func (a *API) postChange(c *gin.Context) (calls.Answer, error) {
	if err := a.callers.Server(c); err != nil {
		return calls.Answer{}, err
	}
	name, err := a.callers.Page(c, presence.CheckPage, false)
	if err != nil {
		return calls.Answer{}, err
	}
	change, err := a.readChange(c)
	if err != nil {
		return calls.Answer{}, err
	}

	// The answer counts only if the error is nil.
	return calls.NoContent, a.carryOut(c, storeTimeout, func(ctx context.Context) error {
		return a.parts.Unread.Change(ctx, name, change)
	})
}

// readChange reads the body of a change.
func (a *API) readChange(c *gin.Context) (change unread.Change, err error) {
	key, problem := httppolicy.IdempotencyKey(c.Request)
	if problem != "" {
		return change, calls.Bad(problem)
	}
	change.Key = key

	given, err := readMembers(c, `{"by":"the user who did it","title":"…","url":"…"}`, "by", "title", "url")
	if err != nil {
		return change, err
	}
	change.Title, err = given.note("title", func(string) bool { return true })
	if err != nil {
		return change, err
	}
	change.URL, err = given.note("url", isLink)
	if err != nil {
		return change, err
	}

	// For the user who made the change it is not unread.
	if raw, has := given["by"]; has {
		by, err := userOf(raw)
		if err != nil {
			return change, calls.Bad(`"by" is the id of a user: ` + err.Error() + ".")
		}
		user := a.callers.UserOf(siteOf(c), by)
		change.By = &user
	}

	return change, nil
}

// userOf returns a member that is the id of a user.
func userOf(member json.RawMessage) (string, error) {
	id, err := textOf(member)
	if err != nil {
		return "", err
	}

	return id, identity.CheckUser(id)
}

// note returns a title or an URL, empty if there is none.
func (m members) note(name string, valid func(string) bool) (string, error) {
	raw, given := m[name]
	if !given {
		return "", nil
	}

	text, err := textOf(raw)
	fits := err == nil && text != "" && utf8.RuneCountInString(text) <= maxNote
	if !fits || strings.ContainsFunc(text, invisible) || !valid(text) {
		return "", calls.Bad(fmt.Sprintf("%q is 1 to %d characters without control characters; "+
			"a url begins with http://, https:// or a single slash.", name, maxNote))
	}

	return text, nil
}

// invisible reports whether a character can be part of no text that people read.
func invisible(r rune) bool { return unicode.IsControl(r) || r == utf8.RuneError }

// isLink reports whether a page may show text as a link: one that leads to the web or stays on
// the site, and runs no script.
func isLink(text string) bool {
	u, err := url.Parse(text)
	// Browsers take a backslash for a slash, so that /\host would leave the site.
	if err != nil || strings.Contains(text, "\\") {
		return false
	}

	toWeb := u.Host != "" && (u.Scheme == "http" || u.Scheme == "https")
	ofSite := u.Host == "" && u.Scheme == "" && strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//")

	return toWeb || ofSite
}
