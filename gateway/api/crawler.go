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

// Crawler reports whether the client is a crawler that is not to be counted. A server with an API key never is.
func (w *Callers) Crawler(r *http.Request) bool {
	if w.CountBots || !isCrawler(r.UserAgent()) || w.IsServer(r) {
		return false
	}
	w.Ignored.WithLabelValues(IgnoredCrawler).Inc()
	return true
}

// named are crawlers and fetchers that isbot does not know, or recognizes only by the address of their homepage.
var named = []string{
	"Slurp", "facebookexternalhit", "Mediapartners-Google", "GoogleOther", "Google-InspectionTool", "Google-Read-Aloud",
	"ia_archiver",
	"Claude-User", "ChatGPT-User", "Slackbot", "WhatsApp/", "Embedly",
}

// boty matches names that say bot, crawler or spider. It must not match phones called Spider or people called Abbott.
var boty = regexp.MustCompile(`(?i)(?:bot|crawler|spider)(?:/|;| \(|$)`)

// people removes parts of a User-Agent that isbot takes for signs of a bot, but that people's programs have as well:
// the address of their homepage, an HTTP library, and a headless browser.
var people = strings.NewReplacer("://", " ", "okhttp/", "", "WinInet", "", "HeadlessChrome/", "Chrome/")

// isCrawler reports whether a User-Agent is that of a crawler known by name, or calls itself a bot, crawler or spider.
func isCrawler(agent string) bool {
	// The client chooses the text, so the search has a bound.
	if len(agent) > 512 {
		agent = agent[:512]
	}
	if slices.ContainsFunc(named, func(name string) bool { return strings.Contains(agent, name) }) {
		return true
	}
	// The suffix is needed because isbot does not examine a name that is short or stands alone.
	switch isbot.UserAgent(people.Replace(agent) + " / by name") {
	case isbot.BotKnownBot:
		return true
	case isbot.BotBoty:
		return boty.MatchString(agent)
	}
	return false
}
