package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/cmd/headcount/certificates"
	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/local"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
)

// check runs `headcount check` and returns the lines that report faults.
func check(t *testing.T, args ...string) (status int, wrong []string, all string) {
	t.Helper()
	status, out, errs := runCommand(t, nil, append([]string{"check"}, args...)...)
	for line := range strings.Lines(out) {
		switch {
		case strings.HasPrefix(line, "wrong  "):
			wrong = append(wrong, strings.TrimSpace(line))
		case strings.HasPrefix(line, "fine   "):
		case strings.HasPrefix(line, "open   settings: "):
		default:
			t.Errorf("a line of the check reports neither a fault nor success: %q", line)
		}
	}

	return status, wrong, out + errs
}

// proxy is a proxy in front of a server. change, if not nil, changes the requests.
func proxy(t *testing.T, to string, change func(*httputil.ProxyRequest)) string {
	t.Helper()
	s := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = "http", to
		if change != nil {
			change(r)
		}
	}})
	t.Cleanup(s.Close)
	return s.URL
}

// buffering is a proxy that forwards an answer only when it is complete.
func buffering(t *testing.T, to string) string {
	t.Helper()
	s := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", to },
		ModifyResponse: func(r *http.Response) error {
			if r.StatusCode == http.StatusSwitchingProtocols {
				return nil
			}

			text, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(text))
			return err
		},
	})

	t.Cleanup(s.Close)
	return s.URL
}

// refusing is a proxy that refuses bodies over 64 KiB, as nginx does with client_max_body_size 64k.
func refusing(t *testing.T, to string) string {
	t.Helper()

	next := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = "http", to
		r.Out.Host = r.In.Host
	}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength > 64<<10 {
			http.Error(w, "<html>", http.StatusRequestEntityTooLarge)
			return
		}

		next.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)

	return s.URL
}

// fault is a case of the check. A case may have several faults at once, which shows that none of them hides another. A
// fault that would hide others has a case of its own.
type fault struct {
	args []string
	want []string // one text for each line about a fault; empty if all is well
	set  [][]any  // commands that change Redis first
}

// isFound runs the check, which must name each fault once and no other.
func (tc fault) isFound(t *testing.T) {
	t.Helper()

	args := slices.Clone(tc.args)
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--patience") }) {
		args = append(args, "--patience=3m") // the slowness of a machine must not count as a fault
	}

	status, wrong, all := check(t, args...)
	want := exitFailure
	if len(tc.want) == 0 {
		want = exitOK
	}

	if status != want || !eachOnce(wrong, tc.want) {
		t.Errorf("status %d, want %d and a line each with %q:\n%s", status, want, tc.want, all)
	}

	if strings.Contains(all, "hidden") {
		t.Errorf("the check shows a URL that holds a secret:\n%s", all)
	}
}

// stopped returns the settings of a server that does not run, at free addresses. The settings in more take precedence.
func stopped(more ...string) []string {
	return append([]string{
		"--admin-listen=" + servertest.FreeAddr(), "--listen=" + servertest.FreeAddr(),
		"--cluster-listen=" + servertest.FreeAddr(),
	}, more...)
}

// hooked is stopped with a webhook to each of the receivers.
func hooked(receivers ...string) []string {
	args := stopped("--webhook-secret=whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 32)))
	for _, url := range receivers {
		args = append(args, "--webhook=page:p="+url+"/hook?key=hidden")
	}

	return args
}

// receiver starts a receiver of webhooks that answers with the status. The check must not send it an event.
func receiver(t *testing.T, status int) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodHead || r.ContentLength > 0 {
			t.Errorf("the check sent %s and %d bytes to a receiver", r.Method, r.ContentLength)
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(s.Close)

	return s.URL
}

// takenAddr returns an address at which a program listens that does not answer.
func takenAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })

	return l.Addr().String()
}

// counters returns a data directory with counters. If held, a server uses it.
func counters(t *testing.T, held bool) (dir string) {
	t.Helper()
	dir = t.TempDir()
	store, err := local.Open(t.Context(), dir, counter.BuiltinRules(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	countertest.Fill(t, store, 1)

	if held {
		t.Cleanup(func() { _ = store.Close() })
	} else if err := store.Close(); err != nil {
		t.Fatal(err)
	}

	return dir
}

// file returns the path of a file with that name and content.
func file(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}

	return path
}

const days = 24 * time.Hour

// The check finds what is wrong on this machine, and with the receivers and keys that the settings name.
func TestServerCheckFindsFaults(t *testing.T) {
	t.Parallel()
	nobody := servertest.FreeAddr()
	missing := filepath.Join(t.TempDir(), "a")
	noDir := file(t, "file", "")
	broken := file(t, "counters.db", "no database")

	// Servers with a fault: without keys, with unusable keys, and with an unknown certificate.
	stranger := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(stranger.Close)

	unusable := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}`)
	}))
	t.Cleanup(unusable.Close)

	secured := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(secured.Close)

	for name, tc := range map[string]fault{
		"a directory to be made": {args: stopped("--data-dir=" + filepath.Join(missing, "data"))},
		"nobody answers": {
			args: stopped("--listen="+takenAddr(t), "--api-key=secret", "--redis=redis://"+nobody,
				"--postgres=postgres://u@"+nobody+"/d", "--pages-table=*", "--jwks-url="+stranger.URL),
			want: []string{
				"--api-key", "--listen: listen tcp ", "--redis: Redis does not answer",
				"--postgres: PostgreSQL does not let the server in", "--jwks-url",
			},
		},
		"receivers, keys of another kind, and nobody signed a certificate": {
			args: append(hooked(receiver(t, http.StatusMethodNotAllowed), "http://"+nobody, secured.URL,
				receiver(t, http.StatusMovedPermanently), receiver(t, http.StatusBadGateway)),
				"--jwks-url="+unusable.URL, "--public-url="+secured.URL),
			want: []string{
				"--webhook, number 2: " + nobody + " does not answer", "is not trusted here", "redirects (status 301)",
				"answers with status 502", "--jwks-url: none of its keys can verify a token",
				"no authority that this machine knows",
			},
		},
		"directories that are none, and a certificate for another name": {
			args: stopped("--data-dir="+filepath.Join(noDir, "data"), "--domain=counter.example.com",
				"--acme-dir="+filepath.Join(noDir, "acme"),
				"--public-url="+strings.Replace(secured.URL, "127.0.0.1", "localhost", 1)),
			want: []string{"--data-dir", "--acme-dir", "and not for localhost"},
		},
		"a directory in use": {
			args: stopped("--data-dir=" + counters(t, true)),
			want: []string{"in use by another process; end that one"},
		},
		"a damaged file": {args: stopped("--data-dir=" + filepath.Dir(broken)), want: []string{broken + ": "}},
	} {
		t.Run(name, tc.isFound)
	}

	if _, err := os.Stat(missing); err == nil {
		t.Error("the check left a directory behind")
	}

	status, _, all := check(t, "--public-url=count.example.com")
	if status != exitSettings || !strings.Contains(all, "--public-url") {
		t.Errorf("status %d, want %d with --public-url:\n%s", status, exitSettings, all)
	}
}

// The check finds what is wrong with PostgreSQL, and with the certificates and counters beside it.
func TestServerCheckFindsFaultsOfPostgres(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Start(t)
	of := func(program string) string {
		database := postgres.Database(t)
		postgres.Exec(t, database,
			"create table headcount_"+program+"_migrations as select 99 as version_id, true as is_applied")
		return database
	}

	readOnly, err := url.Parse(postgres.Database(t))
	if err != nil {
		t.Fatal(err)
	}

	q := readOnly.Query()
	q.Set("options", "-c default_transaction_read_only=on")
	readOnly.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20")

	now := time.Now()
	ended := certificateFor(t, now.Add(-90*days), now.Add(-days), "counter.example.com")
	good := certificateFor(t, now.Add(-time.Hour), now.Add(90*days), "counter.example.com")
	other := certificateFor(t, now.Add(-time.Hour), now.Add(90*days), "counter.example.com")

	for name, tc := range map[string]fault{
		"nothing": {
			args: append(stopped(good...), "--redis="+redistest.Start(t).URL(), "--postgres="+postgres.Database(t),
				"--pages-table=blog/*"),
		},
		"a certificate that ended, and newer tables": {
			args: append(stopped(ended...), "--postgres="+of("rows")),
			want: []string{"--tls-cert: the certificate ended on", "its tables are of version 99"},
		},
		"a newer table of pages, and counters that are hidden": {
			args: stopped("--postgres="+of("pages"), "--pages-table=*", "--data-dir="+counters(t, false)),
			want: []string{
				"its tables are of version 99", "has counters, which are not served with --postgres",
			},
		},
		"a key of another, and PostgreSQL takes nothing": {
			args: stopped(good[0], other[1], "--postgres="+readOnly.String()),
			want: []string{"; name the files of a certificate and its key", "accepts no changes"},
		},
	} {
		t.Run(name, tc.isFound)
	}
}

// The check finds what is wrong with Redis, and leaves nothing there.
func TestServerCheckFindsFaultsOfRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, "--maxmemory", "1gb")
	late := redistest.StartAt(t, -time.Hour)
	nobody := servertest.FreeAddr()
	taken := takenAddr(t)

	// user returns the URL for a user with all rights but some.
	user := func(name string, rights ...any) string {
		redis.Do(t, append([]any{"ACL", "SETUSER", name, "reset", "on", ">password", "&*", "+@all"}, rights...)...)
		return "redis://" + name + ":password@" + redis.Addr + "/0"
	}

	facts := func(pairs ...any) []any { return append([]any{"HSET", "hc:{c}:facts"}, pairs...) }
	lease := func(process string) []any {
		return []any{"HSET", "hc:{c}:leases", process, fmt.Sprint(time.Now().Add(time.Hour).UnixMilli(), " 1 gateway")}
	}

	for name, tc := range map[string]fault{
		"nothing":          {args: stopped("--redis=" + redis.URL())},
		"a wrong password": {args: stopped("--redis=redis://u:wrong@" + redis.Addr), want: []string{"password"}},
		"a right is missing": {
			args: stopped("--redis=" + user("a", "~*", "-pfmerge", "-xtrim")),
			want: []string{"may not send pfmerge, xtrim"},
		},
		"channels may not be used": {
			args: stopped("--redis=" + user("c", "~*", "resetchannels")), want: []string{"may not use channels"},
		},
		"keys may not be used": {
			args: stopped("--redis=" + user("b", "~other:*")), want: []string{"may not use keys"},
		},
		"a clock is wrong, and a peer is away": {
			args: stopped("--redis="+late.URL(), "--peer=eu=redis://"+nobody),
			want: []string{"clocks", "--peer eu: Redis does not answer"},
		},
		"Redis drops keys, no secret opens the key, and processes are not reached": {
			args: stopped("--redis=" + redis.URL()),
			set: [][]any{
				{"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}, facts("secret", "none", "seal:x", "00"),
				lease(nobody), lease(taken),
			},
			want: []string{
				"noeviction", "no --id-secret decrypts the key of user hashes; give", nobody + " has a lease",
				"is reached over TCP, but does not answer over UDP",
			},
		},
		"Redis of another region, with another secret and other formats": {
			args: append(hooked(receiver(t, http.StatusOK)), "--redis="+redis.URL(),
				"--cluster-secret=a secret that is long"),
			set: [][]any{facts("region", "eu", "secret", "x", "counters", "9", "webhooks", "9")},
			want: []string{
				`belongs to the region "eu"`, "--cluster-secret", `the counters in Redis are of format "9"`,
				`the webhooks' data in Redis is of format "9"`,
			},
		},
		"a peer is oneself, and others come somewhere else": {
			args: stopped("--redis="+redis.URL(), "--peer=eu="+redis.URL(), "--advertise="+taken),
			set:  [][]any{facts("region", "local")},
			want: []string{`--peer eu: this Redis belongs to the region "local"`, "--advertise"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			redis.Flush(t)
			redis.Do(t, "CONFIG", "SET", "maxmemory-policy", "noeviction")

			set := map[any]bool{} // the keys that the case itself sets
			for _, command := range tc.set {
				redis.Do(t, command...)
				if command[0] == "HSET" {
					set[command[1]] = true
				}
			}

			tc.isFound(t)

			if n := redis.Do(t, "DBSIZE").(int64); int(n) != len(set) {
				t.Errorf("after the check Redis has %d keys, want the %d of the case", n, len(set))
			}
		})
	}
}

// The check finds what a proxy does not pass on.
func TestServerCheckFindsFaultsOfProxies(t *testing.T) {
	t.Parallel()
	server := run(t)
	below := run(t, "--base-path=/live")
	private := run(t, "--private=*", "--api-key=a key that is long")

	stranger := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(stranger.Close)

	good := func(r *httputil.ProxyRequest) { r.Out.Host = r.In.Host }
	decoding := func(r *httputil.ProxyRequest) {
		good(r)
		r.Out.URL.RawPath = ""
	}

	behind := func(public string, more ...string) []string {
		return append([]string{"--admin-listen=" + server.admin, "--public-url=" + public}, more...)
	}

	for name, tc := range map[string]fault{
		"a good proxy": {args: behind(proxy(t, server.public, good))},
		"a good proxy, below a path": {args: []string{
			"--admin-listen=" + below.admin, "--base-path=/live/", "--public-url=" + proxy(t, below.public, good),
		}},
		"a good proxy, and every page is private": {args: []string{
			"--admin-listen=" + private.admin, "--public-url=" + proxy(t, private.public, good),
		}},
		"nobody at the address": {args: behind("http://" + servertest.FreeAddr()), want: []string{"nothing answers"}},
		"a stranger at the address": {
			args: behind(stranger.URL), want: []string{"something else than Headcount"},
		},
		"event streams are kept back": {
			args: behind(buffering(t, server.public), "--patience=3s"), want: []string{"holds event streams back"},
		},
		"large bodies are refused, and paths are decoded": {
			args: behind(refusing(t, strings.TrimPrefix(proxy(t, server.public, decoding), "http://"))),
			want: []string{"does not pass on a body of 256 KiB", "decodes %2F"},
		},
		"the server does not run": {
			args: stopped("--public-url=http://" + server.public),
			want: []string{"no server answers at --admin-listen"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.isFound(t)
		})
	}
}

// eachOnce reports whether each text is in a line, and there are no other lines.
func eachOnce(lines, texts []string) bool {
	for _, text := range texts {
		has := func(line string) bool { return strings.Contains(line, text) }
		if !slices.ContainsFunc(lines, has) {
			return false
		}
	}

	return len(lines) == len(texts)
}

// One fault does not hide another one.
func TestServerCheckFindsSeveralFaults(t *testing.T) {
	t.Parallel()
	server := run(t)
	public := proxy(t, server.public, func(r *httputil.ProxyRequest) {
		r.Out.Host = "inside"
		r.SetXForwarded()
		r.Out.Header.Del("Upgrade")
		r.Out.Header.Del("Connection")
	})

	_, wrong, all := check(t, "--admin-listen="+server.admin, "--api-key=short", "--public-url="+public,
		"--patience=3m")
	want := []string{
		"--api-key is shorter", "replaces the Host", "--trusted-proxies: the proxy at", "does not pass on the upgrade",
	}

	for i := range want {
		if len(wrong) != len(want) || !strings.Contains(wrong[i], want[i]) {
			t.Fatalf("want a line each with %q:\n%s", want, all)
		}
	}
}

// Running processes answer over UDP, too, if the check has their secret.
func TestServerCheckReachesProcesses(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	cluster := servertest.FreeAddr()
	const secret = "--cluster-secret=a secret that is long"
	run(t, "--redis", redis.URL(), "--cluster-listen", cluster, secret)

	args := []string{"--redis=" + redis.URL(), secret, "--patience=3m",
		"--admin-listen=" + servertest.FreeAddr(), "--listen=" + servertest.FreeAddr(),
		"--cluster-listen=" + servertest.FreeAddr()}

	status, _, all := check(t, args...)
	for _, want := range []string{
		cluster + " is reached over TCP and UDP", "and TCP and UDP to ", cluster + " owns 64 of 64 partitions",
	} {
		if status != exitOK || !strings.Contains(all, want) {
			t.Errorf("status %d, and the text lacks %q:\n%s", status, want, all)
		}
	}

	// As if the owner of a partition had ended.
	owned := redis.Do(t, "KEYS", "hc:{r*}:o").([]any)
	redis.Do(t, "HSET", owned[0], "owner", "10.0.0.1:7946/1")
	status, _, all = check(t, args...)
	if status != exitFailure || !strings.Contains(all, "1 of 64 partitions are of processes that have ended") {
		t.Errorf("with a partition of an ended process the status is %d:\n%s", status, all)
	}

	status, _, all = check(t, append(args, "--postgres=postgres://u@"+servertest.FreeAddr()+"/d")...)
	if status != exitFailure || !strings.Contains(all, "processes without --postgres use this Redis; end all of them") {
		t.Errorf("beside a process without PostgreSQL the status is %d:\n%s", status, all)
	}
}

// certificateFor returns the settings of a self-signed certificate.
func certificateFor(t *testing.T, from, until time.Time, host string) []string {
	t.Helper()
	c, err := servertest.NewCertificate(t.TempDir(),
		&x509.Certificate{NotBefore: from, NotAfter: until, DNSNames: []string{host}})
	if err != nil {
		t.Fatal(err)
	}
	return []string{"--tls-cert=" + c.File, "--tls-key=" + c.Key}
}

// A browser shows an international name as it is read, and sends it in its xn-- form, which certificates have, too.
func TestPublicURLIsWrittenAsBrowsersSendIt(t *testing.T) {
	for given, want := range map[string]string{
		"https://Höflich.example:8443/": "https://xn--hflich-wxa.example:8443/",
		"https://count.example.com":     "https://count.example.com",
		"http://localhost:8080":         "http://localhost:8080",
		"http://[::1]:8080":             "http://[::1]:8080",
	} {
		var c commands
		_, err := program{args: []string{"check", "--public-url", given}}.parse(&c)
		if err != nil || c.Check.PublicURL != want {
			t.Errorf("%s: got %s, %v; want %s", given, c.Check.PublicURL, err, want)
		}
	}
}

// The check reports what visitors would object to in a chain of certificates.
func TestServerChainsOfCertificates(t *testing.T) {
	a := newAuthority(t, "counter.example.com", nil)
	key, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	now := time.Now()
	between := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		Subject: pkix.Name{CommonName: "between"},
	}, a.root, a.key.Public())

	leaf := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(3), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		DNSNames: []string{"counter.example.com"},
	}, between, key.Public())

	// In all cases but one this machine trusts the root.
	roots, others := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(a.root)

	for name, tc := range map[string]struct {
		chain []*x509.Certificate
		host  string
		roots *x509.CertPool
		now   time.Time
		want  string
	}{
		"all is well":            {[]*x509.Certificate{leaf, between}, "counter.example.com", roots, now, ""},
		"one between is missing": {[]*x509.Certificate{leaf}, "counter.example.com", roots, now, "comes alone"},
		"nobody knows it": {
			[]*x509.Certificate{leaf, between}, "counter.example.com", others, now,
			"no authority that this machine knows",
		},
		"another host": {
			[]*x509.Certificate{leaf, between}, "example.com", roots, now,
			"is for counter.example.com, and not for example.com",
		},
		"too old": {
			[]*x509.Certificate{leaf, between}, "counter.example.com", roots, now.Add(2 * time.Hour), "ended on",
		},
		"nearly too old": {
			[]*x509.Certificate{leaf, between}, "counter.example.com", roots, now.Add(50 * time.Minute),
			"should have been renewed",
		},
		"too young": {
			[]*x509.Certificate{leaf, between}, "counter.example.com", roots, now.Add(-2 * time.Hour), "begins on",
		},
	} {
		got := certificates.Check(tc.chain, tc.host, tc.roots, tc.now)
		if tc.want == "" && got != nil || !strings.Contains(fmt.Sprint(got), tc.want) {
			t.Errorf("%s: %v, want %q", name, got, tc.want)
		}
	}
}

// The check tries every command that the user of deploy/redis.acl may send.
func TestServerCheckTriesWhatIsDocumented(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	acl, err := os.ReadFile(redistest.ACL())
	if err != nil {
		t.Fatal(err)
	}

	// Without these commands the connection itself or the first answer fails.
	untried := strings.Fields(
		"auth hello select ping info subscribe unsubscribe spublish ssubscribe sunsubscribe cluster|slots")

	for right := range strings.FieldsSeq(string(acl)) {
		command, ok := strings.CutPrefix(right, "+")
		if !ok || slices.Contains(untried, command) {
			continue
		}

		// This user has every right but one.
		redis.Do(t, "ACL", "SETUSER", "u", "reset", "on", ">password", "~hc:*", "&hc:*", "+@all", "-"+command)
		_, wrong, all := check(t, "--redis=redis://u:password@"+redis.Addr, "--patience=3m",
			"--admin-listen="+servertest.FreeAddr(), "--listen="+servertest.FreeAddr(),
			"--cluster-listen="+servertest.FreeAddr())

		if len(wrong) != 1 || !strings.Contains(wrong[0], " "+command+";") {
			t.Errorf("without %s:\n%s", command, all)
		}
	}
}
