package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/cmd/headcount/config"
	"headcount/cmd/headcount/flags"
	"headcount/counter"
	"headcount/gateway/identity"
	"headcount/internal/setting"
)

// read parses a command line over an environment and, when file is not empty, a file named by --config.
func read(t *testing.T, args []string, env map[string]string, file string) (config.Server, error) {
	t.Helper()
	if file != "" {
		args = append([]string{"--config", writeFile(t, file)}, args...)
	}

	var c commands
	_, err := program{
		args: args, environ: environ(env),
		stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{},
	}.parse(&c)

	return c.Serve.Config, err
}

func writeFile(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "headcount.json")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}

	return name
}

// defaults returns the settings that the contract promises for a plain `headcount`.
func defaults() config.Server {
	sites, err := identity.NewSites(nil)
	origins, oerr := identity.NewOrigins(nil)
	if err != nil || oerr != nil {
		panic(errors.Join(err, oerr))
	}

	return config.Server{
		Listen: ":8080", AdminListen: "127.0.0.1:8081", ClusterListen: "127.0.0.1:7946",
		Roles: []string{"gateway", "presence", "dispatcher"}, Region: "local", RegionStaleAfter: 5 * time.Minute,
		HeartbeatInterval: 2 * time.Second, PresenceTimeout: 7 * time.Second, LeaveGrace: 2 * time.Second,
		UpdateInterval: 250 * time.Millisecond, PingInterval: 15 * time.Second, PongTimeout: 5 * time.Second,
		WriteTimeout: 5 * time.Second, ShutdownTimeout: 30 * time.Second, LogLevel: "info",
		ACMEURL:   "https://acme-v02.api.letsencrypt.org/directory",
		JWTLeeway: time.Minute, CookieName: "headcount_id",
		PersistInterval: time.Second, ColdAfter: 24 * time.Hour, TraceEvery: 100, PageDays: 400,
		WebhookSettle: 5 * time.Second,
		Rules:         counter.BuiltinRules().For(sites.Names()), AllSites: sites, Origins: origins,
		Proxies: &identity.Proxies{},
	}
}

func TestDefaults(t *testing.T) {
	for _, args := range [][]string{nil, {"serve"}} {
		got, err := read(t, args, nil, "")
		if err != nil || !reflect.DeepEqual(got, defaults()) {
			t.Errorf("headcount %v:\n got %+v, %v\nwant %+v", args, got, err, defaults())
		}
	}
}

// hookSecret returns a secret of webhooks, made of 32 times this letter.
func hookSecret(letter string) string {
	return "whsec_" + base64.StdEncoding.EncodeToString([]byte(strings.Repeat(letter, 32)))
}

// A switch is a setting in every layer, and needs no value on the command line.
func TestSwitch(t *testing.T) {
	yes := map[string]string{"HEADCOUNT_COUNT_BOTS": "true"}
	no := []string{"--count-bots=false"}
	for name, tc := range map[string]struct {
		args []string
		env  map[string]string
		file string
		want bool
	}{
		"default":               {},
		"flag":                  {args: []string{"--count-bots"}, want: true},
		"file":                  {file: `{"count-bots":true}`, want: true},
		"environment over file": {env: yes, file: `{"count-bots":false}`, want: true},
		"flag over environment": {args: no, env: yes},
	} {
		if c, err := read(t, tc.args, tc.env, tc.file); err != nil || c.CountBots != tc.want {
			t.Errorf("%s: count-bots is %v, %v", name, c.CountBots, err)
		}
	}
}

// Every flag is the same setting in every layer, and an upper layer takes precedence over the lower ones.
func TestLayers(t *testing.T) {
	type Server = config.Server

	one := func(s string) []string { return []string{s} }
	for flag, tc := range map[string]struct {
		get     func(Server) any
		flag    []string // the values, one for each occurrence of the flag
		env     string
		file    string // JSON
		byFlag  any
		byEnv   any
		byFile  any
		another []string // other flags that the values need
	}{
		"listen": {
			get: func(c Server) any { return c.Listen }, flag: one(":1"), env: ":2", file: `":3"`, byFlag: ":1",
			byEnv: ":2", byFile: ":3",
		},
		"admin-listen": {
			get: func(c Server) any { return c.AdminListen }, flag: one(":1"), env: ":2", file: `":3"`, byFlag: ":1",
			byEnv: ":2", byFile: ":3",
		},
		"cluster-listen": {
			get: func(c Server) any { return c.ClusterListen }, flag: one(":1"), env: ":2", file: `":3"`, byFlag: ":1",
			byEnv: ":2", byFile: ":3",
		},
		"advertise": {
			get: func(c Server) any { return c.Advertise }, flag: one("h:1"), env: "h:2", file: `"h:3"`, byFlag: "h:1",
			byEnv: "h:2", byFile: "h:3",
		},
		"roles": {
			get: func(c Server) any { return c.Roles }, flag: []string{"presence,gateway", "dispatcher"},
			env: "dispatcher, gateway,presence", file: `["presence","dispatcher","gateway"]`,
			byFlag: []string{"presence", "gateway", "dispatcher"}, byEnv: []string{"dispatcher", "gateway", "presence"},
			byFile: []string{"presence", "dispatcher", "gateway"},
		},
		"region": {
			get: func(c Server) any { return c.Region }, flag: one("a"), env: "b", file: `"c"`, byFlag: "a", byEnv: "b",
			byFile: "c",
		},
		"region-stale-after": {
			get: func(c Server) any { return c.RegionStaleAfter }, flag: one("0"), env: "2s", file: `"3s"`,
			byFlag: time.Duration(0), byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"cluster-secret": {
			get: func(c Server) any { return c.ClusterSecrets }, flag: []string{"a,b", "-c"}, env: "d,e",
			file: `["f,g","h"]`, byFlag: []string{"a,b", "-c"}, byEnv: []string{"d", "e"}, byFile: []string{"f,g", "h"},
		},
		"id-secret": {
			get: func(c Server) any { return c.IDSecrets }, flag: one("a"), env: "b", file: `"c"`, byFlag: one("a"),
			byEnv: one("b"), byFile: one("c"),
		},
		"heartbeat-interval": {
			get: func(c Server) any { return c.HeartbeatInterval }, flag: one("1s"), env: "1100ms", file: `"1200ms"`,
			byFlag: time.Second, byEnv: 1100 * time.Millisecond, byFile: 1200 * time.Millisecond,
		},
		"presence-timeout": {
			get: func(c Server) any { return c.PresenceTimeout }, flag: one("8s"), env: "9s", file: `"10s"`,
			byFlag: 8 * time.Second, byEnv: 9 * time.Second, byFile: 10 * time.Second,
		},
		"leave-grace": {
			get: func(c Server) any { return c.LeaveGrace }, flag: one("0s"), env: "1s", file: `"3s"`,
			byFlag: time.Duration(0), byEnv: time.Second, byFile: 3 * time.Second,
		},
		"update-interval": {
			get: func(c Server) any { return c.UpdateInterval }, flag: one("10ms"), env: "20ms", file: `"30ms"`,
			byFlag: 10 * time.Millisecond, byEnv: 20 * time.Millisecond, byFile: 30 * time.Millisecond,
		},
		"delivery-budget": {
			get: func(c Server) any { return c.DeliveryBudget }, flag: one("1"), env: "2", file: `3`, byFlag: 1,
			byEnv: 2, byFile: 3,
		},
		"ping-interval": {
			get: func(c Server) any { return c.PingInterval }, flag: one("1s"), env: "2s", file: `"3s"`,
			byFlag: time.Second, byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"pong-timeout": {
			get: func(c Server) any { return c.PongTimeout }, flag: one("1s"), env: "2s", file: `"3s"`,
			byFlag: time.Second, byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"write-timeout": {
			get: func(c Server) any { return c.WriteTimeout }, flag: one("1s"), env: "2s", file: `"3s"`,
			byFlag: time.Second, byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"max-connections": {
			get: func(c Server) any { return c.MaxConnections }, flag: one("1"), env: "2", file: `"3"`, byFlag: 1,
			byEnv: 2, byFile: 3,
		},
		"max-connections-per-address": {
			get: func(c Server) any { return c.MaxPerAddress }, flag: one("1"), env: "2", file: `"3"`, byFlag: 1,
			byEnv: 2, byFile: 3,
		},
		"jwt-secret": {
			get: func(c Server) any { return c.JWTSecret }, flag: one("a,b"), env: "c,d", file: `"e,f"`, byFlag: "a,b",
			byEnv: "c,d", byFile: "e,f",
		},
		"jwks-url": {
			get: func(c Server) any { return c.JWKSURL }, flag: one("http://a"), env: "https://b/k", file: `"http://c"`,
			byFlag: "http://a", byEnv: "https://b/k", byFile: "http://c",
		},
		"jwt-leeway": {
			get: func(c Server) any { return c.JWTLeeway }, flag: one("0"), env: "2s", file: `"3s"`,
			byFlag: time.Duration(0), byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"cookie-name": {
			get: func(c Server) any { return c.CookieName }, flag: one("a"), env: "b", file: `"c"`, byFlag: "a",
			byEnv: "b", byFile: "c",
		},
		"api-key": {
			get: func(c Server) any { return c.APIKeys }, flag: []string{"a", "b"}, env: "c,d", file: `["e","f"]`,
			byFlag: []string{"a", "b"}, byEnv: []string{"c", "d"}, byFile: []string{"e", "f"},
		},
		"webhook-secret": {
			get: func(c Server) any { return c.WebhookSecrets }, flag: []string{hookSecret("a")},
			env: hookSecret("b") + "," + hookSecret("c"), file: `["` + hookSecret("d") + `"]`,
			byFlag: []string{hookSecret("a")}, byEnv: []string{hookSecret("b"), hookSecret("c")},
			byFile: []string{hookSecret("d")},
		},
		"webhook-settle": {
			get: func(c Server) any { return c.WebhookSettle }, flag: []string{"1s"}, env: "2s", file: `"3s"`,
			byFlag: time.Second, byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"site": {
			get: func(c Server) any { return c.Sites }, flag: []string{"a=http://a,http://b", "b=http://c"},
			env: "c=http://a, http://b, default=http://c", file: `["d=http://a","e=http://b"]`,
			byFlag: []string{"a=http://a,http://b", "b=http://c"},
			byEnv:  []string{"c=http://a,http://b", "default=http://c"}, byFile: []string{"d=http://a", "e=http://b"},
		},
		"allow-origins": {
			get: func(c Server) any { return c.AllowOrigins }, flag: one("http://a,http://b"), env: "http://c,http://d",
			file: `"http://e,*"`, byFlag: []string{"http://a", "http://b"}, byEnv: []string{"http://c", "http://d"},
			byFile: []string{"http://e", "*"},
		},
		"trusted-proxies": {
			get: func(c Server) any { return c.TrustedProxies }, flag: one("10.0.0.0/8,::1"), env: "10.1.0.0/16",
			file: `["::1/128","127.0.0.1"]`, byFlag: []string{"10.0.0.0/8", "::1"}, byEnv: one("10.1.0.0/16"),
			byFile: []string{"::1/128", "127.0.0.1"},
		},
		"shutdown-timeout": {
			get: func(c Server) any { return c.ShutdownTimeout }, flag: one("1s"), env: "2s", file: `"3s"`,
			byFlag: time.Second, byEnv: 2 * time.Second, byFile: 3 * time.Second,
		},
		"log-level": {
			get: func(c Server) any { return c.LogLevel }, flag: one("trace"), env: "debug", file: `"warn"`,
			byFlag: "trace", byEnv: "debug", byFile: "warn",
		},
		"otlp": {
			get: func(c Server) any { return c.OTLP }, flag: one("http://a"), env: "https://b/k", file: `"http://c"`,
			byFlag: "http://a", byEnv: "https://b/k", byFile: "http://c",
		},
		"trace-every": {
			get: func(c Server) any { return c.TraceEvery }, flag: one("1"), env: "2", file: `"3"`, byFlag: 1, byEnv: 2,
			byFile: 3,
		},
		"log-format": {
			get: func(c Server) any { return c.LogFormat }, flag: one("json"), env: "console", file: `"json"`,
			byFlag: "json", byEnv: "console", byFile: "json",
		},
	} {
		t.Run(flag, func(t *testing.T) {
			var equals, spaced []string // --flag=value, and --flag value
			for _, v := range tc.flag {
				equals = append(equals, "--"+flag+"="+v)
				spaced = append(spaced, "--"+flag, v)
			}

			// Each layer has the same setting, with another value.
			variable := "HEADCOUNT_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
			env := map[string]string{variable: tc.env}
			empty := map[string]string{variable: ""}
			file := `{"` + flag + `":` + tc.file + `}`

			base := defaults()
			for _, step := range []struct {
				layers string
				args   []string
				env    map[string]string
				file   string
				want   any
			}{
				{"flag over environment and file", equals, env, file, tc.byFlag},
				{"flag apart from its value", append([]string{"serve"}, spaced...), env, file, tc.byFlag},
				{"environment over file", nil, env, file, tc.byEnv},
				{"environment", nil, env, "", tc.byEnv},
				{"file", nil, nil, file, tc.byFile},
				{"file under an empty variable", nil, empty, file, tc.byFile},
				{"file with _", nil, nil, `{"` + strings.ReplaceAll(flag, "-", "_") + `":` + tc.file + `}`, tc.byFile},
				{
					"file without -", nil, nil, `{"` + strings.ReplaceAll(flag, "-", "") + `":` + tc.file + `}`,
					tc.byFile,
				},
				{"file with null", nil, nil, `{"` + flag + `":null}`, tc.get(base)},
				{"default", nil, empty, "", tc.get(base)},
			} {
				got, err := read(t, step.args, step.env, step.file)
				if err != nil {
					t.Errorf("%s: %v", step.layers, err)
				} else if !reflect.DeepEqual(tc.get(got), step.want) {
					t.Errorf("%s: got %#v, want %#v", step.layers, tc.get(got), step.want)
				}
			}
		})
	}
}

func TestConfigFileNamedByTheEnvironment(t *testing.T) {
	// Some editors write a byte order mark.
	got, err := read(t, nil, map[string]string{"HEADCOUNT_CONFIG": writeFile(t, "\ufeff"+`{"region":"eu"}`)}, "")
	if err != nil || got.Region != "eu" {
		t.Fatalf("got region %q, %v", got.Region, err)
	}
}

// refused lists settings that cannot work, by the reason. The error must name the flag of each.
var refused = map[string]struct {
	flag string
	args string // separated by spaces
	env  map[string]string
	file string
}{
	"presence-timeout under 3 heartbeats": {
		flag: "presence-timeout", args: "--presence-timeout 5999ms --leave-grace 1s",
	},
	"heartbeat so long that thrice overflows": {flag: "presence-timeout", args: "--heartbeat-interval 2000000h"},
	"a certificate without its key":           {flag: "tls-key", args: "--tls-cert c.pem"},
	"a key without its certificate":           {flag: "tls-cert", args: "--tls-key k.pem"},
	"a domain beside a certificate": {
		flag: "domain", args: "--tls-cert c.pem --tls-key k.pem --domain a.example.com --acme-dir d",
	},
	"a domain and no place for certificates": {flag: "acme-dir", args: "--domain a.example.com"},
	"an address for a domain":                {flag: "domain", args: "--domain 10.0.0.1 --acme-dir d"},
	"half of a domain":                       {flag: "domain", args: "--domain localhost --acme-dir d"},
	"a domain that no certificate can have":  {flag: "domain", args: "--domain my_host.example.com --acme-dir d"},
	"a domain with an empty part":            {flag: "domain", args: "--domain a..example.com --acme-dir d"},
	"a redirect to nothing":                  {flag: "http-redirect", args: "--http-redirect :80"},
	"a redirect that is no address": {
		flag: "http-redirect", args: "--domain a.example.com --acme-dir d --http-redirect 80",
	},
	"a redirect from where it leads to": {
		flag: "http-redirect", args: "--domain a.example.com --acme-dir d --http-redirect :80 --listen :80",
	},
	"an authority that is no URL": {
		flag: "acme-url", args: "--domain a.example.com --acme-dir d --acme-url here",
	},
	"a path without a slash":                {flag: "base-path", args: "--base-path live"},
	"a path that goes up":                   {flag: "base-path", args: "--base-path /live/.."},
	"a path that needs escapes":             {flag: "base-path", args: "--base-path /a%2Fb"},
	"leave-grace equal to presence-timeout": {flag: "leave-grace", args: "--leave-grace 7s"},
	"negative leave-grace":                  {flag: "leave-grace", args: "--leave-grace -1s"},
	"negative region-stale-after":           {flag: "region-stale-after", args: "--region-stale-after=-1s"},
	"heartbeat-interval 0":                  {flag: "heartbeat-interval", args: "--heartbeat-interval 0"},
	"heartbeat-interval too short": {
		flag: "heartbeat-interval", args: "--heartbeat-interval 3ns",
	},
	"presence-timeout negative": {flag: "presence-timeout", args: "--presence-timeout -7s"},
	"update-interval 0":         {flag: "update-interval", args: "--update-interval 0s"},
	"update-interval too short": {flag: "update-interval", args: "--update-interval 9ms"},
	"ping-interval 0":           {flag: "ping-interval", args: "--ping-interval 0"},
	"pong-timeout 0":            {flag: "pong-timeout", args: "--pong-timeout 0"},
	"write-timeout 0":           {flag: "write-timeout", args: "--write-timeout 0"},
	"shutdown-timeout 0":        {flag: "shutdown-timeout", args: "--shutdown-timeout 0"},
	"a duration without a unit": {flag: "update-interval", args: "--update-interval 250"},
	"a duration that is none": {
		flag: "ping-interval", env: map[string]string{"HEADCOUNT_PING_INTERVAL": "soon"},
	},
	"a switch that is none":        {flag: "count-bots", file: `{"count-bots":"x"}`},
	"a JSON number as a duration":  {flag: "update-interval", file: `{"update-interval":250}`},
	"roles apart without redis":    {flag: "roles", args: "--roles gateway"},
	"one role twice without redis": {flag: "roles", args: "--roles gateway,gateway,gateway"},
	"unknown role":                 {flag: "roles", args: "--roles gateway,presence,dispatcher,cook"},
	"no role":                      {flag: "roles", args: "--roles="},
	"no role in the file":          {flag: "roles", file: `{"roles":[]}`},
	"peer without redis":           {flag: "peer", args: "--peer eu=redis://h"},
	"peer without a name":          {flag: "peer", args: "--redis redis://127.0.0.1 --peer redis://h"},
	"peer with an empty name":      {flag: "peer", args: "--redis redis://127.0.0.1 --peer =redis://h"},
	"peer without a URL":           {flag: "peer", args: "--redis redis://127.0.0.1 --peer eu"},
	"peer with a URL that is none": {flag: "peer", args: "--redis redis://127.0.0.1 --peer eu=http://h"},
	"peer with the own region's name": {
		flag: "peer", args: "--redis redis://127.0.0.1 --region eu --peer eu=redis://h",
	},
	"peer twice": {
		flag: "peer", args: "--redis redis://127.0.0.1 --peer eu=redis://h --peer us=redis://h --peer eu=redis://i",
	},
	"redis is no URL":                  {flag: "redis", args: "--redis localhost:6379"},
	"redis is empty":                   {flag: "redis", args: "--redis="},
	"redis of another scheme":          {flag: "redis", args: "--redis http://h:6379"},
	"redis without a host":             {flag: "redis", args: "--redis redis://"},
	"redis with a bad port":            {flag: "redis", args: "--redis redis://h:70000"},
	"redis with a bad database":        {flag: "redis", args: "--redis redis://h/x"},
	"redis with an unknown option":     {flag: "redis", args: "--redis redis://h?colour=red"},
	"redis cluster with a bad address": {flag: "redis", args: "--redis redis://h?addr=i"},
	"redis cluster with a database":    {flag: "redis", args: "--redis redis://h/1?addr=i:1"},
	"redis sentinel without a master":  {flag: "redis", args: "--redis redis://h?master_name="},
	"region with a space":              {flag: "region", file: `{"region":"e u"}`},
	"region too long":                  {flag: "region", args: "--region " + strings.Repeat("x", 65)},
	"region with =":                    {flag: "region", args: "--region a=b"},
	"listen without a port":            {flag: "listen", args: "--listen localhost"},
	"admin-listen is bad":              {flag: "admin-listen", args: "--admin-listen 127.0.0.1"},
	"cluster-listen is bad":            {flag: "cluster-listen", args: "--cluster-listen [::1"},
	"advertise is bad":                 {flag: "advertise", args: "--advertise node-1"},
	"advertise without a port to dial": {flag: "advertise", args: "--advertise node-1:0"},
	"one address twice":                {flag: "listen", args: "--listen 127.0.0.1:8081"},
	"one address under two names":      {flag: "listen", args: "--listen localhost:8081"},
	"a wildcard over an address":       {flag: "listen", args: "--listen :8081"},
	"an address under a wildcard":      {flag: "listen", args: "--listen [::1]:8081 --admin-listen 0.0.0.0:8081"},
	"wildcard cluster-listen without advertise": {
		flag: "advertise", args: "--redis redis://h --cluster-listen :7946 --cluster-secret s",
	},
	"wildcard advertise": {
		flag: "advertise", args: "--redis redis://h --advertise 0.0.0.0:7946 --cluster-secret s",
	},
	"an empty secret": {flag: "cluster-secret", args: "--cluster-secret="},
	"an empty secret among others": {
		flag: "id-secret", env: map[string]string{"HEADCOUNT_ID_SECRET": "a,,b"},
	},
	"a cookie of no name":          {flag: "cookie-name", args: "--cookie-name a=b"},
	"a cookie on conditions":       {flag: "cookie-name", args: "--cookie-name __Host-id"},
	"a secret of white space":      {flag: "jwt-secret", file: `{"jwt-secret":" \n"}`},
	"an API key of white space":    {flag: "api-key", file: `{"api-key":["a","\n"]}`},
	"two API keys in one":          {flag: "api-key", file: `{"api-key":["a","b\nc"]}`},
	"an empty API key":             {flag: "api-key", file: `{"api-key":["a",""]}`},
	"an empty JWT secret":          {flag: "jwt-secret", args: "--jwt-secret="},
	"jwks-url of another scheme":   {flag: "jwks-url", args: "--jwks-url file:///keys"},
	"an issuer and no tokens":      {flag: "jwt-issuer", args: "--jwt-issuer a"},
	"an audience and no tokens":    {flag: "jwt-audience", args: "--jwt-audience a"},
	"jwks-url without a host":      {flag: "jwks-url", args: "--jwks-url https:///keys"},
	"an origin with a path":        {flag: "allow-origins", args: "--allow-origins https://example.org/"},
	"a webhook that is none":       {flag: "webhook", args: "--webhook page:p"},
	"a webhook of an unknown site": {flag: "webhook", args: "--webhook page@shop:p=http://r.test"},
	"a webhook twice": {
		flag: "webhook", args: "--webhook site=http://r.test --webhook site=http://r.test",
	},
	"a webhook without a secret": {flag: "webhook-secret", args: "--webhook site=http://r.test"},
	"a webhook's secret that is none": {
		flag: "webhook-secret", args: "--webhook-secret 0123456789abcdef0123456789abcdef",
	},
	"no time for webhooks to settle": {flag: "webhook-settle", args: "--webhook-settle 0s"},
	"a site without a name":          {flag: "site", args: "--site https://a.example"},
	"a site without origins":         {flag: "site", args: "--site shop="},
	"a site twice": {
		flag: "site", args: "--site a=https://a.example --site b=https://b.example --site a=https://c.example",
	},
	"an origin in two sites": {
		flag: "site", args: "--site a=https://a.example,https://b.example --site b=https://B.example:443",
	},
	"more sites than there may be": {flag: "site", args: manySites(101)},
	"an empty key of a site": {
		flag: "api-key", args: "--site shop=https://a.example --api-key shop:",
	},
	"a proxy that is no network":        {flag: "trusted-proxies", args: "--trusted-proxies 10.0.0.0/33"},
	"negative delivery-budget":          {flag: "delivery-budget", args: "--delivery-budget -1"},
	"delivery-budget that is no number": {flag: "delivery-budget", args: "--delivery-budget many"},
	"negative max-connections":          {flag: "max-connections", args: "--max-connections=-1"},
	"negative max-connections-per-address": {
		flag: "max-connections-per-address", args: "--max-connections-per-address=-1",
	},
	"max-connections-per-address that is none": {
		flag: "max-connections-per-address", env: map[string]string{"HEADCOUNT_MAX_CONNECTIONS_PER_ADDRESS": "few"},
	},
	"a fraction of a connection":        {flag: "max-connections", file: `{"max-connections":1.5}`},
	"unknown log level":                 {flag: "log-level", args: "--log-level loud"},
	"otlp of another scheme":            {flag: "otlp", args: "--otlp grpc://127.0.0.1:4317"},
	"trace-every of less than none":     {flag: "trace-every", args: "--trace-every -1"},
	"unknown log format":                {flag: "log-format", args: "--log-format xml"},
	"rules that are not there":          {flag: "counters", args: "--counters /nowhere/rules.json"},
	"rules that are a folder":           {flag: "counters", args: "--counters ."},
	"postgres of another scheme":        {flag: "postgres", args: "--postgres mysql://h/d"},
	"postgres with a bad port":          {flag: "postgres", args: "--postgres postgres://h:x/d"},
	"persist-interval 0":                {flag: "persist-interval", args: "--persist-interval 0s"},
	"cold-after that is none":           {flag: "cold-after", args: "--cold-after soon"},
	"cold-after under the interval":     {flag: "cold-after", args: "--persist-interval 1m --cold-after 59s"},
	"page-stats that are no time":       {flag: "page-stats", args: "--page-stats often"},
	"page-stats of half a minute":       {flag: "page-stats", args: "--page-stats 30s"},
	"a table of pages without postgres": {flag: "pages-table", args: "--pages-table blog/*"},
	"a table of a page that is none": {
		flag: "pages-table", args: "--postgres postgres://h/d --pages-table blog/\x01*",
	},
	"a table of pages with two stars": {
		flag: "pages-table", args: "--postgres postgres://h/d --pages-table b*/*",
	},
	"a table of no page":                       {flag: "pages-table", args: "--postgres postgres://h/d --pages-table="},
	"a private page that is none":              {flag: "private", args: "--private team/\x01* --api-key k"},
	"a public page that is none":               {flag: "public-top", args: "--public-top blog/\x01*"},
	"a key of Pusher's clients that is none":   {flag: "pusher-key", args: "--pusher-key a/b"},
	"a key that is a path of a page":           {flag: "pusher-key", args: "--pusher-key counter"},
	"a secret of back ends without a key":      {flag: "pusher-secret", args: "--pusher-secret 0123456789abcdef"},
	"a secret of back ends that is empty":      {flag: "pusher-secret", args: "--pusher-key k --pusher-secret="},
	"private pages for nobody":                 {flag: "private", args: "--private team/*"},
	"cache-reads of half a second":             {flag: "cache-reads", args: "--cache-reads 500ms"},
	"page-days of five years":                  {flag: "page-days", args: "--page-days 1826"},
	"page-days below 0":                        {flag: "page-days", args: "--page-days=-1"},
	"page-days that are a time":                {flag: "page-days", args: "--page-days 400d"},
	"page-stats of a year":                     {flag: "page-stats", args: "--page-stats 365d"},
	"last-seen that is no time":                {flag: "last-seen", args: "--last-seen long"},
	"last-seen of half a second":               {flag: "last-seen", args: "--last-seen 500ms"},
	"last-seen of more than a year":            {flag: "last-seen", args: "--last-seen 366d"},
	"last-seen below 0":                        {flag: "last-seen", args: "--last-seen=-1h"},
	"hot-rate, which is gone":                  {flag: "hot-rate", args: "--hot-rate 1000"},
	"negative hot-rate":                        {flag: "hot-rate", args: "--hot-rate -1"},
	"a value forgotten at the end":             {flag: "redis", args: "--redis"},
	"a value forgotten before a flag":          {flag: "redis", args: "--redis --region=eu"},
	"a file that is not there":                 {flag: "config", args: "--config /nowhere/headcount.json"},
	"a file that is a folder":                  {flag: "config", args: "--config ."},
	"a file with an unknown key":               {flag: "config", file: `{"updat-interval":"1s"}`},
	"a file with a key twice":                  {flag: "config", file: `{"region":"a","region":"b"}`},
	"a file with a key twice, spelt otherwise": {flag: "config", file: `{"log-level":"info","log_level":"warn"}`},
	"a file that names a file":                 {flag: "config", file: `{"config":"other.json"}`},
	"a file that is a list":                    {flag: "config", file: `[]`},
	"a file that ends early":                   {flag: "config", file: `{"region":"a"`},
	"a file that goes on":                      {flag: "config", file: `{"region":"a"} {}`},
	"a file that is too long": {
		flag: "config", file: `{"region":"` + strings.Repeat("a", 1<<20) + `"}`,
	},
	"a file with a number for a string": {flag: "region", file: `{"region":1}`},
	"a file with an object for a list":  {flag: "api-key", file: `{"api-key":{"a":1}}`},
	"a file with numbers in a list":     {flag: "api-key", file: `{"api-key":[1]}`},
}

func manySites(n int) string {
	var args strings.Builder
	for i := range n {
		fmt.Fprintf(&args, " --site s%d=https://s%d.example", i, i)
	}
	return args.String()
}

func TestRefusedSettings(t *testing.T) {
	for name, tc := range refused {
		t.Run(name, func(t *testing.T) {
			args := strings.Fields(tc.args)
			if tc.file != "" {
				args = append(args, "--config", writeFile(t, tc.file))
			}

			status, stdout, line := runWith(t, tc.env, nil, args...)
			if status != exitSettings || stdout != "" {
				t.Fatalf("status %d, stdout %q; want %d and nothing", status, stdout, exitSettings)
			}

			if !strings.HasPrefix(line, "headcount: --"+tc.flag+":") &&
				!strings.HasPrefix(line, "headcount: --"+tc.flag+" (from ") {
				t.Errorf("%q does not name --%s", line, tc.flag)
			}

			if strings.Count(line, "\n") != 1 || !strings.Contains(line, "; ") {
				t.Errorf("%q is not one line with the remedy after a semicolon", line)
			}
		})
	}
}

func TestRefusalsSayWhereTheValueIsFrom(t *testing.T) {
	_, err := read(t, nil, map[string]string{"HEADCOUNT_LEAVE_GRACE": "1h"}, "")
	if err == nil || !strings.HasPrefix(err.Error(), "--leave-grace (from HEADCOUNT_LEAVE_GRACE): ") {
		t.Errorf("got %v, want the flag and the variable named", err)
	}

	_, err = read(t, nil, nil, `{"leave-grace":"x"}`)
	if err == nil || !strings.HasPrefix(err.Error(), "--leave-grace (from the file of --config): ") {
		t.Errorf("got %v, want the flag and the file named", err)
	}
}

// These settings may be secrets, or contain secrets.
func TestRefusalsDoNotRepeatSecrets(t *testing.T) {
	const secret = "hunter2"
	for name, args := range map[string][]string{
		"redis password with #":    {"--redis", "redis://:" + secret + "#x@h"},
		"redis password with /":    {"--redis", "redis://:1/" + secret + "@h"},
		"redis password as a port": {"--redis", "redis://:" + secret + "/x@h"},
		"redis option":             {"--redis", "redis://h?db=" + secret},
		"sentinel password": {
			"--redis", "redis://h?master_name=m&password=" + secret + "&read_timeout=" + secret,
		},
		"peer without name":        {"--redis", "redis://127.0.0.1", "--peer", "redis://:" + secret + "@h"},
		"peer with a bad name":     {"--redis", "redis://127.0.0.1", "--peer", "redis://:" + secret + "=@h"},
		"peer with a bad URL":      {"--redis", "redis://127.0.0.1", "--peer", "eu=redis://:" + secret + "#@h"},
		"postgres":                 {"--postgres", "mysql://u:" + secret + "@h"},
		"postgres with a bad port": {"--postgres", "postgres://u:" + secret + "@h:x/d"},
		"jwks-url":                 {"--jwks-url", "ftp://u:" + secret + "@h"},
		"secret among others":      {"--cluster-secret", secret, "--cluster-secret", ""},
	} {
		if _, err := read(t, args, nil, ""); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: got %v, want an error without the secret", name, err)
		}
	}

	_, err := read(t, nil, nil, `{"jwt-secret":{"`+secret+`":1}}`)
	if err == nil || strings.Contains(err.Error(), secret) {
		t.Errorf("from a file: got %v, want an error without the secret", err)
	}
}

// Domains are compared with the names that clients send, so they are kept as those are.
func TestDomainsAreWrittenAsClientsDo(t *testing.T) {
	got, err := read(t, []string{"--domain", "Höflich.example,Counter.example.com.", "--acme-dir", "d"}, nil, "")
	want := []string{"xn--hflich-wxa.example", "counter.example.com"}
	if err != nil || !slices.Equal(got.Domains, want) {
		t.Errorf("got %q, %v; want %q", got.Domains, err, want)
	}
}

func TestAcceptedSettings(t *testing.T) {
	for name, args := range map[string]string{
		"exactly three heartbeats":           "--presence-timeout 6s",
		"leave-grace 0":                      "--leave-grace 0",
		"leave-grace just under the timeout": "--leave-grace 6999ms",
		"regions never stale":                "--region-stale-after 0",
		"any port": "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --cluster-listen " +
			"127.0.0.1:0",
		"any port of every address":       "--listen :0 --admin-listen 127.0.0.1:0",
		"one port of two addresses":       "--listen 127.0.0.2:8081",
		"roles in any order and twice":    "--roles dispatcher,presence,gateway,presence",
		"cluster addresses without redis": "--cluster-listen :7946 --advertise node-1:7946",
		"cluster secret without redis":    "--cluster-secret s --cluster-secret t",
		"names, IPv6, zones": "--listen [::1]:80 --admin-listen localhost:81 --cluster-listen " +
			"[fe80::1%eth0]:82",
		"days":                           "--cold-after 7d --persist-interval 1m --page-stats 31d --last-seen 30d",
		"no stats of pages":              "--page-stats 0",
		"no days of pages":               "--page-days 0",
		"private pages":                  "--private team/* --private board --jwt-secret s",
		"pages for a table":              "--postgres postgres://h/d --pages-table blog/* --pages-table front",
		"all pages for a table":          "--postgres postgres://h/d --pages-table *",
		"pages for the list of visitors": "--public-top blog/* --public-top news",
		"a list of all pages":            "--public-top * --api-key k",
		"crawlers and proxies":           "--count-bots --cache-reads 5s",
		"clients of Pusher":              "--pusher-key 0a1b2c-key_3",
		"back ends of Pusher": "--pusher-key k --pusher-secret 0123456789abcdef --pusher-secret " +
			"the-next-secret",
		"no crawlers":                       "--count-bots=false",
		"counters in a file and PostgreSQL": "--data-dir /data --postgres postgres://u:p@h:5432/d",
		"origins": "--allow-origins " +
			"https://*.example.org,http://localhost:3000,https://*.a.*.b:8443,http://[::1]:80," +
			"https://xn--bcher-kva.example,capacitor://localhost,*",
		"no origins":            "--allow-origins=",
		"proxies":               "--trusted-proxies 10.0.0.0/8,192.168.1.1,::1/128,fd00::1",
		"HS256 and keys by URL": "--jwt-secret s --jwks-url http://127.0.0.1:9000/keys",
		"below a path":          "--base-path /live/",
		"a certificate":         "--tls-cert c.pem --tls-key k.pem",
		"domains": "--domain a.example.com,b.example.com --acme-dir /acme --acme-email " +
			"me@example.com --http-redirect :80",
		"a domain and a data directory": "--domain a.example.com --data-dir /data --acme-url " +
			"http://127.0.0.1:14000/dir",
		"the last one of a single flag":       "--region a --region=b",
		"a secret that begins with two minus": "--id-secret --x",
	} {
		if _, err := read(t, strings.Fields(args), nil, ""); err != nil {
			t.Errorf("%s is refused: %v", name, err)
		}
	}
}

func TestValidateWithRedis(t *testing.T) {
	type Server = config.Server

	for name, tc := range map[string]struct {
		change func(*Server)
		flag   string // the setting that the error names; empty: accepted
	}{
		"loopback needs no secret": {func(c *Server) {}, ""},
		"loopback by name": {func(c *Server) {
			c.ClusterListen, c.Advertise = "localhost:1", "[::1]:1"
		}, ""},
		"a secret off loopback": {func(c *Server) {
			c.ClusterListen, c.ClusterSecrets = "10.0.0.1:1", []string{"s"}
		}, ""},
		"no secret off loopback": {func(c *Server) { c.ClusterListen = "10.0.0.1:1" }, "cluster-secret"},
		"a wildcard with advertise": {func(c *Server) {
			c.ClusterListen, c.Advertise, c.ClusterSecrets = ":1", "n:1", []string{"s"}
		}, ""},
		"a wildcard advertised on loopback": {func(c *Server) {
			c.ClusterListen, c.Advertise = "0.0.0.0:1", "127.0.0.1:1"
		}, "cluster-secret"},
		"roles apart": {func(c *Server) { c.Roles = []string{"presence"} }, ""},
		"admin on listen's default, apart": {
			func(c *Server) { c.Roles, c.AdminListen = []string{"presence"}, ":8080" }, "",
		},
		"admin on cluster-listen": {func(c *Server) { c.AdminListen = c.ClusterListen }, "cluster-listen"},
		"TLS, user, database":     {func(c *Server) { c.Redis = "rediss://u:p%23@h:6380/3?dial_timeout=3s" }, ""},
		"cluster":                 {func(c *Server) { c.Redis = "redis://h:1?addr=i:2&addr=[::1]:3" }, ""},
		"sentinel": {func(c *Server) {
			c.Redis = "redis://h:26379/1?master_name=m&addr=i:2&password=p"
		}, ""},
		"PostgreSQL too":   {func(c *Server) { c.Postgres = "postgres://h/d" }, ""},
		"a data directory": {func(c *Server) { c.DataDir = "/data" }, "data-dir"},
		"peers":            {func(c *Server) { c.Peers = []string{"eu=redis://h", "us=redis://i?addr=j:1"} }, ""},
	} {
		c := defaults()
		c.Redis = "redis://127.0.0.1:6379"
		tc.change(&c)

		err := c.Validate()
		var s *setting.Error
		if tc.flag == "" && err != nil || tc.flag != "" && (!errors.As(err, &s) || s.Name != tc.flag) {
			t.Errorf("%s: got %v, want it refused for %q", name, err, tc.flag)
		}
	}
}

// A mistake in the rules causes one line that names the rule, the field and the remedy.
func TestRulesOfCounters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "rules.json")
	for text, want := range map[string]string{
		`{"rules":[{"match":"a:*","kind":"exact","floor":-1,"ceiling":7,"public":["read"]},{"match":"u",` +
			`"kind":"unique"}]}`: "",
		`{"rules":[]}`: "",
		"\ufeff" + `{"rules":[{"match":"a","kind":"sum"}]}`: "", // some editors write a byte order mark
		`{"rules":[{"match":"a:*","kind":"sum","floor":0}]}`: `rule 1 ("a:*"): floor: a counter of kind sum has ` +
			`none; remove the field`,
		`{"rules":[{"match":"a","kind":"exact","floor":1}]}`: `floor: 1 excludes 0, with which a counter begins; ` +
			`write 0 or less`,
		`{"rules":[{"match":"a","kind":"some"}]}`:               `kind: "some" is not a kind; write sum`,
		`{"rules":[{"match":"a*b","kind":"sum"}]}`:              `match: bad match`,
		`{"rules":[{"kind":"sum"}]}`:                            `match: it is missing`,
		`{"rules":[{"match":"a","kind":"sum","colour":"red"}]}`: `colour: unknown field; a rule has match`,
		`{"rules":[{"match":"a","kind":"sum","stale":"x"}]}`:    `stale: "x" is not a duration; write one like`,
		`{"rule":[]}`: `the object has only "rules"`,
		`{"rules":[{"match":"a",` + "\n\n" + `"kind":"sum"}],}`: `want a string in quotes`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}

		cfg, err := read(t, []string{"--counters", path}, nil, "")
		if want == "" {
			if err != nil || len(cfg.Rules.All()) != strings.Count(text, "match") {
				t.Errorf("%s: got %v", text, err)
			}

			continue
		}

		if err == nil || !strings.HasPrefix(err.Error(), "--counters: "+path+": ") ||
			!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

func TestWarnings(t *testing.T) {
	c := defaults()
	if got := c.Warnings(); got != nil {
		t.Fatalf("the warnings for the defaults are %q", got)
	}
	if got := c.Open(); len(got) != 1 || !strings.HasPrefix(got[0], "--api-key is not set") {
		t.Fatalf("by default Open returns %q", got)
	}

	c.Listen = "127.0.0.1:8080"
	if got := c.Open(); got != nil {
		t.Fatalf("on the loopback Open returns %q, want nothing", got)
	}
	c.Listen, c.AdminListen = ":8080", "[::]:8081"
	c.Roles = []string{"presence"}
	if got := c.Open(); len(got) != 1 || !strings.HasPrefix(got[0], "--admin-listen can be reached") {
		t.Fatalf("for a presence node Open returns %q", got)
	}

	// Short secrets, and a variable that no setting has.
	long := strings.Repeat("x", 16)
	c.ClusterSecrets = []string{long, "short"}
	c.JWTSecret = "s"
	c.APIKeys = []string{long}
	c.Strangers = []string{"HEADCOUNT_COLOUR"}
	got := c.Warnings()
	if len(got) != 3 || !strings.HasPrefix(got[2], "HEADCOUNT_COLOUR ") ||
		!strings.HasPrefix(got[0], "--cluster-secret ") || !strings.HasPrefix(got[1], "--jwt-secret ") {
		t.Fatalf("the warnings are %q", got)
	}

	c = defaults()
	c.JWTSecret = long + "\n"
	c.APIKeys = []string{long + " "}
	c.Postgres = "postgres://u@h/d?schema=public&sslmode=disable&pgbouncer=true"
	got = c.Warnings()
	if len(got) != 4 || !strings.HasPrefix(got[2], "--postgres has ?pgbouncer=,") ||
		!strings.HasPrefix(got[3], "--postgres has ?schema=,") {
		t.Fatalf("for a URL of Prisma the warnings are %q", got)
	}

	if !strings.HasPrefix(got[0], "--jwt-secret begins or ends with white space") ||
		!strings.HasPrefix(got[1], "--api-key begins or ends") {
		t.Fatalf("for white space the warnings are %q", got)
	}

	// White space only causes a warning: the key works without it.
	c.Postgres = ""
	if err := c.Validate(); err != nil || !c.Keys.Has(long) {
		t.Errorf("an API key with white space at its end is refused: %v", err)
	}
}

// The program refuses a variable that is nearly the name of a setting, and warns of other unknown ones.
func TestVariablesOfNoSetting(t *testing.T) {
	env := map[string]string{
		"LISTEN": ":1", "HEADCOUNT_COLOUR": "red", "HEADCOUNT_EMPTY": "", "HEADCOUNT_API_KEY": strings.Repeat("x", 16),
		"HEADCOUNT_USERS":        "9", // a setting of simulate
		"HEADCOUNT_SERVICE_HOST": "10.0.0.1", "HEADCOUNT_SERVICE_PORT_HTTP": "80",
		"HEADCOUNT_PORT": "tcp://10.0.0.1:80", "HEADCOUNT_PORT_80_TCP_ADDR": "10.0.0.1",
	}

	if c, err := read(t, nil, env, ""); err != nil || !slices.Equal(c.Strangers, []string{"HEADCOUNT_COLOUR"}) {
		t.Errorf("the unknown variables are %q, %v; want HEADCOUNT_COLOUR", c.Strangers, err)
	}

	env["HEADCOUNT_API_KEYS"] = "y"
	_, err := read(t, nil, env, "")
	if err == nil || !strings.HasPrefix(err.Error(),
		"HEADCOUNT_API_KEYS is not the variable of any setting; write HEADCOUNT_API_KEY,") {
		t.Errorf("a misspelt variable gives %v", err)
	}

	_, err = read(t, nil, nil, `{"--listen":":1"}`)
	if err == nil || !strings.Contains(err.Error(), "without its leading dashes") {
		t.Errorf("a key with dashes gives %v", err)
	}
}

// The IPv6 address of a pod has no brackets, and is accepted.
func TestAdvertiseOfAPod(t *testing.T) {
	for given, want := range map[string]string{
		"fd00::1:7946": "[fd00::1]:7946", "fd00:1:2:3:4:5:6:7:7946": "[fd00:1:2:3:4:5:6:7]:7946",
		"[fd00::1]:7946": "[fd00::1]:7946", "10.0.0.1:7946": "10.0.0.1:7946", "fd00:1:2:3:4:5:6:7": "", "fd00::1:x": "",
	} {
		c, err := read(t, []string{
			"--redis=redis://h", "--cluster-secret=0123456789abcdef", "--advertise=" + given,
		}, nil, "")
		if err != nil && want != "" || err == nil && c.Advertise != want {
			t.Errorf("%s: %q, %v", given, c.Advertise, err)
		}
	}
}

func TestACertificateThatIsMissingIsASetting(t *testing.T) {
	c := config.Server{TLSCert: "nowhere", TLSKey: "nowhere"}
	_, err := openCertificates(&c, zerolog.Nop())
	if s := (*setting.Error)(nil); !errors.As(err, &s) || s.Name != "tls-cert" {
		t.Errorf("the error is %v, want one about tls-cert", err)
	}
}

// The flags of serve are those in the table of the contract, no more and no fewer.
func TestFlagsOfServe(t *testing.T) {
	want := strings.Fields(`listen admin-listen cluster-listen advertise roles redis region peer
		region-stale-after cluster-secret id-secret data-dir heartbeat-interval presence-timeout leave-grace
		update-interval delivery-budget ping-interval pong-timeout write-timeout max-connections
		max-connections-per-address jwt-secret jwks-url jwt-issuer jwt-audience jwt-leeway cookie-name api-key
		allow-origins trusted-proxies shutdown-timeout log-level log-format config counters postgres
		persist-interval cold-after hot-rate page-stats page-days last-seen cache-reads count-bots private
		public-top pages-table pusher-key pusher-secret otlp trace-every tls-cert tls-key http-redirect domain
		acme-url acme-email acme-dir base-path site webhook webhook-secret webhook-settle`)
	slices.Sort(want)

	if names := serveFlags(t); !slices.Equal(names, want) {
		t.Errorf("got  %q\nwant %q", names, want)
	}
}

// The help leaves out settings that seldom need a change. deploy/README.md describes these.
func TestHelpOfServe(t *testing.T) {
	code, help, _ := runCommand(t, nil, "serve", "--help")
	guide, err := os.ReadFile("../../deploy/README.md")
	if code != exitOK || err != nil {
		t.Fatalf("exit status %d, %v", code, err)
	}

	for _, name := range serveFlags(t) {
		shown := strings.Contains(help, " --"+name+"=") || strings.Contains(help, " --"+name+"\n") ||
			strings.Contains(help, " --"+name+" ")
		if !shown && !strings.Contains(string(guide), "`--"+name+"`") {
			t.Errorf("neither the help nor deploy/README.md has --%s", name)
		}
		if shown && name == "hot-rate" {
			t.Errorf("the help has --%s", name)
		}
	}
}

// serveFlags returns the flags of serve.
func serveFlags(t *testing.T) (names []string) {
	t.Helper()
	set := flags.Set{}
	set.Add(&commands{})
	for _, c := range set.Commands {
		if c.Name == "serve" {
			for _, f := range c.Flags {
				names = append(names, f.Name)
			}
		}
	}

	slices.Sort(names)
	return names
}

// The schema of the chart has each setting that a file may have, so that Helm refuses all others.
func TestSettingsOfTheChart(t *testing.T) {
	text, err := os.ReadFile("../../deploy/helm/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}

	var schema struct {
		Properties struct {
			Settings struct{ PropertyNames struct{ Enum []string } }
		}
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}

	want := slices.DeleteFunc(serveFlags(t), func(name string) bool { return name == "config" })
	if got := schema.Properties.Settings.PropertyNames.Enum; !slices.Equal(got, want) {
		t.Errorf("the schema has %q\nwant           %q", got, want)
	}
}

// The files in deploy/ name only settings that the program has.
func TestSettingsThatDeployNames(t *testing.T) {
	known := map[string]bool{"HEADCOUNT_PORT": true} // of compose.yaml itself
	for _, name := range serveFlags(t) {
		known["HEADCOUNT_"+strings.ToUpper(strings.ReplaceAll(name, "-", "_"))] = true
	}

	seen := 0
	for _, pattern := range []string{"*.yaml", "*.service", "helm/*.yaml", "helm/*/*.yaml"} {
		files, err := filepath.Glob(filepath.Join("../../deploy", pattern))
		if err != nil {
			t.Fatal(err)
		}

		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}

			for _, variable := range regexp.MustCompile(`HEADCOUNT_[A-Z_]*[A-Z]`).FindAllString(string(text), -1) {
				seen++
				if !known[variable] {
					t.Errorf("%s: the program has no setting %s", file, variable)
				}
			}
		}
	}

	// A pattern that finds nothing would prove nothing.
	if seen < 10 {
		t.Errorf("only %d settings were found", seen)
	}
}

// HEADCOUNT_SITE has the sites of a server. Other commands on the same machine see the variable, too, but must not take
// it for the site that they ask for.
func TestServerTheVariableOfSitesIsForTheServer(t *testing.T) {
	asked := make(chan string, 1)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Header.Get("Headcount-Site")
		_, _ = io.WriteString(w, "{}")
	}))
	defer s.Close()

	sites := []string{"HEADCOUNT_SITE=shop=https://shop.example,blog=https://blog.example"}
	for flag, want := range map[string]string{"--interval=1s": "", "--site=blog": "blog"} {
		var errs bytes.Buffer
		p := program{
			args: []string{"top", "--once", "--url=" + s.URL, flag}, environ: sites, stdout: io.Discard, stderr: &errs,
		}
		if status := p.run(); status != exitOK {
			t.Fatalf("%s: status %d, %s", flag, status, &errs)
		}

		if got := <-asked; got != want {
			t.Errorf("%s: the site %q, want %q", flag, got, want)
		}
	}

	var errs bytes.Buffer
	p := program{
		args: []string{"export", "--data-dir=" + t.TempDir()}, environ: sites, stdout: io.Discard, stderr: &errs,
	}

	// The export fails because there are no counters, and not because of the site.
	if status := p.run(); status != exitFailure || !strings.Contains(errs.String(), "no counters to export") {
		t.Errorf("export: status %d, %s", status, &errs)
	}
}
