package api

import (
	"net/http"
	"regexp"
	"slices"
	"strings"

	"zgo.at/isbot"
)

// IgnoredCrawler is the reason of Callers.Ignored for crawlers.
const IgnoredCrawler = "crawler"

// Crawler reports whether the client is a crawler that is not to be counted. A server with an API key is none.
func (w *Callers) Crawler(r *http.Request) bool {
	if w.CountBots || !isCrawler(r.UserAgent()) || w.IsServer(r) {
		return false
	}
	w.Ignored.WithLabelValues(IgnoredCrawler).Inc()
	return true
}

// named are crawlers and fetchers whose names isbot does not know, or finds by their address alone.
var named = []string{
	"Slurp", "facebookexternalhit", "Mediapartners-Google", "GoogleOther", "Google-InspectionTool", "Google-Read-Aloud",
	"ia_archiver",
	"Claude-User", "ChatGPT-User", "Slackbot", "WhatsApp/", "Embedly",
}

// boty is a name that calls itself a bot, a crawler or a spider. Phones are called Spider, and people Abbott.
var boty = regexp.MustCompile(`(?i)(?:bot|crawler|spider)(?:/|;| \(|$)`)

// people removes from a User-Agent what isbot takes for a sign of a bot, but programs of people have as well: the
// address of their homepage, an HTTP library, and a browser without a window.
var people = strings.NewReplacer("://", " ", "okhttp/", "", "WinInet", "", "HeadlessChrome/", "Chrome/")

// isCrawler reports whether a User-Agent is that of a crawler known by name, or calls itself a bot, crawler or spider.
func isCrawler(agent string) bool {
	if len(agent) > 512 {
		agent = agent[:512]
	}
	if slices.ContainsFunc(named, func(name string) bool { return strings.Contains(agent, name) }) {
		return true
	}
	// isbot looks no further at a name that is short or stands alone.
	switch isbot.UserAgent(people.Replace(agent) + " / by name") {
	case isbot.BotKnownBot:
		return true
	case isbot.BotBoty:
		return boty.MatchString(agent)
	}
	return false
}
