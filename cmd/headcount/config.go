package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/redis/go-redis/v9"

	"headcount/gateway"
)

// Config holds the settings of `headcount serve`, one field a flag. It is
// filled by kong and checked by Validate before anything is dialled or opened.
//
// The type tag names how a value is read (see readers): "text" is one string,
// "list" is split at commas wherever it comes from, "each" is one value an
// occurrence of the flag and split at commas in the environment only, so that
// a secret may hold a comma on the command line and in the file.
type Config struct {
	Listen        string   `type:"text" placeholder:"ADDR" default:":8080" group:"addresses" help:"Public HTTP: WebSocket, server-sent events, counters, demo page."`
	AdminListen   string   `type:"text" placeholder:"ADDR" default:"127.0.0.1:8081" group:"addresses" help:"Metrics, health, readiness and profiles."`
	ClusterListen string   `type:"text" placeholder:"ADDR" default:"127.0.0.1:7946" group:"addresses" help:"Between nodes, TCP and UDP of the same number; opened only with --redis."`
	Advertise     string   `type:"text" placeholder:"ADDR" group:"addresses" help:"The address other nodes use; that of --cluster-listen unless given, required when that one is a wildcard."`
	Roles         []string `type:"list" placeholder:"ROLE,..." default:"gateway,presence,dispatcher" group:"cluster" help:"What this process does; fewer than all three need --redis."`

	Redis            string        `type:"text" placeholder:"URL" group:"cluster" help:"Redis URL; repeated ?addr= means Cluster, ?master_name= Sentinel. Without it an embedded store serves one process."`
	Region           string        `type:"text" placeholder:"NAME" default:"local" group:"cluster" help:"The name of this region."`
	Peers            []string      `name:"peer" type:"each" placeholder:"NAME=URL" group:"cluster" help:"Another region and its Redis; repeatable."`
	RegionStaleAfter time.Duration `type:"span" placeholder:"TIME" default:"5m" group:"cluster" help:"How long a region may be silent before totals leave it out; 0 means for ever."`

	ClusterSecrets []string `name:"cluster-secret" type:"each" placeholder:"SECRET" group:"identity" help:"Signs what nodes send each other; repeatable: the first signs, all verify. Required with --redis unless the cluster addresses are loopback."`
	IDSecrets      []string `name:"id-secret" type:"each" placeholder:"SECRET" group:"identity" help:"Signs anonymous ids and keys the user hashes; repeatable: the first signs, all verify, the last keys the hashes."`
	DataDir        string   `type:"text" placeholder:"DIR" group:"cluster" help:"Where the embedded store keeps what must survive a restart; in memory unless given."`

	HeartbeatInterval time.Duration `type:"span" placeholder:"TIME" default:"2s" group:"times" help:"Between two heartbeats of a gateway to the presence nodes."`
	PresenceTimeout   time.Duration `type:"span" placeholder:"TIME" default:"7s" group:"times" help:"Silence after which a user is gone; at least 3 heartbeats."`
	LeaveGrace        time.Duration `type:"span" placeholder:"TIME" default:"2s" group:"times" help:"How long a user stays counted after a connection ended without a leave; 0 allowed; under --presence-timeout."`
	UpdateInterval    time.Duration `type:"span" placeholder:"TIME" default:"250ms" group:"times" help:"Least time between two counts of one page to one subscriber; at least 10ms."`
	DeliveryBudget    int           `type:"number" placeholder:"N" group:"limits" help:"Deliveries a second of one gateway before the intervals of its largest pages grow; 0 means by cores."`
	PingInterval      time.Duration `type:"span" placeholder:"TIME" default:"15s" group:"times" help:"Between two pings of a WebSocket, or comments of an event stream."`
	PongTimeout       time.Duration `type:"span" placeholder:"TIME" default:"5s" group:"times" help:"How long a ping may stay unanswered."`
	WriteTimeout      time.Duration `type:"span" placeholder:"TIME" default:"5s" group:"times" help:"How long one write to a client may take."`
	MaxConnections    int           `type:"number" placeholder:"N" group:"limits" help:"Connections of one gateway before others get 503; 0 means by memory."`

	JWTSecret      string   `name:"jwt-secret" type:"text" placeholder:"SECRET" group:"identity" help:"Verifies HS256 tokens: who may say who they are."`
	JWKSURL        string   `name:"jwks-url" type:"text" placeholder:"URL" group:"identity" help:"Where the public keys of RS256, ES256 and EdDSA tokens are."`
	APIKeys        []string `name:"api-key" type:"each" placeholder:"KEY" group:"identity" help:"For calls from servers; repeatable."`
	AllowOrigins   []string `type:"list" placeholder:"ORIGIN,..." group:"identity" help:"scheme://host[:port], where * stands for one or more whole host labels; a lone * for everyone; the same origin unless given."`
	TrustedProxies []string `type:"list" placeholder:"CIDR,..." group:"identity" help:"Proxies whose X-Forwarded-For counts."`

	ShutdownTimeout time.Duration `type:"span" placeholder:"TIME" default:"30s" group:"times" help:"How long a drain may take."`
	LogLevel        string        `type:"text" placeholder:"LEVEL" default:"info" group:"log" help:"trace, debug, info, warn or error."`
	LogFormat       string        `type:"text" placeholder:"FORMAT" group:"log" help:"console or json; console on a terminal, else json, unless given."`
}

const (
	roleGateway    = "gateway"
	rolePresence   = "presence"
	roleDispatcher = "dispatcher"
)

var (
	allRoles   = []string{roleGateway, rolePresence, roleDispatcher}
	logLevels  = []string{"trace", "debug", "info", "warn", "error"}
	logFormats = []string{"console", "json"}
)

// HasRole tells whether this process does the role.
func (c *Config) HasRole(role string) bool { return slices.Contains(c.Roles, role) }

// AdvertiseAddr is the address other nodes use.
func (c *Config) AdvertiseAddr() string {
	if c.Advertise != "" {
		return c.Advertise
	}
	return c.ClusterListen
}

// settingError is a setting that cannot work. It never holds the value of a
// secret, nor of a URL, since a password may stand in it.
type settingError struct {
	flag    string // without dashes
	problem string // what is wrong, and the mend
}

func (e *settingError) Error() string { return "--" + e.flag + ": " + e.problem }

func refuse(flag, format string, args ...any) error {
	return &settingError{flag, fmt.Sprintf(format, args...)}
}

// Validate checks everything that can be checked without dialling or opening
// anything, and returns the first *settingError.
func (c *Config) Validate() error {
	for _, check := range []func() error{
		c.checkRoles, c.checkAddresses, c.checkTimes, c.checkRegions, c.checkSecrets, c.checkAccess, c.checkLimits, c.checkLog,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) checkRoles() error {
	if len(c.Roles) == 0 {
		return refuse("roles", "no role; give one or more of %s", strings.Join(allRoles, ", "))
	}
	for _, role := range c.Roles {
		if !slices.Contains(allRoles, role) {
			return refuse("roles", "unknown role %q; the roles are %s", role, strings.Join(allRoles, ", "))
		}
	}
	for _, role := range allRoles {
		if c.Redis == "" && !c.HasRole(role) {
			return refuse("roles", "without %s the roles are apart and need a shared store; give --redis too, or all three roles", role)
		}
	}
	return nil
}

func (c *Config) checkAddresses() error {
	type address struct{ flag, addr string }
	admin, public, cluster := address{"admin-listen", c.AdminListen}, address{"listen", c.Listen}, address{"cluster-listen", c.ClusterListen}
	for _, a := range []address{admin, public, cluster} {
		if _, _, err := splitAddr(a.addr); err != nil {
			return refuse(a.flag, "%q is no address: %v; write host:port, such as 127.0.0.1:8080 or :8080", a.addr, err)
		}
	}
	if c.Advertise != "" {
		if _, port, err := splitAddr(c.Advertise); err != nil {
			return refuse("advertise", "%q is no address: %v; write the host:port other nodes reach this one at", c.Advertise, err)
		} else if port == 0 {
			return refuse("advertise", "nobody can reach port 0; write the port of --cluster-listen as other nodes see it")
		}
	}
	opened := []address{admin} // what this process will listen on
	if c.HasRole(roleGateway) {
		opened = append(opened, public)
	}
	if c.Redis != "" {
		if isWildcard(c.AdvertiseAddr()) {
			if c.Advertise == "" {
				return refuse("advertise", "other nodes cannot dial the wildcard %q of --cluster-listen; give the host:port they reach this one at", c.ClusterListen)
			}
			return refuse("advertise", "other nodes cannot dial the wildcard %q; give the host:port they reach this one at", c.Advertise)
		}
		opened = append(opened, cluster)
	}
	for i, a := range opened {
		for _, b := range opened[:i] {
			if a.addr == b.addr && !strings.HasSuffix(a.addr, ":0") {
				return refuse(a.flag, "%q is the address of --%s already; give each its own port", a.addr, b.flag)
			}
		}
	}
	return nil
}

func (c *Config) checkTimes() error {
	for _, t := range []struct {
		flag string
		d    time.Duration
	}{
		{"heartbeat-interval", c.HeartbeatInterval}, {"presence-timeout", c.PresenceTimeout}, {"update-interval", c.UpdateInterval},
		{"ping-interval", c.PingInterval}, {"pong-timeout", c.PongTimeout}, {"write-timeout", c.WriteTimeout}, {"shutdown-timeout", c.ShutdownTimeout},
	} {
		if t.d <= 0 {
			return refuse(t.flag, "%s is not positive; give a duration such as 2s or 250ms", t.d)
		}
	}
	switch {
	case c.LeaveGrace < 0:
		return refuse("leave-grace", "%s is negative; give 0 or more", c.LeaveGrace)
	case c.RegionStaleAfter < 0:
		return refuse("region-stale-after", "%s is negative; give a duration, or 0 for never", c.RegionStaleAfter)
	case c.UpdateInterval < 10*time.Millisecond:
		return refuse("update-interval", "%s is too short; give at least 10ms", c.UpdateInterval)
	case c.PresenceTimeout/3 < c.HeartbeatInterval: // the product might overflow
		return refuse("presence-timeout", "%s is under 3 heartbeats of %s; raise it, or lower --heartbeat-interval", c.PresenceTimeout, c.HeartbeatInterval)
	case c.LeaveGrace >= c.PresenceTimeout:
		return refuse("leave-grace", "%s is not under the --presence-timeout of %s; lower it, or raise that", c.LeaveGrace, c.PresenceTimeout)
	}
	return nil
}

var regionName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

const regionRule = "1 to 64 letters, digits, _ and -"

func (c *Config) checkRegions() error {
	if !regionName.MatchString(c.Region) {
		return refuse("region", "%q is no region name; give %s", c.Region, regionRule)
	}
	if c.Redis != "" {
		if problem := redisProblem(c.Redis); problem != "" {
			return refuse("redis", "%s", problem)
		}
	}
	seen := map[string]bool{}
	for _, peer := range c.Peers {
		name, link, ok := strings.Cut(peer, "=")
		switch {
		case !ok || !regionName.MatchString(name): // what it is may be a URL with a password
			return refuse("peer", "one does not begin with a region's name; write name=redis-url, the name of %s", regionRule)
		case name == c.Region:
			return refuse("peer", "%q is this region's own name; name another region, or change --region", name)
		case seen[name]:
			return refuse("peer", "%q is given twice; give each region once", name)
		}
		if problem := redisProblem(link); problem != "" {
			return refuse("peer", "%q: %s", name, problem)
		}
		seen[name] = true
	}
	if c.DataDir != "" && c.Redis != "" {
		return refuse("data-dir", "it is the embedded store's, and with --redis everything is kept in Redis; leave one of the two out")
	}
	if len(c.Peers) > 0 && c.Redis == "" {
		return refuse("peer", "regions meet in their Redis; give --redis for this one too, or leave --peer out")
	}
	return nil
}

// peerNames are the names of the other regions.
func (c *Config) peerNames() []string {
	var names []string
	for _, peer := range c.Peers {
		name, _, _ := strings.Cut(peer, "=")
		names = append(names, name)
	}
	return names
}

func (c *Config) checkSecrets() error {
	for _, s := range []struct {
		flag   string
		values []string
	}{{"cluster-secret", c.ClusterSecrets}, {"id-secret", c.IDSecrets}, {"api-key", c.APIKeys}} {
		if slices.Contains(s.values, "") {
			return refuse(s.flag, "one is empty; give a long random value, or leave it out")
		}
	}
	if c.Redis != "" && len(c.ClusterSecrets) == 0 && !(isLoopback(c.ClusterListen) && isLoopback(c.AdvertiseAddr())) {
		return refuse("cluster-secret", "required with --redis on cluster addresses that are not loopback; give all nodes the same long random value")
	}
	if c.JWKSURL != "" {
		u, err := url.Parse(c.JWKSURL)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
			return refuse("jwks-url", "not an http or https URL; write https://host/path of the key set")
		}
	}
	return nil
}

func (c *Config) checkAccess() error {
	// The gateway knows what these mean; it names the setting and the mend.
	if _, err := gateway.NewOrigins(c.AllowOrigins); err != nil {
		return refuse("allow-origins", "%s", strings.TrimPrefix(err.Error(), "allow-origins: "))
	}
	if _, err := gateway.NewProxies(c.TrustedProxies); err != nil {
		return refuse("trusted-proxies", "%s", strings.TrimPrefix(err.Error(), "trusted-proxies: "))
	}
	return nil
}

func (c *Config) checkLimits() error {
	if c.DeliveryBudget < 0 {
		return refuse("delivery-budget", "%d is negative; give deliveries a second, or 0 for by cores", c.DeliveryBudget)
	}
	if c.MaxConnections < 0 {
		return refuse("max-connections", "%d is negative; give a number, or 0 for by memory", c.MaxConnections)
	}
	return nil
}

func (c *Config) checkLog() error {
	if !slices.Contains(logLevels, c.LogLevel) {
		return refuse("log-level", "unknown level %q; the levels are %s", c.LogLevel, strings.Join(logLevels, ", "))
	}
	if c.LogFormat != "" && !slices.Contains(logFormats, c.LogFormat) {
		return refuse("log-format", "unknown format %q; the formats are %s", c.LogFormat, strings.Join(logFormats, ", "))
	}
	return nil
}

// Warnings are settings that work but should not stay so.
func (c *Config) Warnings() []string {
	const least = 16 // bytes; shorter ones can be guessed from one signature
	short := func(s string) bool { return s != "" && len(s) < least }
	var out []string
	for _, s := range []struct {
		flag   string
		values []string
	}{{"cluster-secret", c.ClusterSecrets}, {"id-secret", c.IDSecrets}, {"jwt-secret", []string{c.JWTSecret}}, {"api-key", c.APIKeys}} {
		if slices.ContainsFunc(s.values, short) {
			out = append(out, fmt.Sprintf("--%s is under %d bytes and can be guessed; give a long random value", s.flag, least))
		}
	}
	return out
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?$`)

// splitAddr takes host:port apart. An empty host is a wildcard.
func splitAddr(addr string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		if ae := (*net.AddrError)(nil); errors.As(err, &ae) {
			err = errors.New(ae.Err)
		}
		return "", 0, err
	}
	if _, err := netip.ParseAddr(host); err != nil && host != "" && !hostName.MatchString(host) {
		return "", 0, errors.New("bad host")
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, errors.New("the port is not 0 to 65535")
	}
	return host, int(n), nil
}

func isWildcard(addr string) bool {
	host, _, _ := splitAddr(addr)
	ip, err := netip.ParseAddr(host)
	return host == "" || err == nil && ip.IsUnspecified()
}

func isLoopback(addr string) bool {
	host, _, _ := splitAddr(addr)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// redisProblem says what is wrong with a Redis URL, or nothing. It repeats
// nothing of the URL but the names of its options: a password may be anywhere
// in one that does not parse.
func redisProblem(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "redis" && u.Scheme != "rediss" || u.Hostname() == "" || u.Fragment != "" {
		return "not a Redis URL; write redis://[user:password@]host[:port][/database] (rediss:// for TLS), with special characters of the password percent-encoded"
	}
	if p := u.Port(); p != "" {
		if _, _, err := splitAddr(net.JoinHostPort("h", p)); err != nil {
			return "the port of the URL is not 0 to 65535; mend it"
		}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "the options after ? do not parse; percent-encode special characters"
	}
	for _, addr := range query["addr"] {
		if host, port, err := splitAddr(addr); err != nil || host == "" || port == 0 {
			return "an addr= in the URL is no address; write addr=host:port"
		}
	}
	switch {
	case query.Has("master_name"):
		if query.Get("master_name") == "" {
			return "master_name= in the URL is empty; name the master the Sentinels watch"
		}
		_, err = redis.ParseFailoverURL(raw)
	case query.Has("addr"):
		if db := strings.Trim(u.Path, "/"); db != "" && db != "0" {
			return "a cluster has only database 0; leave the path of the URL out"
		}
		_, err = redis.ParseClusterURL(raw)
	default:
		_, err = redis.ParseURL(raw)
	}
	if err != nil {
		return "the database or an option after ? of the URL is wrong; the path is a database number, and the options are those of go-redis"
	}
	return ""
}

// layers gives kong what the command line left open: the environment first,
// then the file of --config. Kong's own env tags would lose to a file.
type layers struct {
	lookup func(string) (string, bool) // the environment
	names  map[string]bool             // flags of all commands, for a forgotten value
	file   map[string]any              // by folded name; nil before it was read
	source map[string]string           // where a flag's value is from, when not from the command line
}

func envName(flag string) string {
	return "HEADCOUNT_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// env is the flag's variable. An empty one counts as not set, as compose files
// and charts leave them behind.
func (l *layers) env(flag string) (string, bool) {
	v, ok := l.lookup(envName(flag))
	return v, ok && v != ""
}

// Validate is kong's: nothing to check beside the values.
func (l *layers) Validate(*kong.Application) error { return nil }

// Resolve is kong's: the value of a flag that the command line left open, or
// nil.
func (l *layers) Resolve(ctx *kong.Context, parent *kong.Path, flag *kong.Flag) (any, error) {
	if flag.Name == "help" {
		return nil, nil
	}
	if v, ok := l.env(flag.Name); ok {
		l.source[flag.Name] = envName(flag.Name)
		if flag.Tag.Type == "each" { // the other lists split by themselves
			return splitList(v), nil
		}
		return v, nil
	}
	if err := l.read(ctx, parent.Flags); err != nil {
		return nil, err
	}
	v := l.file[fold(flag.Name)]
	if v != nil {
		l.source[flag.Name] = "the file of --config"
	}
	return v, nil
}

// read reads the file of --config once, when the command has that flag.
func (l *layers) read(ctx *kong.Context, flags []*kong.Flag) error {
	i := slices.IndexFunc(flags, func(f *kong.Flag) bool { return f.Name == "config" })
	if i < 0 || l.file != nil {
		return nil
	}
	path, _ := ctx.FlagValue(flags[i]).(string)
	if path == "" {
		path, _ = l.env("config")
	}
	l.file = map[string]any{}
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return refuse("config", "%v; name a file that can be read", err)
	}
	defer f.Close()
	values, err := readFile(f)
	if err != nil {
		return refuse("config", "%s: %v", path, err)
	}
	known := map[string]bool{}
	for _, flag := range flags {
		known[fold(flag.Name)] = flag.Name != "config" && flag.Name != "help"
	}
	for key, value := range values {
		name := fold(key)
		if !known[name] {
			return refuse("config", "%s: unknown key %q; use a flag's name without its leading dashes, such as \"update-interval\"", path, key)
		}
		if _, twice := l.file[name]; twice {
			return refuse("config", "%s: key %q is given twice; keep one", path, key)
		}
		l.file[name] = value
	}
	return nil
}

// readFile reads one JSON object of at most 1 MiB; a longer file is refused,
// since it is not settings. A key that stands twice is refused: the JSON
// package would silently take the last.
func readFile(r io.Reader) (map[string]any, error) {
	const most = 1 << 20
	limited := &io.LimitedReader{R: r, N: most + 1}
	dec := json.NewDecoder(limited)
	dec.UseNumber()
	values, err := readObject(dec)
	if limited.N <= 0 {
		return nil, errors.New("over 1 MiB; write settings only")
	}
	if err != nil {
		return nil, fmt.Errorf("%w; write one JSON object of settings", err)
	}
	return values, nil
}

func readObject(dec *json.Decoder) (map[string]any, error) {
	if t, err := dec.Token(); err != nil {
		return nil, notEOF(err)
	} else if t != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	values := map[string]any{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, notEOF(err)
		}
		key, _ := t.(string) // in an object the decoder returns nothing else here
		var value any
		if err := dec.Decode(&value); err != nil {
			return nil, notEOF(err)
		}
		if _, twice := values[key]; twice {
			return nil, fmt.Errorf("key %q is given twice", key)
		}
		values[key] = value
	}
	if _, err := dec.Token(); err != nil {
		return nil, notEOF(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("more after the JSON object")
	}
	return values, nil
}

func notEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON ends early")
	}
	return err
}

// fold makes update-interval, update_interval, updateInterval and
// updateinterval one name.
func fold(name string) string {
	return strings.ToLower(strings.NewReplacer("-", "", "_", "").Replace(name))
}

// splitList splits at commas and trims spaces; it keeps empty values, which
// "each" refuses and "list" drops.
func splitList(s string) []any {
	var out []any
	for v := range strings.SplitSeq(s, ",") {
		out = append(out, strings.TrimSpace(v))
	}
	return out
}

// reader turns one value of a setting into its field. The value is a string
// from the command line, the environment or a default, or anything JSON has
// from a file. The problem it returns never repeats the value: it may be a
// secret.
type reader func(value any, target reflect.Value) (problem string)

// readers are the types of Config's tags.
var readers = map[string]reader{
	"text": func(value any, target reflect.Value) string {
		s, ok := value.(string)
		switch {
		case !ok:
			return "not a string; write it in quotes"
		case s == "":
			return "empty; give a value, or leave it out"
		}
		target.SetString(s)
		return ""
	},
	"span": func(value any, target reflect.Value) string {
		s, ok := value.(string)
		if !ok { // a JSON number would be nanoseconds, which nobody means
			return "not a duration; write a string with its unit, such as \"250ms\" or \"2s\""
		}
		d, err := time.ParseDuration(s)
		if err != nil {
			return "not a duration; write a number with its unit, such as 250ms or 2s"
		}
		target.SetInt(int64(d))
		return ""
	},
	"number": func(value any, target reflect.Value) string {
		s, ok := value.(string)
		if n, isNumber := value.(json.Number); isNumber {
			s, ok = n.String(), true
		}
		n, err := strconv.Atoi(s)
		if !ok || err != nil {
			return "not a whole number; write one such as 10000"
		}
		target.SetInt(int64(n))
		return ""
	},
	"list": func(value any, target reflect.Value) string {
		return appendAll(value, target, func(s string) {
			for _, v := range splitList(s) {
				if v != "" {
					target.Set(reflect.Append(target, reflect.ValueOf(v)))
				}
			}
		})
	},
	"each": func(value any, target reflect.Value) string {
		return appendAll(value, target, func(s string) {
			target.Set(reflect.Append(target, reflect.ValueOf(s)))
		})
	},
}

func appendAll(value any, target reflect.Value, add func(string)) string {
	values, ok := value.([]any)
	if !ok {
		values = []any{value}
	}
	for _, v := range values {
		s, ok := v.(string)
		if !ok {
			return "not a list of strings; write one such as [\"a\", \"b\"]"
		}
		add(s)
	}
	return ""
}

// mapper is the reader as kong calls it. It takes the next token even when it
// begins with a dash, as a secret or a negative duration may, unless it is a
// flag: then the value was forgotten.
func (l *layers) mapper(read reader) kong.MapperFunc {
	return func(ctx *kong.DecodeContext, target reflect.Value) error {
		token := ctx.Scan.Pop()
		if token.IsEOL() {
			return refuse(ctx.Value.Name, "no value; write --%s=VALUE", ctx.Value.Name)
		}
		if s, ok := token.Value.(string); ok && token.Type == kong.UntypedToken && strings.HasPrefix(s, "--") {
			if name, _, _ := strings.Cut(s[2:], "="); l.names[name] {
				return refuse(ctx.Value.Name, "no value before --%s; write --%s=VALUE", name, ctx.Value.Name)
			}
		}
		if problem := read(token.Value, target); problem != "" {
			return refuse(ctx.Value.Name, "%s", problem)
		}
		return nil
	}
}
