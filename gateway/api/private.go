package api

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/identity"
	"headcount/presence"
)

// Matches are pages, or prefixes of pages with a * behind them.
type Matches []string

// Has reports whether the named page is one of them, on any site. The whole site never is.
func (m Matches) Has(name string) bool {
	key := presence.KeyOf(name)
	fits := func(match string) bool { return counter.Matches(match, key) }

	return key != presence.AllPages && slices.ContainsFunc(m, fits)
}

// PublicTop are the pages that visitors may see in the list of the pages with the most users.
type PublicTop struct {
	Pages   Matches // empty: visitors get no list
	Private Matches // those of Pages that it does not show
}

// Has reports whether the list may have the page of that name.
func (t PublicTop) Has(name string) bool { return t.Pages.Has(name) && !t.Private.Has(name) }

// CheckMatch returns why match cannot be one of Matches, or nil.
func CheckMatch(match string) error {
	prefix, several := strings.CutSuffix(match, "*")
	if several && prefix == "" {
		return nil
	}

	return presence.CheckPage(prefix)
}

// PrivateDetail says what a private page needs.
const PrivateDetail = `this page is private: it needs an API key, or a token whose claim "pages" has it`

// Shut returns the first page that a visitor may not use, given the pages in its token, or "".
func (w *Callers) Shut(names []string, open Matches) string {
	for _, name := range names {
		if w.Private.Has(name) && !open.Has(name) {
			return name
		}
	}

	return ""
}

// sees reports whether the caller may see a page that it follows. The page may have become private since.
func (w *Callers) sees(c *gin.Context, id identity.Identity, name string) bool {
	return w.Shut([]string{name}, id.Pages) == "" || w.IsServer(c.Request)
}

// admitPrivate returns an error if a request names private pages, unless its sender may use all of them. query says
// whether to consider the URL's parameters.
func (w *Callers) admitPrivate(c *gin.Context, query bool, names ...string) error {
	if !slices.ContainsFunc(names, w.Private.Has) || w.IsServer(c.Request) {
		return nil
	}

	id, err := w.Identity(c, query)

	// A sender without identity is refused below, with the more useful reason: the page is private.
	anonymous := identity.Nobody(err) && needsNobody(c)
	if err != nil && !anonymous {
		return err
	}
	if w.Shut(names, id.Pages) != "" {
		return errPrivate
	}

	return nil
}

var errPrivate = calls.Refuse(calls.ErrNotPublic, sentence(errors.New(PrivateDetail)))

// needsNobody reports whether a request would need no identity if the page were public: it reads, and does not join.
func needsNobody(c *gin.Context) bool {
	switch c.Request.Method {
	case http.MethodHead:
		return true
	case http.MethodGet:
		return c.Query("join") != "1"
	}

	return false
}
