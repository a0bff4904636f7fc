package config

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"headcount/counter"
	"headcount/gateway/api"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/internal/postgres"
	"headcount/internal/redisconn"
	"headcount/internal/setting"
	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/presence/node"
	"headcount/presence/region"
	"headcount/webhook"
)

// Validate checks everything that can be checked without dialling or opening anything, and
// returns the first *setting.Error. Single values are checked by the packages that use
// them; Validate itself checks flags that depend on each other.
func (c *Server) Validate() error {
	// The order matters: sites are parsed before the counters and webhooks that refer to them.
	for _, check := range []func() error{
		c.checkRoles, c.checkAddresses, c.checkTimes, c.checkRegions, c.checkAccess, c.checkSites,
		c.checkLog, c.checkCounters, c.checkWebhooks, c.checkTLS, c.checkBasePath,
	} {
		if err := check(); err != nil {
			return err
		}
	}

	return nil
}

// cookieName has no prefix to which browsers attach conditions, such as __Host-.
var cookieName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)

// No segment of a basePath is empty, . or ..
var basePath = regexp.MustCompile(`^(/[A-Za-z0-9._~-]*[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

func (c *Server) checkBasePath() error {
	// With or without a slash at its end the same path is meant.
	c.BasePath = strings.TrimSuffix(c.BasePath, "/")
	if c.BasePath != "" && !basePath.MatchString(c.BasePath) {
		return setting.Errorf("base-path", "%q is not a path of plain letters and digits; write one like /live",
			c.BasePath)
	}

	return nil
}

func (c *Server) checkTimes() error {
	const leastInterval = 10 * time.Millisecond
	if c.UpdateInterval < leastInterval {
		return setting.Errorf("update-interval", "%s is too short; give at least %s", c.UpdateInterval, leastInterval)
	}
	// Heartbeats go in several rounds, so a shorter time would leave nothing between two of them.
	if c.HeartbeatInterval < leastInterval {
		return setting.Errorf("heartbeat-interval", "%s is too short; give at least %s", c.HeartbeatInterval,
			leastInterval)
	}

	// The default is within the bounds, so what is refused here was given.
	retention := c.KeptMinutes()
	if retention != 0 && (retention < time.Minute || retention > 31*24*time.Hour) {
		return setting.Errorf("page-stats", "%s is not from 1m to 31d; give a time in between, or 0 to keep "+
			"nothing", retention)
	}

	if c.PageDays > minutes.MaxPoints {
		return setting.Errorf("page-days", "%d is more than %d; give fewer, or 0 to keep none", c.PageDays,
			minutes.MaxPoints)
	}

	if c.LastSeen != 0 && (c.LastSeen < time.Second || c.LastSeen > 365*24*time.Hour) {
		return setting.Errorf("last-seen", "%s is not from 1s to 365d; give a time in between, or 0 to remember "+
			"nothing", c.LastSeen)
	}

	// max-age of HTTP has whole seconds.
	if c.CacheReads%time.Second != 0 {
		return setting.Errorf("cache-reads", "%s is no number of whole seconds; give 1s or more, or 0", c.CacheReads)
	}

	return node.CheckTimes(c.PresenceTimeout, c.HeartbeatInterval, c.LeaveGrace)
}

func (c *Server) checkRegions() error {
	if err := region.CheckNames(c.Region, c.Peers); err != nil {
		return err
	}

	if c.Redis == "" {
		if len(c.Peers) > 0 {
			return setting.Errorf("peer", "regions share their counts through Redis; give --redis too, or leave "+
				"--peer out")
		}
		return nil
	}

	if problem := redisconn.CheckURL(c.Redis); problem != "" {
		return setting.Errorf("redis", "%s", problem)
	}

	for _, peer := range c.Peers {
		name, link := region.SplitPeer(peer)
		if problem := redisconn.CheckURL(link); problem != "" {
			return setting.Errorf("peer", "%q: %s", name, problem)
		}
	}

	// Otherwise the directory would be ignored without a word, and its counters would seem lost.
	if c.DataDir != "" {
		return setting.Errorf("data-dir", "with --redis everything is kept in Redis; carry the counters of %s over "+
			"(headcount export --data-dir %s | headcount import --redis URL), and leave --data-dir out", c.DataDir,
			c.DataDir)
	}
	return nil
}

// checkCounters checks the settings of counters, and reads the rules.
func (c *Server) checkCounters() error {
	// It is still a setting, so that an operator who gives it reads why it went, and not only "unknown flag".
	if c.HotRate != 0 {
		return setting.Errorf("hot-rate", "it is gone, because sums are no longer split, however often they "+
			"change; leave it out")
	}
	if c.ColdAfter < c.PersistInterval {
		return setting.Errorf("cold-after", "%s is shorter than --persist-interval, %s: a counter leaves Redis "+
			"only when it is in PostgreSQL; give more", c.ColdAfter, c.PersistInterval)
	}

	if c.Postgres != "" {
		if problem := postgres.CheckURL(c.Postgres); problem != "" {
			return setting.Errorf("postgres", "%s", problem)
		}
	}

	if err := c.checkPagesTable(); err != nil {
		return err
	}

	rules, err := ReadRules(c.Counters)
	if err != nil {
		return err
	}

	// Each site has counters of its own, under the same rules.
	c.Rules = rules.For(c.AllSites.Names())
	return nil
}

// checkPagesTable checks --pages-table.
func (c *Server) checkPagesTable() error {
	for _, match := range c.PagesTable {
		if err := counter.CheckMatch(match); err != nil {
			return setting.Errorf("pages-table", "%q: %v; write a page, or a prefix and * such as blog/*",
				presence.Excerpt(match), err)
		}
	}

	if len(c.PagesTable) > 0 && c.Postgres == "" {
		return setting.Errorf("pages-table", "the table is in PostgreSQL; give --postgres, too, or leave it out")
	}

	return nil
}

// ReadRules returns the rules in the file of --counters, or the built-in rules without a file.
func ReadRules(path string) (*counter.Rules, error) {
	if path == "" {
		return counter.BuiltinRules(), nil
	}

	data, err := os.ReadFile(path)
	if err != nil {
		return nil, setting.Errorf("counters", "%v; name a file that can be read", err)
	}

	// Editors of Windows begin a file with a byte order mark, which is no JSON.
	rules, err := counter.ParseRules(setting.WithoutMark(data))
	if err != nil {
		return nil, setting.Errorf("counters", "%s: %s",
			path, strings.TrimPrefix(err.Error(), counter.ErrRule.Error()+": "))
	}

	return rules, nil
}

func (c *Server) checkAccess() error {
	for _, s := range []struct {
		flag    string
		matches []string
	}{{"private", c.Private}, {"public-top", c.PublicTop}} {
		for _, match := range s.matches {
			if err := api.CheckMatch(match); err != nil {
				return setting.Errorf(s.flag, "%q is no page and no prefix with a * behind it: %v", match, err)
			}
		}
	}

	if c.PusherKey != "" {
		if err := pusher.CheckKey(c.PusherKey); err != nil {
			return setting.Errorf("pusher-key", "%v; give another one", err)
		}
	}
	if len(c.PusherSecrets) > 0 && c.PusherKey == "" {
		return setting.Errorf("pusher-secret", "a back end signs with the key of its app, too; give --pusher-key, or "+
			"leave it out")
	}

	if !cookieName.MatchString(c.CookieName) {
		return setting.Errorf("cookie-name", "%q is not a name of 1 to 64 letters, digits, - and _ that begins "+
			"with a letter; write one like headcount_shop", c.CookieName)
	}

	// An empty file that was mounted as a secret looks like this; anybody could guess it.
	if c.JWTSecret != "" && strings.TrimSpace(c.JWTSecret) == "" {
		return setting.Errorf("jwt-secret", "it is only white space; give a long random value, or leave it out")
	}

	if len(c.Private) > 0 && len(c.APIKeys) == 0 && c.JWTSecret == "" && c.JWKSURL == "" {
		return setting.Errorf("private", "nobody could use such a page; give --api-key, or --jwt-secret or "+
			"--jwks-url, too")
	}

	// Both, because the advertised address is the one that others dial.
	loopback := setting.IsLoopback(c.ClusterListen) && setting.IsLoopback(c.AdvertiseAddr())
	if c.Redis != "" && len(c.ClusterSecrets) == 0 && !loopback {
		return setting.Errorf("cluster-secret", "it is required with --redis when the cluster addresses are not "+
			"loopback; give every process the same long random value")
	}

	if c.JWKSURL != "" && !setting.IsWebURL(c.JWKSURL) {
		return setting.Errorf("jwks-url", "it is not an http or https URL; write https://host/path of the key set")
	}

	// Who gives these believes that tokens are checked.
	if c.JWTSecret == "" && c.JWKSURL == "" {
		for _, s := range []struct {
			flag   string
			values []string
		}{{"jwt-issuer", c.JWTIssuers}, {"jwt-audience", c.JWTAudiences}} {
			if len(s.values) > 0 {
				return setting.Errorf(s.flag, "no tokens are taken; give --jwt-secret or --jwks-url, too, or leave "+
					"it out")
			}
		}
	}

	return nil
}

// checkSites parses and checks the sites, the origins, the proxies and the API keys.
func (c *Server) checkSites() (err error) {
	c.AllSites, err = identity.NewSites(c.Sites)
	if err != nil {
		return setting.Errorf("site", "%s", strings.TrimPrefix(err.Error(), "site: "))
	}

	c.Origins, err = identity.NewOrigins(slices.Concat(c.AllowOrigins, c.AllSites.Origins()))
	if err != nil {
		return setting.Errorf("allow-origins", "%s", strings.TrimPrefix(err.Error(), "allow-origins: "))
	}

	c.Proxies, err = identity.NewProxies(c.TrustedProxies)
	if err != nil {
		return setting.Errorf("trusted-proxies", "%s", strings.TrimPrefix(err.Error(), "trusted-proxies: "))
	}

	c.Keys, err = identity.NewSiteKeys(c.APIKeys, c.AllSites)
	if err != nil {
		return setting.Errorf("api-key", "%s", strings.TrimPrefix(err.Error(), "api-key: "))
	}

	return nil
}

func (c *Server) checkLog() error {
	if c.OTLP != "" && !setting.IsWebURL(c.OTLP) {
		return setting.Errorf("otlp", "it is not an http or https URL; write the address of the collector's OTLP "+
			"over HTTP, such as http://127.0.0.1:4318")
	}

	if !slices.Contains(logLevels, c.LogLevel) {
		return setting.Errorf("log-level", "unknown level %q; the levels are %s",
			c.LogLevel, strings.Join(logLevels, ", "))
	}

	if c.LogFormat != "" && !slices.Contains(logFormats, c.LogFormat) {
		return setting.Errorf("log-format", "unknown format %q; the formats are %s",
			c.LogFormat, strings.Join(logFormats, ", "))
	}

	return nil
}

// checkWebhooks parses and checks the webhooks.
func (c *Server) checkWebhooks() error {
	var err error
	if c.Hooks, err = webhook.Parse(c.Webhooks, c.AllSites.Names()); err != nil {
		return setting.Errorf("webhook", "%s", err)
	}

	c.HookKeys = nil
	for _, secret := range c.WebhookSecrets {
		key, err := webhook.ParseSecret(secret)
		if err != nil {
			return setting.Errorf("webhook-secret", "%s", err)
		}
		c.HookKeys = append(c.HookKeys, key)
	}

	if len(c.Hooks) > 0 && len(c.HookKeys) == 0 {
		return setting.Errorf("webhook-secret", "it is required with --webhook: receivers verify by it that this "+
			"server sent a message; make one by: echo whsec_$(openssl rand -base64 32)")
	}

	return nil
}
