package api

import (
	"strings"
	"testing"
)

// Crawlers are recognized by their names in the User-Agent header.
func TestIsCrawler(t *testing.T) {
	for agent, want := range map[string]bool{
		"Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)":                               true,
		"Mozilla/5.0 (compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)":                                true,
		"Mozilla/5.0 AppleWebKit/537.36 (KHTML, like Gecko; compatible; GPTBot/1.2; +https://openai.com/gptbot)": true,
		"Mozilla/5.0 (compatible; Baiduspider/2.0; +http://www.baidu.com/search/spider.html)":                    true,
		"Mozilla/5.0 (Linux; Android 11) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0.0.0 Mobile " +
			"Safari/537.36 Chrome-Lighthouse": true,
		"Mozilla/5.0 (compatible; Yahoo! Slurp; http://help.yahoo.com/help/us/ysearch/slurp)": true,
		"facebookexternalhit/1.1 (+http://www.facebook.com/externalhit_uatext.php)":           true,
		"TelegramBot (like TwitterBot)":             true,
		"Twitterbot/1.0":                            true,
		"ClaudeBot":                                 true,
		strings.Repeat("x", 600) + " Googlebot/2.1": false, // no crawler's name is that long

		"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36": false,
		"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/156.0.0.0 " +
			"Safari/537.36": false,
		"Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) " +
			"Version/17.5 Mobile/15E148 Safari/604.1": false,
		"Mozilla/5.0 (Linux; Android 9; CUBOT_X19) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0.0.0 " +
			"Mobile Safari/537.36": false,
		"Mozilla/5.0 (Linux; Android 13; TECNO SPIDER) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0.0.0 " +
			"Mobile Safari/537.36": false,
		"Mozilla/5.0 (Linux; Android 13; Robot X1 Build/T) AppleWebKit/537.36 (KHTML, like Gecko) " +
			"Chrome/126.0.0.0 Mobile Safari/537.36": false,
		"Mozilla/5.0 (X11) Abbott/1.0 Talbots/2.0 Safari/537.36": false,
		"curl/8.9.1":                       false,
		"Go-http-client/1.1":               false,
		"python-requests/2.32.3":           false,
		"okhttp/4.12.0":                    false,
		"node":                             false,
		"":                                 false,
		"shop/1.0 (+https://shop.example)": false,
	} {
		if got := isCrawler(agent); got != want {
			t.Errorf("%.80q: %t, want %t", agent, got, want)
		}
	}
}
