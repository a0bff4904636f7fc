package main

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
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

// Config has the settings of `headcount serve`; each field is a flag. Package flags fills
// it in, and Validate checks it before anything is dialled or opened.
//
// The type tag names the form of a value.
type Config struct {
	Listen        string   `type:"text" placeholder:"ADDR" default:":8080" group:"addresses" help:"The address for visitors: WebSocket, server-sent events, counters and the demo page."`
	AdminListen   string   `type:"text" placeholder:"ADDR" default:"127.0.0.1:8081" group:"addresses" help:"The address for operators: metrics, health, readiness and profiles. Keep it private."`
	ClusterListen string   `type:"text" placeholder:"ADDR" default:"127.0.0.1:7946" group:"addresses" help:"The address for other processes of the cluster, TCP and UDP on the same port. It is opened only with --redis."`
	Advertise     string   `type:"text" placeholder:"ADDR" group:"addresses" help:"The address at which other processes reach this one. The default is --cluster-listen. Required when that is a wildcard."`
	Roles         []string `type:"list" placeholder:"ROLE,..." default:"gateway,presence,dispatcher" group:"cluster" help:"The roles of this process. Fewer than all three need --redis."`

	TLSCert   string   `name:"tls-cert" type:"text" placeholder:"FILE" group:"addresses" help:"The certificate of --listen, as PEM, with those of its authorities. Visitors then speak TLS and HTTP/2. A new file is loaded within a second."`
	TLSKey    string   `name:"tls-key" type:"text" placeholder:"FILE" group:"addresses" help:"The key of --tls-cert, as PEM."`
	Redirect  string   `name:"http-redirect" type:"text" placeholder:"ADDR" group:"addresses" help:"With TLS of its own: an address, such as :80, that sends visitors to https. The authority of --domain may check its proof there, too. The default is none."`
	Domains   []string `name:"domain" type:"list" placeholder:"NAME,..." group:"addresses" help:"Names of this server. It gets its certificates itself, by ACME: port 443 of these names must lead to --listen."`
	ACMEURL   string   `name:"acme-url" type:"text" placeholder:"URL" default:"https://acme-v02.api.letsencrypt.org/directory" group:"addresses" help:"The directory of the authority that issues the certificates of --domain. Its terms are accepted."`
	ACMEEmail string   `hidden:"" name:"acme-email" type:"text" placeholder:"ADDR" group:"addresses" help:"The address to which that authority may write."`
	ACMEDir   string   `name:"acme-dir" type:"text" placeholder:"DIR" group:"addresses" help:"The directory for the certificates of --domain and their keys. The default is acme in --data-dir. Several processes may share one."`

	BasePath string `name:"base-path" type:"text" placeholder:"PATH" group:"addresses" help:"The path below which everything is served, such as /live, for a proxy that shares its host with others and passes paths on as they are."`

	Redis            string        `type:"text" placeholder:"URL" group:"cluster" help:"The URL of Redis. A repeated ?addr= means Cluster, ?master_name= means Sentinel. Without --redis one process does everything, over an embedded store."`
	Region           string        `type:"text" placeholder:"NAME" default:"local" group:"cluster" help:"The name of this region."`
	Peers            []string      `name:"peer" type:"each" placeholder:"NAME=URL" group:"cluster" help:"Another region and the URL of its Redis. Repeatable. Every process of a region needs the same --peer flags."`
	RegionStaleAfter time.Duration `hidden:"" type:"span-or-0" placeholder:"TIME" default:"5m" group:"cluster" help:"How long a region may be silent before totals leave it out. 0 means that they never do."`

	ClusterSecrets []string `name:"cluster-secret" type:"each" placeholder:"SECRET" group:"identity" help:"Signs the messages between processes. Repeatable: the first one signs, all of them verify. Required with --redis unless the cluster addresses are loopback."`
	IDSecrets      []string `name:"id-secret" type:"each" placeholder:"SECRET" group:"identity" help:"Signs anonymous ids, and seals the key of the user hashes. Repeatable: the first one signs, all of them verify. To rotate, add the new one behind, everywhere, and then put it in front."`
	DataDir        string   `type:"text" placeholder:"DIR" group:"cluster" help:"The directory where the embedded store keeps follows, unread counts, counters and the secret of anonymous ids, and over a restart the users who are present. Without it all of this data ends with the process."`

	Counters        string        `type:"text" placeholder:"FILE" group:"counters" help:"A file with a JSON object of rules, which say what counters there are: {\"rules\":[...]}. Without it the built-in rules hold: views, votes, likes, visitors and stock."`
	Postgres        string        `type:"text" placeholder:"URL" group:"counters" help:"The URL of PostgreSQL, which keeps counters. Without it they are in --redis, in --data-dir, or in memory."`
	PagesTable      []string      `name:"pages-table" type:"each" placeholder:"PAGE" group:"counters" help:"With --postgres: a page, or a prefix and *, whose count is in the table headcount_pages, at most a second old, for your own SQL; * for all pages. Repeatable. Every process with the role dispatcher needs the same ones; with several regions give them to one region."`
	PersistInterval time.Duration `type:"days" placeholder:"TIME" default:"1s" group:"counters" help:"With --redis and --postgres: how long a change may be in Redis alone."`
	ColdAfter       time.Duration `hidden:"" type:"days" placeholder:"TIME" default:"24h" group:"counters" help:"With --redis and --postgres: a counter that nobody changed for this long is evicted from Redis. At least --persist-interval."`
	HotRate         int           `hidden:"" type:"number" placeholder:"N" group:"counters" help:"Gone; it is refused."`

	PageStats *time.Duration `type:"days-or-0" placeholder:"TIME" group:"counters" help:"How long the greatest count, the arrivals and the visitors of each minute of a page are kept, for /{page}/stats. From 1m to 31d; 0: they are not kept. The default is 24h, and 0 with --redis."`
	PageDays  int            `type:"number" placeholder:"N" default:"400" group:"counters" help:"How many days of a page are kept, for /{page}/stats?step=1d: the greatest and the mean count, the person-minutes, the arrivals and the visitors. At most 1500; 0: none. Without --page-stats there are none."`
	LastSeen  time.Duration  `type:"days-or-0" placeholder:"TIME" default:"0" group:"times" help:"How long it is remembered when a user was last here, such as 30d, of a million users at most. Servers with an API key may ask for it. From 1s to 365d; 0: it is not remembered."`

	HeartbeatInterval time.Duration `hidden:"" type:"span" placeholder:"TIME" default:"2s" group:"times" help:"The time between two heartbeats from a gateway to the presence nodes."`
	PresenceTimeout   time.Duration `type:"span" placeholder:"TIME" default:"7s" group:"times" help:"A user is gone after this long without a heartbeat. At least 3 heartbeats."`
	LeaveGrace        time.Duration `type:"span-or-0" placeholder:"TIME" default:"2s" group:"times" help:"A user stays counted for this long after a connection ended without a leave. Shorter than --presence-timeout; 0 is allowed."`
	UpdateInterval    time.Duration `type:"span" placeholder:"TIME" default:"250ms" group:"times" help:"The least time between two counts of one page to one subscriber. At least 10ms."`
	DeliveryBudget    int           `hidden:"" type:"number" placeholder:"N" group:"limits" help:"How many counts a gateway delivers per second before it updates its largest pages less often. 0 means a number that fits the cores."`
	PingInterval      time.Duration `type:"span" placeholder:"TIME" default:"15s" group:"times" help:"The time between two pings of a WebSocket, or two comments of an event stream."`
	PongTimeout       time.Duration `hidden:"" type:"span" placeholder:"TIME" default:"5s" group:"times" help:"How long a client may take to answer a ping."`
	WriteTimeout      time.Duration `hidden:"" type:"span" placeholder:"TIME" default:"5s" group:"times" help:"How long one write to a client may take."`
	MaxConnections    int           `type:"number" placeholder:"N" group:"limits" help:"How many connections a gateway accepts; further clients get 503. 0 means a number that fits the memory and the open files."`
	MaxPerAddress     int           `name:"max-connections-per-address" type:"number" placeholder:"N" default:"0" group:"limits" help:"How many connections one address may have, of IPv6 one /64; further clients of it get 503. Clients of --trusted-proxies count by their own address. 0 means any number, since many people share an address."`

	JWTSecret      string        `name:"jwt-secret" type:"text" placeholder:"SECRET" group:"identity" help:"Verifies HS256 tokens. With it, or --jwks-url, users need a token that identifies them."`
	JWKSURL        string        `name:"jwks-url" type:"text" placeholder:"URL" group:"identity" help:"The address of the public keys that verify RS256, ES256 and EdDSA tokens."`
	JWTIssuers     []string      `name:"jwt-issuer" type:"each" placeholder:"NAME" group:"identity" help:"The iss that tokens must have. Repeatable: any of them. Without it the issuer is not checked."`
	JWTAudiences   []string      `name:"jwt-audience" type:"each" placeholder:"NAME" group:"identity" help:"An aud that tokens must have. Repeatable: any of them. Without it the audience is not checked."`
	JWTLeeway      time.Duration `name:"jwt-leeway" hidden:"" type:"span-or-0" placeholder:"TIME" default:"1m" group:"identity" help:"How long before its nbf a token is valid, since the clock of its issuer may be ahead. 0: not before. Its exp has no leeway."`
	CookieName     string        `type:"text" placeholder:"NAME" default:"headcount_id" group:"identity" help:"The cookie that holds the anonymous id of a visitor. Servers on one host, on several ports or paths, need a name each, since browsers keep one cookie of a name for the whole host; all gateways of one server need the same. Visitors who have an id under the default name keep it."`
	APIKeys        []string      `name:"api-key" type:"each" placeholder:"[SITE:]KEY" group:"identity" help:"A key for calls from your servers and for the dashboard. With the name of a site and a colon in front it is for that site alone. Repeatable."`
	Sites          []string      `name:"site" type:"sites" placeholder:"NAME=ORIGIN,..." group:"identity" help:"A site and the origins of its pages, written as those of --allow-origins. Each site has users, pages and counters of its own. Repeatable; calls that belong to no site are for the first. Without it there is one site, default."`
	AllowOrigins   []string      `type:"list" placeholder:"ORIGIN,..." group:"identity" help:"Origins whose pages may use this server, as scheme://host[:port]. A * stands for one or more whole labels of the host; a lone * allows every origin. Without it only the server's own origin and those of --site are allowed."`
	Private        []string      `name:"private" type:"each" placeholder:"PAGE" group:"identity" help:"A page, or a prefix and *, that only servers with an API key may use, and users whose token has it in its claim pages. Repeatable."`
	PublicTop      []string      `name:"public-top" type:"each" placeholder:"PAGE" group:"identity" help:"A page, or a prefix and *, that the live list of the pages with the most users shows to visitors; * for all pages. Those of --private never are. Repeatable. Without it, with --api-key, only servers with a key get the list. Every process needs the same ones."`
	PusherKey      string        `type:"text" placeholder:"KEY" group:"identity" help:"Clients of Pusher with this app key may connect, to /app/KEY: a channel is a page, and whoever subscribes is counted there. Without it they may not."`
	PusherSecrets  []string      `name:"pusher-secret" type:"each" placeholder:"SECRET" group:"identity" help:"With --pusher-key: back ends that sign with this secret of the app, as Pusher's libraries do, may ask for its channels, and say that a page was modified, at /apps. Repeatable: any of them. Without it they may not."`
	TrustedProxies []string      `type:"list" placeholder:"CIDR,..." group:"identity" help:"Proxies whose X-Forwarded-For and X-Forwarded-Proto headers are believed."`

	CountBots  bool          `type:"switch" group:"limits" help:"Whether crawlers that are known by name count like people, as visitors and in public increments and memberships. They are served either way."`
	CacheReads time.Duration `type:"span-or-0" placeholder:"TIME" default:"0" group:"times" help:"For how many whole seconds proxies may answer GETs of counts, public counters, badges and stats themselves. 0 means that every GET comes here."`

	Webhooks       []string      `name:"webhook" type:"each" placeholder:"MATCH=URL" group:"webhooks" help:"Where to send events: page:PATTERN (occupied, vacated), page:PATTERN>100 (over it), page:PATTERN>peak (a new peak of the day), the same with site for the whole site, count:PATTERN@5s (each change of a count, but of a page at most one in 5s, the newest), user:PATTERN (online, offline), or counter:PATTERN>100. A pattern is a name, or a prefix and *. Of one site of several: page@SITE:PATTERN. Repeatable. Every process needs the same ones; with several regions give them to one region, but those of users and counters to each."`
	WebhookSecrets []string      `name:"webhook-secret" type:"each" placeholder:"SECRET" group:"webhooks" help:"Signs the messages to --webhook: whsec_ and 24 to 64 bytes as base64. Repeatable: all of them sign, so rotate by adding one. Required with --webhook."`
	WebhookSettle  time.Duration `type:"span" placeholder:"TIME" default:"5s" group:"webhooks" help:"How long a page must be empty, a user absent, or a count back at its threshold, before that is reported or another rise is, and how long a new peak may rise further before it is reported."`

	ShutdownTimeout time.Duration `type:"span" placeholder:"TIME" default:"30s" group:"times" help:"How long the server may take to ask its clients to reconnect elsewhere before it ends."`
	LogLevel        string        `type:"text" placeholder:"LEVEL" default:"info" group:"log" help:"trace, debug, info, warn or error."`
	OTLP            string        `name:"otlp" type:"text" placeholder:"URL" group:"log" help:"The collector that receives traces, over OTLP/HTTP with JSON, such as http://127.0.0.1:4318. Without it nothing is traced."`
	TraceEvery      int           `hidden:"" type:"number" placeholder:"N" default:"100" group:"log" help:"With --otlp: one of this many requests is traced. 0 means every request."`
	LogFormat       string        `hidden:"" type:"text" placeholder:"FORMAT" group:"log" help:"console or json. The default is console on a terminal, else json."`

	// The settings above as Validate has parsed them.
	Rules    *counter.Rules    `flag:"-"` // of Counters, for all sites
	AllSites *identity.Sites   `flag:"-"` // of Sites
	Keys     identity.SiteKeys `flag:"-"` // of APIKeys
	Origins  *identity.Origins `flag:"-"` // of AllowOrigins and Sites
	Proxies  *identity.Proxies `flag:"-"` // of TrustedProxies
	Hooks    []*webhook.Hook   `flag:"-"` // of Webhooks
	HookKeys [][]byte          `flag:"-"` // of WebhookSecrets

	Strangers []string `flag:"-"` // environment variables that look like settings but are not
}

var (
	allRoles   = []string{presence.RoleGateway, presence.RolePresence, presence.RoleDispatcher}
	logLevels  = []string{"trace", "debug", "info", "warn", "error"}
	logFormats = []string{"console", "json"}
)

// HasRole reports whether this process has the role.
func (c *Config) HasRole(role string) bool { return slices.Contains(c.Roles, role) }

// KeptDays returns how many days of pages are kept; 0: none.
func (c *Config) KeptDays() int {
	if c.KeptMinutes() == 0 {
		return 0
	}
	return c.PageDays
}

// KeptMinutes returns how long the minutes of pages are kept; 0: not at all.
func (c *Config) KeptMinutes() time.Duration {
	switch {
	case c.PageStats != nil:
		return *c.PageStats
	case c.Redis != "":
		return 0
	}
	return 24 * time.Hour
}

// publicTop returns the pages that the list of the pages with the most users shows to visitors: without
// API keys all that are not private.
func (c *Config) publicTop() api.PublicTop {
	pages := c.PublicTop
	if len(pages) == 0 && len(c.APIKeys) == 0 {
		pages = []string{"*"}
	}
	return api.PublicTop{Pages: pages, Private: c.Private}
}

// AdvertiseAddr returns the address at which other processes reach this one.
func (c *Config) AdvertiseAddr() string { return cmp.Or(c.Advertise, c.ClusterListen) }

// Validate checks everything that can be checked without dialling or opening anything, and
// returns the first *setting.Error. Single values are checked by the packages that use
// them; Validate itself checks flags that depend on each other.
func (c *Config) Validate() error {
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

func (c *Config) checkRoles() error {
	if len(c.Roles) == 0 {
		return setting.Errorf("roles", "no role is given; give one or more of %s", strings.Join(allRoles, ", "))
	}

	for _, role := range c.Roles {
		if !slices.Contains(allRoles, role) {
			return setting.Errorf("roles", "unknown role %q; the roles are %s", role, strings.Join(allRoles, ", "))
		}
	}

	for _, role := range allRoles {
		if c.Redis == "" && !c.HasRole(role) {
			return setting.Errorf("roles", "this process does not do %s, so it needs a store that it shares with "+
				"others; give --redis too, or all three roles", role)
		}
	}

	return nil
}

// address is an address that a process listens on, with its flag.
type address struct{ flag, addr string }

// addresses returns the addresses that this process listens on.
func (c *Config) addresses() []address {
	all := []address{{"admin-listen", c.AdminListen}}
	if c.HasRole(presence.RoleGateway) {
		all = append(all, address{"listen", c.Listen})
		if c.Redirect != "" {
			all = append(all, address{"http-redirect", c.Redirect})
		}
	}

	if c.Redis != "" {
		all = append(all, address{"cluster-listen", c.ClusterListen})
	}

	return all
}

func (c *Config) checkAddresses() error {
	for _, a := range []address{
		{"admin-listen", c.AdminListen}, {"listen", c.Listen}, {"cluster-listen", c.ClusterListen},
		{"http-redirect", c.Redirect},
	} {
		if _, _, err := setting.SplitAddress(a.addr); err != nil && a.addr != "" {
			return setting.Errorf(a.flag, "%q is not an address: %v; write host:port, such as 127.0.0.1:8080 or "+
				":8080", a.addr, err)
		}
	}

	if err := c.checkAdvertised(); err != nil {
		return err
	}

	if c.Redis != "" && setting.IsWildcard(c.AdvertiseAddr()) {
		return setting.Errorf("advertise", "other processes cannot dial the wildcard %q; give the host:port at "+
			"which they reach this one", c.AdvertiseAddr())
	}

	opened := c.addresses()
	for i, a := range opened {
		for _, b := range opened[:i] {
			if a.addr == b.addr && !strings.HasSuffix(a.addr, ":0") {
				return setting.Errorf(a.flag, "%q is also the address of --%s; give each its own port", a.addr, b.flag)
			}
		}
	}

	return nil
}

// checkAdvertised checks --advertise.
func (c *Config) checkAdvertised() error {
	if c.Advertise == "" {
		return nil
	}

	// $(POD_IP):7946, as manifests write it, has no brackets around an IPv6 address.
	if last := strings.LastIndex(c.Advertise, ":"); last > 0 {
		ip, err := netip.ParseAddr(c.Advertise[:last])
		if err == nil && ip.Is6() {
			c.Advertise = net.JoinHostPort(c.Advertise[:last], c.Advertise[last+1:])
		}
	}

	_, port, err := setting.SplitAddress(c.Advertise)
	if err != nil {
		return setting.Errorf("advertise", "%q is not an address: %v; write the host:port at which other processes "+
			"reach this one", c.Advertise, err)
	}
	if port == 0 {
		return setting.Errorf("advertise", "nobody can reach port 0; write the port at which other processes reach "+
			"--cluster-listen")
	}

	return nil
}

// cookieName has no prefix to which browsers attach conditions, such as __Host-.
var cookieName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)

// No segment of a basePath is empty, . or ..
var basePath = regexp.MustCompile(`^(/[A-Za-z0-9._~-]*[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)

func (c *Config) checkBasePath() error {
	c.BasePath = strings.TrimSuffix(c.BasePath, "/")
	if c.BasePath != "" && !basePath.MatchString(c.BasePath) {
		return setting.Errorf("base-path", "%q is not a path of plain letters and digits; write one like /live",
			c.BasePath)
	}

	return nil
}

func (c *Config) checkTimes() error {
	if c.UpdateInterval < 10*time.Millisecond {
		return setting.Errorf("update-interval", "%s is too short; give at least 10ms", c.UpdateInterval)
	}

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

	if c.CacheReads%time.Second != 0 {
		return setting.Errorf("cache-reads", "%s is no number of whole seconds; give 1s or more, or 0", c.CacheReads)
	}

	return node.CheckTimes(c.PresenceTimeout, c.HeartbeatInterval, c.LeaveGrace)
}

func (c *Config) checkRegions() error {
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

	if c.DataDir != "" {
		return setting.Errorf("data-dir", "with --redis everything is kept in Redis; carry the counters of %s over "+
			"(headcount export --data-dir %s | headcount import --redis URL), and leave --data-dir out", c.DataDir,
			c.DataDir)
	}
	return nil
}

// checkCounters checks the settings of counters, and reads the rules.
func (c *Config) checkCounters() error {
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

	rules, err := readRules(c.Counters)
	if err != nil {
		return err
	}

	c.Rules = rules.For(c.AllSites.Names())
	return nil
}

// checkPagesTable checks --pages-table.
func (c *Config) checkPagesTable() error {
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

// readRules returns the rules in the file of --counters, or the built-in rules without a file.
func readRules(path string) (*counter.Rules, error) {
	if path == "" {
		return counter.BuiltinRules(), nil
	}

	data, err := os.ReadFile(path)
	if err != nil {
		return nil, setting.Errorf("counters", "%v; name a file that can be read", err)
	}

	rules, err := counter.ParseRules(setting.WithoutMark(data))
	if err != nil {
		return nil, setting.Errorf("counters", "%s: %s",
			path, strings.TrimPrefix(err.Error(), counter.ErrRule.Error()+": "))
	}

	return rules, nil
}

// peerNames returns the names of the other regions.
func (c *Config) peerNames() []string {
	var names []string
	for _, peer := range c.Peers {
		name, _ := region.SplitPeer(peer)
		names = append(names, name)
	}

	return names
}

func (c *Config) checkAccess() error {
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

	if c.JWTSecret != "" && strings.TrimSpace(c.JWTSecret) == "" {
		return setting.Errorf("jwt-secret", "it is only white space; give a long random value, or leave it out")
	}

	if len(c.Private) > 0 && len(c.APIKeys) == 0 && c.JWTSecret == "" && c.JWKSURL == "" {
		return setting.Errorf("private", "nobody could use such a page; give --api-key, or --jwt-secret or "+
			"--jwks-url, too")
	}

	loopback := setting.IsLoopback(c.ClusterListen) && setting.IsLoopback(c.AdvertiseAddr())
	if c.Redis != "" && len(c.ClusterSecrets) == 0 && !loopback {
		return setting.Errorf("cluster-secret", "it is required with --redis when the cluster addresses are not "+
			"loopback; give every process the same long random value")
	}

	if c.JWKSURL != "" && !setting.IsWebURL(c.JWKSURL) {
		return setting.Errorf("jwks-url", "it is not an http or https URL; write https://host/path of the key set")
	}

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
func (c *Config) checkSites() (err error) {
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

func (c *Config) checkLog() error {
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

// Warnings returns sentences about settings that work but are unsafe.
func (c *Config) Warnings() []string {
	const minSecret = 16 // bytes; a shorter secret can be guessed from one signature
	short := func(s string) bool { return s != "" && len(s) < minSecret }

	var keys []string
	for _, key := range c.APIKeys {
		_, key = c.AllSites.SplitKey(key)
		keys = append(keys, key)
	}

	var out []string
	for _, s := range []struct {
		flag   string
		values []string
	}{{"cluster-secret", c.ClusterSecrets}, {"id-secret", c.IDSecrets}, {"jwt-secret", []string{c.JWTSecret}},
		{"api-key", keys},
		{"pusher-secret", c.PusherSecrets}} {
		if slices.ContainsFunc(s.values, short) {
			out = append(out, fmt.Sprintf("--%s is shorter than %d bytes and can be guessed; give a long random "+
				"value", s.flag, minSecret))
		}
	}

	if strings.TrimSpace(c.JWTSecret) != c.JWTSecret {
		out = append(out, "--jwt-secret begins or ends with white space, such as a newline; tokens signed with and "+
			"without it are taken: remove it")
	}

	padded := func(key string) bool { return strings.TrimSpace(key) != key }
	if slices.ContainsFunc(keys, padded) {
		out = append(out, "--api-key begins or ends with white space, such as a newline, which no header can; it "+
			"is ignored: remove it")
	}

	for _, name := range postgres.Ignored(c.Postgres) {
		out = append(out, "--postgres has ?"+name+"=, which only Prisma knows; it is ignored")
	}

	for _, name := range c.Strangers {
		out = append(out, name+" is not the variable of any setting and is ignored; remove it, or see headcount "+
			"serve --help")
	}

	return out
}

// Open returns sentences about parts of this process that every client that reaches it may use, which may be intended.
func (c *Config) Open() (out []string) {
	if c.HasRole(presence.RoleGateway) && len(c.APIKeys) == 0 && !setting.IsLoopback(c.Listen) {
		out = append(out, "--api-key is not set and other machines reach --listen: everybody may read the "+
			"dashboard, and none of your servers may call; give a long random value")
	}

	if c.JWKSURL != "" && len(c.JWTIssuers) == 0 && len(c.JWTAudiences) == 0 {
		out = append(out, "--jwks-url is given without --jwt-issuer and --jwt-audience: a token that its keys have "+
			"signed for any other application is taken, too; give what yours have")
	}

	if !setting.IsLoopback(c.AdminListen) {
		out = append(out, "--admin-listen can be reached from other machines, with metrics and profiles; make sure "+
			"that only operators can reach it")
	}

	return out
}
