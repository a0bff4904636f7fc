package api

import (
	"crypto/rand"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	maxLabel     = 40 // characters
	defaultLabel = "here now"
	letterWidth  = 7 // estimated width of a letter in a badge, in pixels
	badgePadding = 12

	styleExample = "?label=reading&color=06c"

	badgeColor      = "#06c"
	badgeBackground = "#444"
)

// display is what a badge or a widget shows.
type display struct {
	presence.Count
	Label      string
	Color      string // of the number; validated, like Background
	Background string
	Watch      bool   // the widget does not join the page
	Site       string // the name of the widget's site; empty: that of the server's own pages
	Read       bool   // the widget can only read, see getWidget
	Nonce      string // of the widget's style
}

// readDisplay parses what a badge or a widget should show.
func (a *API) readDisplay(c *gin.Context, color, background string) (s display, err error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	name, err := a.callers.Page(c, presence.CheckReadable, false)
	if err != nil {
		return s, err
	}
	if err := a.callers.Public(c); err != nil {
		return s, err
	}

	query := counterapi.ReadQuery(c, styleExample)
	s, err = readStyle(query, defaultLabel, color, background)
	if err != nil {
		return s, err
	}
	if err := a.admitPages(c, name); err != nil {
		return s, err
	}
	// Nobody can be on a total itself, so nobody joins it.
	s.Watch = query.Get("watch") == "1" || presence.KeyOf(name) == presence.AllPages

	counts, err := a.counts(c, name)
	if err != nil {
		return s, err
	}
	s.Count = counts[0]
	s.Page = presence.KeyOf(s.Page)

	return s, nil
}

// readStyle parses everything except the number.
func readStyle(query *counterapi.Query, label, color, background string) (s display, err error) {
	if query.Err != nil {
		return s, query.Err
	}

	s.Label = label
	if query.Has("label") {
		s.Label = query.Get("label")
	}
	if utf8.RuneCountInString(s.Label) > maxLabel || strings.ContainsFunc(s.Label, invisible) {
		const detail = `"label" has at most %d characters, and no control characters.`
		return s, calls.Bad(fmt.Sprintf(detail, maxLabel))
	}

	s.Color, err = readColour(query, "color", color)
	if err != nil {
		return s, err
	}
	s.Background, err = readColour(query, "background", background)

	return s, err
}

func readColour(query *counterapi.Query, name, otherwise string) (string, error) {
	given := query.Get(name)
	if given == "" {
		return otherwise, nil
	}

	colour, ok := parseColour(given)
	if !ok {
		return "", calls.Bad(`"` + name +
			`" is a colour: a name of CSS such as teal, or 3, 4, 6 or 8 hexadecimal digits such as 0066cc.`)
	}

	return colour, nil
}

// getBadge answers with the count as an image.
func (a *API) getBadge(c *gin.Context) (calls.Answer, error) {
	s, err := a.readDisplay(c, badgeColor, badgeBackground)
	if err != nil {
		return calls.Answer{}, err
	}
	a.callers.Cacheable(c, s.Page)

	return s.answerBadge(c), nil
}

// getCounterBadge answers with the value of a counter as an image. The default label is the key up to its first colon.
func (a *API) getCounterBadge(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")

	var s display
	value, err := a.parts.Counters.Value(c, func(key string) (err error) {
		label, _, _ := strings.Cut(key, ":")
		s, err = readStyle(counterapi.ReadQuery(c, styleExample), label, badgeColor, badgeBackground)
		return err
	})
	if err != nil {
		return calls.Answer{}, err
	}
	s.Users = value

	return s.answerBadge(c), nil
}

// getWidget answers with a page that any site may embed in a frame. The widget joins the page that it shows, unless the
// query has watch=1. It is one of the server's own pages, so it names its site if that is not the site of those pages.
// If the server's origin belongs to another site, the server's pages cannot act as visitors of the widget's site: then
// the widget only reads the event stream, which is public.
func (a *API) getWidget(c *gin.Context) (calls.Answer, error) {
	s, err := a.readDisplay(c, "inherit", "transparent")
	if err != nil {
		return calls.Answer{}, err
	}

	site := siteOf(c)
	secure := a.callers.Proxies.Secure(c.Request)
	if site != a.callers.Sites.Own(c.Request, secure) {
		s.Site = site.Name()
		s.Read = a.callers.Sites.Others(c.Request, secure, site)
	}

	// The colours are in an inline style, which only the nonce permits.
	s.Nonce = rand.Text()
	c.Header("Content-Security-Policy", "default-src 'self'; connect-src 'self' ws: wss:; "+
		"style-src 'self' 'nonce-"+s.Nonce+"'; object-src 'none'; frame-ancestors *; base-uri 'none'; form-action "+
		"'none'; "+
		"require-trusted-types-for 'script'; trusted-types 'none'")

	return calls.Packed(htmlType, s.widget()), nil
}

func (s display) answerBadge(c *gin.Context) calls.Answer {
	// The fonts of readers differ, so widths are estimates; textLength makes each text fit its own.
	right := len(s.users())*letterWidth + badgePadding
	left := 0
	label := ""
	if s.Label != "" {
		left = utf8.RuneCountInString(s.Label)*letterWidth + badgePadding
		label = `<text x="6" y="14" textLength="{leftText}">{label}</text>`
	}

	// A picture that is opened by itself is a document, which has nothing to load or to run.
	c.Header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	pixels := strconv.Itoa

	return calls.Packed("image/svg+xml", markup(`<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{users} {label}">
<title>{users} {label}</title>
<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)"><rect width="{left}" height="20" fill="{background}"/><rect x="{left}" width="{right}" height="20" fill="{color}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">`+label+`<text x="{at}" y="14" textLength="{rightText}">{users}</text></g>
</svg>
`, "users", s.users(), "label", s.Label, "color", s.Color, "background", s.Background,
		"width", pixels(left+right), "left", pixels(left), "right", pixels(right),
		"leftText", pixels(left-badgePadding), "rightText", pixels(right-badgePadding),
		"at", pixels(left+badgePadding/2)))
}

func (s display) widget() []byte {
	shown := `<span data-events="counter/events?site={site}">{users}</span>`
	if !s.Read {
		server := ""
		watch := ""
		if s.Site != "" {
			server = ` server="../?site={site}"`
		}
		if s.Watch {
			watch = " watch"
		}
		shown = `<script type="module" src="../-/headcount.js"></script>
<live-count page="{page}"` + server + watch + `>{users}</live-count>`
	}
	// The script of the title comes first, so that it misses no count.
	return markup(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{users} {label}</title>
<style nonce="{nonce}">body { margin: 0; padding: .25em .5em; font: 16px/1.5 system-ui, sans-serif; color: {color}; background: {background} }</style>
<script type="module" src="../-/widget.js"></script>
<main>`+shown+` {label}</main>
</html>
`, "users", s.users(), "label", s.Label, "page", s.Page, "site", url.QueryEscape(s.Site), "nonce", s.Nonce,
		"color", s.Color, "background", s.Background)
}

func (s display) users() string { return strconv.FormatInt(s.Users, 10) }
