// Package config has the settings of a server: which there are, what is refused, and what follows from them. It opens
// nothing but the file of rules, and dials nothing.
package config

import (
	"cmp"
	"slices"
	"time"

	"headcount/counter"
	"headcount/gateway/api"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/webhook"
)

// Server has the settings of a server; each field is a flag. Package flags fills it in, and Validate checks it before
// anything is dialled or opened.
//
// The type tag names the form of a value.
type Server struct {
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

	JWTSecret      string        `name:"jwt-secret" type:"secret" placeholder:"SECRET" group:"identity" help:"Verifies HS256 tokens. With it, or --jwks-url, users need a token that identifies them."`
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
func (c *Server) HasRole(role string) bool { return slices.Contains(c.Roles, role) }

// HasCounters reports whether this process owns counters, or serves them.
func (c *Server) HasCounters() bool {
	return c.HasRole(presence.RolePresence) || c.HasRole(presence.RoleGateway)
}

// KeptDays returns how many days of pages are kept; 0: none.
func (c *Server) KeptDays() int {
	// Days are folded from minutes.
	if c.KeptMinutes() == 0 {
		return 0
	}
	return c.PageDays
}

// KeptMinutes returns how long the minutes of pages are kept; 0: not at all.
func (c *Server) KeptMinutes() time.Duration {
	switch {
	// A pointer, because 0 that was given means something else than nothing given.
	case c.PageStats != nil:
		return *c.PageStats
	// In Redis each minute of each page costs a write, so minutes have to be asked for.
	case c.Redis != "":
		return 0
	}
	return 24 * time.Hour
}

// TopPages returns the pages that the list of the pages with the most users shows to visitors: without
// API keys all that are not private.
func (c *Server) TopPages() api.PublicTop {
	pages := c.PublicTop
	// With a key the operator means that not everybody may see everything.
	if len(pages) == 0 && len(c.APIKeys) == 0 {
		pages = []string{"*"}
	}
	return api.PublicTop{Pages: pages, Private: c.Private}
}

// AdvertiseAddr returns the address at which other processes reach this one.
func (c *Server) AdvertiseAddr() string { return cmp.Or(c.Advertise, c.ClusterListen) }
