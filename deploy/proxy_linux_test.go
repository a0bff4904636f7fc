package deploy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	coder "github.com/coder/websocket"

	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// gateways has two processes behind the proxies of proxy/, run as these files say. One address may have perAddress
// connections to each of them.
type gateways struct{ addrs, admins []string }

// perAddress is how many connections a gateway has with one address: enough for two browsers on the demo's page, each
// with a WebSocket and the stream of its <live-top>.
const perAddress = 4

func startGateways(t *testing.T) *gateways {
	t.Helper()
	redis := redistest.Start(t)
	g := &gateways{}
	for range 2 {
		addr, admin := servertest.FreeAddr(), servertest.FreeAddr()
		background(t, testkit.Timeout, binary, "serve", "--listen="+addr, "--admin-listen="+admin,
			"--cluster-listen="+servertest.FreeAddr(), "--redis="+redis.URL(),
			"--base-path=/live", "--trusted-proxies=127.0.0.1",
			fmt.Sprint("--max-connections-per-address=", perAddress), "--shutdown-timeout=2s")
		g.addrs = append(g.addrs, addr)
		g.admins = append(g.admins, admin)
	}

	for _, admin := range g.admins {
		testkit.Eventually(t, "a gateway that is ready",
			func() bool { return servertest.Ready(t.Context(), admin) == nil })
	}

	return g
}

// background runs a server until the test ends. The server then has some time to end by itself; after that it is killed
// with its children.
func background(t *testing.T, grace time.Duration, name string, args ...string) {
	t.Helper()
	var log servertest.Log
	if path, err := exec.LookPath("/usr/sbin/" + filepath.Base(name)); err == nil { // not in the PATH of every user
		name = path
	}

	cmd := exec.Command(name, args...)
	cmd.Env = testkit.Environ("HOME=" + t.TempDir())
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // its own process group, which is killed as a whole
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: run make setup", err)
	}

	t.Cleanup(func() {
		// An error means that all processes have ended.
		kill := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(grace, kill)
		_ = cmd.Wait() // the server ends by a signal, which is not an error here
		late.Stop()
		kill()

		if t.Failed() {
			t.Logf("%s: %s", filepath.Base(name), &log)
		}
	})
}

// proxied is a proxy in front of the gateways, and its visitors.
type proxied struct {
	t     *testing.T
	addr  string
	roots *x509.CertPool
	last  int // the last byte of the newest visitor's address
	net   int // the third byte of all visitors' addresses
}

// visitor is a client with an address of its own.
func (p *proxied) visitor() *http.Client {
	p.last++
	from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(p.net), byte(p.last))}}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: p.roots, ServerName: "counter.example.com"},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return from.DialContext(ctx, network, p.addr)
		},
	}

	p.t.Cleanup(transport.CloseIdleConnections)

	return &http.Client{
		Transport: transport, Timeout: testkit.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func (p *proxied) url(path string) string { return "https://counter.example.com" + path }

// get asks for a path and leaves the body to the caller.
func (p *proxied) get(c *http.Client, path string, header ...string) *http.Response {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, p.url(path), nil)
	if err != nil {
		p.t.Fatal(err)
	}

	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}

	resp, err := c.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { resp.Body.Close() })

	return resp
}

// askAnother has the proxies that ask the other gateway if one answers that it is full.
var askAnother = []string{"nginx", "HAProxy"}

// eachProxy runs each proxy of proxy/, or only some, in front of two gateways, or of one (without the second server
// that the files name), and calls look.
func eachProxy(
	t *testing.T, gateways []string, look func(t *testing.T, name string, p *proxied, browser bool), only ...string,
) {
	dir := t.TempDir()

	// The visitors trust only the certificate of the proxies.
	cert, key := certificate(t, dir)
	roots := x509.NewCertPool()
	if text, err := os.ReadFile(cert); err != nil || !roots.AppendCertsFromPEM(text) {
		t.Fatal("no certificate", err)
	}

	apache, modules := "apache2", "/usr/lib/apache2/modules"
	if _, err := exec.LookPath(apache); err != nil { // its name outside Debian
		apache = "httpd"
	}
	if found, _ := filepath.Glob("/usr/lib*/httpd/modules"); len(found) > 0 {
		modules = found[0]
	}

	for i, tc := range []struct {
		name, file string
		browser    bool
		run        func(conf string) []string
	}{
		{"nginx", "nginx.conf", true, func(conf string) []string {
			return []string{"nginx", "-p", dir, "-c", conf, "-g", "daemon off;"}
		}},
		{"HAProxy", "haproxy.cfg", true, func(conf string) []string { return []string{"haproxy", "-db", "-f", conf} }},
		{"Caddy", "Caddyfile", false, func(conf string) []string {
			return []string{"caddy", "run", "--adapter", "caddyfile", "--config", conf}
		}},
		{"Apache", "apache.conf", false, func(conf string) []string {
			return []string{apache, "-D", "FOREGROUND", "-f", conf}
		}},
	} {
		if len(only) > 0 && !slices.Contains(only, tc.name) {
			continue
		}

		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := &proxied{t: t, addr: servertest.FreeAddr(), roots: roots, net: 10 + i}
			_, port, _ := net.SplitHostPort(p.addr)
			text, err := os.ReadFile(filepath.Join("proxy", tc.file))
			if err != nil {
				t.Fatal(err)
			}

			conf := filepath.Join(dir, tc.file)

			// As the files say, without the line of the second gateway.
			if len(gateways) == 1 {
				text = regexp.MustCompile(`(?m)^.*(server|BalancerMember) .*gateway-2.*\n| gateway-2:8080`).ReplaceAll(
					text, nil)
			}

			// With free ports, files of the test, and fewer connections than an operator's proxy has.
			here := strings.NewReplacer("gateway-1:8080", gateways[0], "gateway-2:8080", gateways[len(gateways)-1],
				"/etc/headcount/cert.pem", cert, "/etc/headcount/key.pem", key,
				"/etc/headcount/both.pem", cert, "bind :443", "bind "+p.addr, "listen 443", "listen "+p.addr,
				"Listen 443", "Listen "+p.addr, "*:443", p.addr, ":443", ":"+port,
				"/run/nginx.pid", filepath.Join(dir, "nginx.pid"), "/run/apache2/apache2.pid",
				filepath.Join(dir, "apache.pid"), "ServerRoot /etc/apache2", "ServerRoot "+dir,
				"worker_rlimit_nofile 65536;", "", "grace_period 5s",
				"auto_https disable_redirects\n\tgrace_period 100ms", "/usr/lib/apache2/modules", modules,
				"worker_connections 30000", "worker_connections 500", "maxconn 60000", "maxconn 500")

			if err := os.WriteFile(conf, []byte(here.Replace(string(text))), 0o600); err != nil {
				t.Fatal(err)
			}
			args := tc.run(conf)
			background(t, 0, args[0], args[1:]...)

			testkit.Eventually(t, tc.name, func() bool {
				c, err := net.Dial("tcp", p.addr)
				if err == nil {
					c.Close()
				}
				return err == nil
			})

			look(t, tc.name, p, tc.browser)
		})
	}
}

// The configurations of proxy/ do what they promise in front of two gateways: TLS, balancing, WebSockets, event streams
// without delay, the addresses of clients, and encoded names below a path.
func TestServerProxies(t *testing.T) {
	g := startGateways(t)
	eachProxy(t, g.addrs, func(_ *testing.T, name string, p *proxied, browser bool) {
		p.check(name)
		if browser {
			p.browse(g, name)
		}
	})
}

// Without the second gateway the files serve one process. The host, the path, the visitor's address and the scheme must
// arrive, and large bodies, too: the gateway refuses them itself, in JSON and with its own limit, while a proxy's HTML
// would tell an application nothing.
func TestServerProxiesBeforeOneProcess(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, r.Host, r.URL.EscapedPath(), " ", r.Header.Get("X-Forwarded-For"), " ",
			r.Header.Get("X-Forwarded-Proto"), " ", n, " ", err)
	}))
	t.Cleanup(s.Close)

	eachProxy(t, []string{s.Listener.Addr().String()}, func(t *testing.T, _ string, p *proxied, _ bool) {
		arrives := func(path string, bytes int, resp *http.Response) {
			t.Helper()
			defer resp.Body.Close()

			body, err := io.ReadAll(resp.Body)
			want := fmt.Sprintf("counter.example.com%s 127.0.%d.%d https %d <nil>", path, p.net, p.last, bytes)
			if err != nil || string(body) != want {
				t.Errorf("%s, %.100q, %v, want %q", resp.Status, body, err, want)
			}
		}

		arrives("/live/a%2Fb/counter", 0, p.get(p.visitor(), "/live/a%2Fb/counter"))

		const tooLarge = 256<<10 + 1
		large := strings.NewReader(strings.Repeat(" ", tooLarge))
		resp, err := p.visitor().Post(p.url("/live/api/v1/batch"), "application/json", large)
		if err != nil {
			t.Fatal(err)
		}
		arrives("/live/api/v1/batch", tooLarge, resp)
	})
}

// Visitors do not notice when a gateway is gone. Behind nginx and HAProxy they do not notice a full one either.
func TestServerProxiesGoToAnother(t *testing.T) {
	answering := func(status int) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
		}))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}

	another := answering(http.StatusOK)
	look := func(t *testing.T, _ string, p *proxied, _ bool) {
		for range 6 {
			if resp := p.get(p.visitor(), "/live/p/counter"); resp.StatusCode != http.StatusOK {
				t.Errorf("the answer is %s", resp.Status)
			}
		}
	}

	eachProxy(t, []string{servertest.FreeAddr(), another}, look)
	eachProxy(t, []string{answering(http.StatusServiceUnavailable), another}, look, askAnother...)
}

// A POST that a gateway received and did not answer is not sent to another gateway, since it could count twice.
func TestServerProxiesRepeatNoPost(t *testing.T) {
	var mu sync.Mutex
	posts := map[string]int{} // by path
	var addrs []string
	for range 2 { // gateways that die while they handle a request
		s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				mu.Lock()
				posts[r.URL.Path]++
				mu.Unlock()
			}

			panic(http.ErrAbortHandler)
		}))
		t.Cleanup(s.Close)
		addrs = append(addrs, s.Listener.Addr().String())
	}

	eachProxy(t, addrs, func(t *testing.T, name string, p *proxied, _ bool) {
		path := "/live/" + name + "/changes"
		resp, err := p.visitor().Post(p.url(path), "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()

		mu.Lock()
		defer mu.Unlock()
		if posts[path] != 1 || resp.StatusCode < 500 {
			t.Errorf("a POST arrived %d times, and its client receives %s", posts[path], resp.Status)
		}
	})
}

// nginx accepts the configuration of compose.yaml. The test replaces `resolve`, which the nginx of distributions does
// not know yet, and the gateways' names, which are those of containers.
func TestServerProxyOfCompose(t *testing.T) {
	dir := t.TempDir()
	here := strings.NewReplacer(" resolve ", " ", "gateway-1:8080", "127.0.0.1:1", "gateway-2:8080", "127.0.0.1:2",
		"/var/run/nginx.pid", filepath.Join(dir, "nginx.pid"), "listen 80;", "listen "+servertest.FreeAddr()+";")

	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, []byte(here.Replace(string(file(t, "nginx.conf")))), 0o600); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command("nginx", "-t", "-p", dir, "-c", conf)
	if path, err := exec.LookPath("/usr/sbin/nginx"); err == nil {
		cmd.Path, cmd.Err = path, nil
	}

	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v (run make setup if nginx is missing)\n%s", err, out)
	}
	// It must forward requests as proxy/nginx.conf does, which the other tests cover.
	passes := func(name string) (lines []string) {
		for line := range strings.Lines(string(file(t, name))) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), ";")
			if strings.HasPrefix(line, "proxy_") || strings.HasPrefix(line, "client_") {
				lines = append(lines, line)
			}
		}

		return lines
	}

	compose, tested := passes("nginx.conf"), passes("proxy/nginx.conf")
	if len(tested) < 10 || !slices.Equal(compose, tested) {
		t.Errorf("the nginx of compose.yaml has %q, and the tested one %q", compose, tested)
	}
}

// certificate makes a self-signed certificate for counter.example.com. The key is in both files, because HAProxy wants
// one file.
func certificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	out, err := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
		"-nodes", "-days", "2",
		"-subj", "/CN=counter.example.com", "-addext", "subjectAltName=DNS:counter.example.com", "-keyout", key, "-out",
		cert).CombinedOutput()

	if err != nil {
		t.Fatalf("openssl: %v; run make setup\n%s", err, out)
	}

	both, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}

	f, err := os.OpenFile(cert, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.Write(both)
	}
	if err != nil {
		t.Fatal(err)
	}

	_ = f.Close()

	return cert, key
}

func (p *proxied) check(name string) {
	t := p.t
	if resp := p.get(p.visitor(), "/live/-/dashboard.js"); resp.StatusCode != http.StatusOK {
		t.Fatalf("the dashboard's script: %s", resp.Status)
	}

	if resp := p.get(p.visitor(), "/live"); resp.StatusCode != http.StatusPermanentRedirect ||
		!strings.HasSuffix(resp.Header.Get("Location"), "/live/") {
		t.Fatalf("/live: %s to %q", resp.Status, resp.Header.Get("Location"))
	}

	// A slash and a percent sign must reach the gateway encoded.
	page := name + "/%"
	escaped := name + "%2F%25"
	body, err := io.ReadAll(p.get(p.visitor(), "/live/"+escaped+"/counter").Body)
	if err != nil || !strings.Contains(string(body), fmt.Sprintf(`"page":%q,"count":0`, page)) {
		t.Fatalf("the counter of %s: %s, %v", escaped, body, err)
	}

	// Events arrive when they happen.
	stream := p.get(p.visitor(), "/live/"+escaped+"/counter/events")
	if c := stream.Header.Get("Set-Cookie"); stream.StatusCode != http.StatusOK || !strings.Contains(c, "; Secure") {
		t.Fatalf("the event stream: %s, cookie %q", stream.Status, c)
	}

	in := bufio.NewReader(stream.Body)
	await := func(count int) {
		t.Helper()
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				t.Fatalf("the event stream ends: %v", err)
			}
			if strings.Contains(line, fmt.Sprintf(`"count":%d,`, count)) {
				return
			}
		}
	}

	await(0)

	// A join over a WebSocket is an event for the stream at the other gateway.
	ws, _, err := coder.Dial(t.Context(), strings.Replace(p.url("/live/-/ws"), "https", "wss", 1), &coder.DialOptions{
		HTTPClient: p.visitor(), HTTPHeader: http.Header{"Origin": {"https://counter.example.com"}}})
	if err != nil {
		t.Fatal(err)
	}

	if err := ws.Write(t.Context(), coder.MessageText,
		fmt.Appendf(nil, `{"type":"join","page":%q}`, page)); err != nil {
		t.Fatal(err)
	}
	await(1)
	if err := ws.Close(coder.StatusNormalClosure, ""); err != nil {
		t.Fatal(err)
	}
	await(0)

	// One address gets perAddress connections to each of two gateways, whatever address it claims. Caddy and Apache may
	// choose the full one many times before the other one is full, too.
	crowd := p.visitor()
	open := 0
	for i := range 40 {
		claim := fmt.Sprintf("203.0.113.%d", i)
		resp := p.get(crowd, "/live/crowd/counter/events", "X-Forwarded-For", claim)
		switch resp.StatusCode {
		case http.StatusOK:
			open++
		case http.StatusServiceUnavailable: // full
		default:
			t.Fatalf("a full gateway answers %s", resp.Status)
		}
	}
	if open != 2*perAddress {
		t.Errorf("one address has %d connections, not %d on each of two gateways", open, perAddress)
	}
	if resp := p.get(p.visitor(), "/live/crowd/counter/events"); resp.StatusCode != http.StatusOK {
		t.Errorf("a visitor with another address got %s", resp.Status)
	}
}

// browse opens the demo in a real browser, and expects the browser to be counted.
func (p *proxied) browse(g *gateways, name string) {
	t := p.t
	chromium := os.Getenv("CHROMIUM")
	if chromium == "" {
		chromium = "chromium"
	}

	_, port, _ := net.SplitHostPort(p.addr)
	at := "https://counter.example.com:" + port + "/live/"
	background(t, 0, chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update",
		"--ignore-certificate-errors", "--host-resolver-rules=MAP counter.example.com 127.0.0.1",
		"--user-data-dir="+t.TempDir(), "--remote-debugging-port=0", at+"?page="+name+"%2Fdemo")

	visitor := p.visitor()
	testkit.Eventually(t, "the browser on the demo's page", func() bool {
		body, _ := io.ReadAll(p.get(visitor, "/live/"+name+"%2Fdemo/counter").Body)
		return strings.Contains(string(body), `"count":1,`)
	})

	// The demo asks whether the dashboard needs a key: its script runs.
	var figures []byte
	for _, admin := range g.admins {
		resp, err := http.Get("http://" + admin + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		figures = append(figures, text...)
	}

	if !strings.Contains(string(figures), `{method="GET",route="/-/dashboard/access",status="200"}`) {
		t.Error("the demo has not asked whether the dashboard needs a key")
	}
}
