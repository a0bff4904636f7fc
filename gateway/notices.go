package gateway

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"headcount/presence"
	"headcount/presence/unread"
)

const (
	apiKeyHeader      = "X-API-Key"
	idempotencyHeader = "Idempotency-Key"
	listPages         = 100 // follows in one answer
)

// apiKeys are the keys of servers, hashed, so that comparing takes as long
// whatever is presented.
type apiKeys [][sha256.Size]byte

func newAPIKeys(keys []string) apiKeys {
	hashes := make(apiKeys, len(keys))
	for i, k := range keys {
		hashes[i] = sha256.Sum256([]byte(k))
	}
	return hashes
}

// has reports whether the key is one of them.
func (k apiKeys) has(key string) bool {
	sum, found := sha256.Sum256([]byte(key)), 0
	for i := range k {
		found |= subtle.ConstantTimeCompare(k[i][:], sum[:])
	}
	return found == 1
}

// server lets a request pass that has an API key; else the answer has been
// written.
func (g *Gateway) server(c *gin.Context) bool {
	key := c.GetHeader(apiKeyHeader)
	if g.keys.has(key) {
		return true
	}
	c.Header("WWW-Authenticate", `API-Key realm="headcount"`)
	detail := "The API key is wrong."
	switch {
	case len(g.keys) == 0:
		detail = "This is for servers with an API key, and this server has none: start it with --api-key."
	case key == "":
		detail = "This is for servers: send an API key in the header " + apiKeyHeader + "."
	}
	writeProblem(c.Writer, http.StatusUnauthorized, detail)
	return false
}

// whose finds out whose follows a request is about. When it cannot the answer
// has been written.
type whose func(c *gin.Context) (user unread.User, id Identity, ok bool)

// notices adds the routes of changes, follows and unread counts.
func (g *Gateway) notices(e *gin.Engine, get func(string, gin.HandlerFunc)) {
	e.POST("/:page/changes", g.postChange)
	for root, who := range map[string]whose{"/-/me": g.caller, "/-/users/:user": g.named} {
		get(root+"/follows", func(c *gin.Context) { g.getFollows(c, who) })
		e.PUT(root+"/follows/:page", func(c *gin.Context) { g.putFollow(c, who) })
		e.DELETE(root+"/follows/:page", func(c *gin.Context) { g.deleteFollow(c, who) })
		get(root+"/unread", func(c *gin.Context) { g.getUnread(c, who) })
		e.PUT(root+"/unread", func(c *gin.Context) { g.putUnread(c, who) })
	}
}

func (g *Gateway) userOf(id string) unread.User {
	return unread.User(g.cfg.Identities.Hash128(id))
}

// caller is who asks.
func (g *Gateway) caller(c *gin.Context) (unread.User, Identity, bool) {
	id, err := g.cfg.Identities.Identify(c.Request, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return unread.User{}, Identity{}, false
	}
	return g.userOf(id.User), id, true
}

// named is the user that a server names in the path.
func (g *Gateway) named(c *gin.Context) (unread.User, Identity, bool) {
	if !g.server(c) {
		return unread.User{}, Identity{}, false
	}
	name, err := url.PathUnescape(c.Param("user"))
	if err == nil {
		err = checkUser(name)
	}
	if err != nil {
		badRequest(c, err.Error())
		return unread.User{}, Identity{}, false
	}
	return g.userOf(name), Identity{}, true
}

// checkUser says why nobody can be called that. It allows what a token's sub may be.
func checkUser(name string) error {
	if name == "" || len(name) > maxSub || !utf8.ValidString(name) ||
		strings.ContainsFunc(name, func(r rune) bool { return r == utf8.RuneError || unicode.IsControl(r) }) {
		return errors.New("a user id is 1 to " + strconv.Itoa(maxSub) + " bytes of plain text")
	}
	return nil
}

// carryOut has the store do what a request asks for, in the time it has for
// that. When it did not the answer has been written.
func (g *Gateway) carryOut(c *gin.Context, do func(context.Context) error) bool {
	if err := g.serving(); err != nil {
		unavailable(c, err)
		return false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), bookPatience)
	defer cancel()
	err := do(ctx)
	switch {
	case err == nil:
	case errors.Is(err, presence.ErrTooMany):
		badRequest(c, err.Error())
	default:
		g.cfg.Log.Debug().Err(err).Str("route", c.FullPath()).Msg("the store did not carry out a request")
		unavailable(c, presence.ErrUnavailable)
	}
	return err == nil
}

// postChange notes that a page was modified.
func (g *Gateway) postChange(c *gin.Context) {
	if !g.server(c) {
		return
	}
	name, ok := page(c, presence.CheckPage)
	if !ok {
		return
	}
	change, ok := g.readChange(c)
	if !ok {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.cfg.Unread.Change(ctx, name, change) }) {
		return
	}
	done(c)
}

func (g *Gateway) readChange(c *gin.Context) (change unread.Change, ok bool) {
	if keys := c.Request.Header.Values(idempotencyHeader); len(keys) > 0 {
		change.Key = keys[0]
		if len(keys) > 1 || change.Key == "" || len(change.Key) > unread.MaxKey {
			badRequest(c, "An "+idempotencyHeader+" is one value of 1 to "+strconv.Itoa(unread.MaxKey)+" bytes; leave it out, or mend it.")
			return change, false
		}
	}
	members, ok := readMembers(c, `{"by":"the user who did it"}`)
	if !ok {
		return change, false
	}
	if raw, given := members["by"]; given {
		var by *string
		err := json.Unmarshal(raw, &by)
		if err == nil && by == nil {
			err = errors.New("it is null")
		}
		if err == nil {
			err = checkUser(*by)
		}
		if err != nil {
			badRequest(c, `"by" is the id of a user`+because(err)+".")
			return change, false
		}
		user := g.userOf(*by)
		change.By = &user
	}
	return change, true
}

// readMembers reads a body that is a JSON object, or empty. When it cannot the
// answer has been written.
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

// done answers 204.
func done(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	c.Status(http.StatusNoContent)
	c.Writer.WriteHeaderNow()
}

func (g *Gateway) getFollows(c *gin.Context, who whose) {
	addVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := who(c)
	if !ok {
		return
	}
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		badRequest(c, "The query cannot be read: "+err.Error()+". Ask as ?after=page, percent-encoded.")
		return
	}
	var records []unread.Record
	if !g.carryOut(c, func(ctx context.Context) (err error) {
		records, err = g.cfg.Unread.Records(ctx, []unread.User{user})
		return err
	}) {
		return
	}
	pages := records[0].Pages() // sorted
	from, found := slices.BinarySearch(pages, query.Get("after"))
	if found {
		from++
	}
	pages = pages[from:]
	next := ""
	if len(pages) > listPages {
		pages = pages[:listPages]
		next = pages[listPages-1]
	}
	body := []byte(`{"follows":[`)
	for i, name := range pages {
		if i > 0 {
			body = append(body, ',')
		}
		body = presence.AppendString(body, name)
	}
	body = append(body, ']')
	if next != "" {
		body = append(body, `,"next":`...)
		body = presence.AppendString(body, next)
	}
	write(c, "application/json", append(body, "}\n"...))
}

func (g *Gateway) putFollow(c *gin.Context, who whose) {
	name, user, id, ok := g.followed(c, who)
	if !ok {
		return
	}
	members, ok := readMembers(c, `{"away_only":true}`)
	if !ok {
		return
	}
	away := false
	if raw, given := members["away_only"]; given {
		if err := json.Unmarshal(raw, &away); err != nil || string(raw) == "null" {
			badRequest(c, `"away_only" is true or false: whether changes while the user is on the page do not count.`)
			return
		}
	}
	if !g.admit(c, id) {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.followers.book.Follow(ctx, user, name, away) }) {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	done(c)
}

func (g *Gateway) deleteFollow(c *gin.Context, who whose) {
	name, user, _, ok := g.followed(c, who)
	if !ok {
		return
	}
	if !g.carryOut(c, func(ctx context.Context) error { return g.followers.book.Unfollow(ctx, user, name) }) {
		return
	}
	done(c)
}

// followed is the page of the path, and whose follow it is.
func (g *Gateway) followed(c *gin.Context, who whose) (name string, user unread.User, id Identity, ok bool) {
	if user, id, ok = who(c); ok {
		name, ok = page(c, presence.CheckPage)
	}
	return name, user, id, ok
}

func (g *Gateway) getUnread(c *gin.Context, who whose) {
	addVary(c.Writer.Header(), "Accept-Encoding")
	user, _, ok := who(c)
	if !ok {
		return
	}
	var count int64
	var updated time.Time
	if g.carryOut(c, func(ctx context.Context) (err error) {
		count, updated, err = g.followers.book.Unread(ctx, user)
		return err
	}) {
		writeUnread(c, count, updated)
	}
}

func (g *Gateway) putUnread(c *gin.Context, who whose) {
	user, id, ok := who(c)
	if !ok {
		return
	}
	if _, ok := readAction(c, "reset"); !ok || !g.admit(c, id) {
		return
	}
	var s unread.State
	if !g.carryOut(c, func(ctx context.Context) (err error) {
		s, err = g.followers.book.Reset(ctx, user)
		return err
	}) {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	count, updated := s.Unread(g.followers.alive)
	writeUnread(c, count, updated)
}

func writeUnread(c *gin.Context, count int64, updated time.Time) {
	body := strconv.AppendInt([]byte(`{"count":`), count, 10)
	body = append(body, `,"updated_at":`...)
	body = presence.AppendTime(body, updated)
	write(c, "application/json", append(body, "}\n"...))
}
