package probe

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"

	"headcount/gateway/counterapi"
	"headcount/internal/setting"
)

// Proxy is the way that the requests of visitors take to a server.
type Proxy struct {
	URL      string // the server's public address, without a path
	BasePath string // of the server
	Admin    string // the URL of the server's admin address; empty: the server does not run on this machine
	Tokens   bool   // visitors need a token
	Patience time.Duration
}

// Ask sends a request on a new connection, without the proxy settings of the environment.
func Ask(ctx context.Context, timeout time.Duration, method, url string, content []byte) (
	status int, body string, err error,
) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(content))
	if err != nil {
		return 0, "", err
	}

	resp, err := direct.Do(req)
	if err != nil {
		return 0, "", setting.Cause(err)
	}
	defer resp.Body.Close()

	// The other side may be anything, so what is read of it has a bound.
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(text), err
}

var direct = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// fault returns a fault of the proxy.
func fault(format string, args ...any) error { return setting.Errorf("public-url", format, args...) }

// Check sends requests to the server through the proxy. It returns a *setting.Error for each fault, none if the proxy
// passes on what it should. A certificate that is not trusted is no fault here, and nothing is sent then.
func (p *Proxy) Check(ctx context.Context) (faults []error) {
	// All further checks would fail for this reason, and hide it.
	err := p.arrive(ctx)
	if errors.As(err, new(*tls.CertificateVerificationError)) {
		return nil
	}
	if err != nil {
		return []error{err}
	}

	// A page with a slash is what proxies break most: they decode the path, and the page is another one.
	status, body, err := p.get(ctx, "/check%2Fthis/counter")
	isPage := status == http.StatusForbidden || strings.Contains(body, `"page":"check/this"`) // 403: it is private
	if err == nil && !isPage {
		faults = append(faults, fault("the proxy decodes %%2F in paths, and pages with a slash are not found; have it "+
			"pass on the path as it came (in nginx: proxy_pass without a path)"))
	}

	// Before the WebSocket, since it decides which origin can be tried.
	headers, hostIsRight := p.checkHeaders(ctx)
	faults = append(faults, headers...)

	// A wrong Host alone makes the server refuse the origin, which would hide other faults.
	origin := ""
	if hostIsRight {
		origin = strings.TrimSuffix(p.URL, "/")
	}

	for _, err := range []error{p.checkSocket(ctx, origin), p.checkStream(ctx)} {
		if err != nil {
			faults = append(faults, err)
		}
	}

	return faults
}

// base returns the public URL of the server.
func (p *Proxy) base() string { return strings.TrimSuffix(p.URL, "/") + p.BasePath }

func (p *Proxy) get(ctx context.Context, path string) (status int, body string, err error) {
	return Ask(ctx, p.Patience, http.MethodGet, p.base()+path, nil)
}

// arrive returns why requests to the public address do not reach a server that is ready.
func (p *Proxy) arrive(ctx context.Context) error {
	// A call that every server answers, with a body that nothing else has.
	status, body, err := p.get(ctx, "/-/counters?page=*")
	isUnready := status == http.StatusServiceUnavailable && strings.Contains(body, `"status"`)
	isHeadcount := status == http.StatusOK && strings.Contains(body, `{"counters":[`)

	switch {
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return err
	case err != nil:
		return fault("nothing answers: %v; see whether the proxy runs, and whether the name leads to it", err)
	case isUnready:
		return fault("the server behind the proxy is not ready")
	case !isHeadcount:
		return fault("something else than Headcount answers, with status %d; have the proxy pass requests to --listen",
			status)
	default:
		return nil
	}
}

// tries is how often a probe is repeated because another of several gateways answered.
const tries = 20

// send sends a request to the server of the admin address through the proxy, and returns what arrived of it.
func (p *Proxy) send(ctx context.Context, method string, content []byte) (seen received, err error) {
	status := 0

	// With several gateways behind the proxy only one knows the probe, and the proxy chooses.
	for range tries {
		// A new name each time, because a probe is answered once.
		_, name, err := Ask(ctx, p.Patience, http.MethodPost, p.Admin+"/probe", nil)
		if err != nil {
			return received{}, err
		}

		var body string
		status, body, err = Ask(ctx, p.Patience, method, p.base()+publicPath+name, content)
		if err != nil {
			return received{}, err
		}

		if json.Unmarshal([]byte(body), &seen) == nil && seen.Host != "" {
			return seen, nil
		}
	}

	return received{}, fmt.Errorf("status %d", status)
}

// checkHeaders compares requests as the server received them with those that were sent. It reports whether the Host is
// right, as far as that can be known.
func (p *Proxy) checkHeaders(ctx context.Context) (faults []error, hostIsRight bool) {
	if p.Admin == "" {
		return []error{fault("no server answers at --admin-listen, so the headers that the proxy sends cannot be " +
			"checked; run the check on the server's machine")}, true
	}

	seen, err := p.send(ctx, http.MethodGet, nil)
	if err != nil {
		return []error{fault("no request reaches the server of --admin-listen (%v); have the proxy pass requests to "+
			"its --listen, and to every path", err)}, true
	}

	u, _ := url.Parse(p.URL) // the command has checked it
	hostIsRight = strings.EqualFold(seen.Host, u.Host)
	if !hostIsRight {
		faults = append(faults, fault("the proxy replaces the Host %q by %q, and pages of your own site are refused; "+
			"have it pass on the Host (in nginx: proxy_set_header Host $http_host)", u.Host, seen.Host))
	}

	if seen.ForwardedFor && !seen.Trusted {
		faults = append(faults, setting.Errorf("trusted-proxies",
			"the proxy at %s sends the addresses of its clients, "+
				"and is not trusted: all clients count as one address; give --trusted-proxies %s", seen.Peer,
			seen.Peer))
	}

	// An untrusted proxy is reported above, and its X-Forwarded-Proto would be ignored anyway.
	if u.Scheme == "https" && !seen.Secure && (seen.Trusted || !seen.ForwardedFor) {
		faults = append(faults, fault(
			"the server does not know that clients use https, so its cookies are not Secure; "+
				"have the proxy send X-Forwarded-Proto, and name the proxy in --trusted-proxies"))
	}

	// The largest body that the server reads; a proxy may have a smaller limit of its own.
	seen, err = p.send(ctx, http.MethodPost, make([]byte, counterapi.MaxBody))
	if err == nil && seen.Body < counterapi.MaxBody {
		err = fmt.Errorf("%d bytes arrive", seen.Body)
	}
	if err != nil {
		faults = append(faults, fault(
			"the proxy does not pass on a body of 256 KiB, which a batch of changes may have "+
				"(%v); have it pass on 1 MiB (in nginx: client_max_body_size 1m)", err))
	}

	return faults, hostIsRight
}

// checkSocket opens a WebSocket as a page of the origin would, or as a program without one.
func (p *Proxy) checkSocket(ctx context.Context, origin string) error {
	ctx, cancel := context.WithTimeout(ctx, p.Patience)
	defer cancel()

	header := http.Header{}
	if origin != "" {
		header.Set("Origin", origin)
	}

	ws, resp, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(p.base(), "http")+"/-/ws", &websocket.DialOptions{
		HTTPClient: direct, HTTPHeader: header, Subprotocols: []string{"headcount.v1"},
	})
	// Open is all that matters; nothing is counted before a join.
	if err == nil {
		_ = ws.CloseNow()
		return nil
	}
	if resp == nil {
		return fault("WebSockets do not open: %v", setting.Cause(err))
	}

	switch resp.StatusCode {
	case http.StatusUnauthorized:
		if p.Tokens { // the server refuses this upgrade, so the upgrade has reached it
			return nil
		}
	case http.StatusForbidden:
		return setting.Errorf("allow-origins", "pages of %s may not use the server; add it", origin)
	}

	return fault("the proxy does not pass on the upgrade to WebSockets (status %d), and browsers fall back to event "+
		"streams; have it pass on Upgrade and Connection (in nginx: proxy_http_version 1.1, proxy_set_header Upgrade "+
		"$http_upgrade, and Connection)", resp.StatusCode)
}

// checkStream opens an event stream, whose first event comes at once.
func (p *Proxy) checkStream(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.Patience)
	defer cancel()

	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, p.base()+"/*/counter/events", nil) // the URL is checked
	req.Header.Set("Accept", "text/event-stream")

	resp, err := direct.Do(req)
	status := 0
	if err == nil {
		defer resp.Body.Close()

		status = resp.StatusCode
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data:") {
				return nil
			}
		}
		err = lines.Err()
	}

	if errors.Is(err, context.DeadlineExceeded) {
		return fault("the proxy holds event streams back: the first event did not arrive within %s; turn off its "+
			"buffering (in nginx: proxy_buffering off)", p.Patience)
	}

	return fault("event streams do not open (status %d): %v", status, setting.Cause(errors.Join(err, io.EOF)))
}
