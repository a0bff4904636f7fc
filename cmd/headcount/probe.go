package main

import (
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"headcount/gateway/identity"
)

// probes let `headcount check` find out how a request of its own reaches this server: with which
// Host and proxy headers. The admin address returns the name of a new probe. The first request for
// that name at the public address is answered with the request's own headers; any other name is not
// found.
type probes struct {
	proxies *identity.Proxies
	path    string // prefix of all probes at the public address

	mu    sync.Mutex // guards open
	open  map[string]time.Time
	order []string // of open, the oldest first
}

const (
	probePath = "/-/probe/" // below --base-path

	// maxProbes is how many probes may be open; a further one replaces the oldest.
	maxProbes = 64
	probeTTL  = time.Minute
)

// probed describes a request as the server received it.
type probed struct {
	Host         string `json:"host"`
	ForwardedFor bool   `json:"forwarded_for"` // the request has an X-Forwarded-For
	Peer         string `json:"peer"`          // address of the peer: the proxy, if there is one
	Trusted      bool   `json:"trusted"`       // --trusted-proxies names the peer
	Secure       bool   `json:"secure"`        // the server knows that the client used TLS
}

func newProbes(cfg Config) *probes {
	return &probes{proxies: cfg.Proxies, path: cfg.BasePath + probePath, open: map[string]time.Time{}}
}

// begin answers with the name of a new probe.
func (p *probes) begin(w http.ResponseWriter, _ *http.Request) {
	name := rand.Text()
	p.mu.Lock()
	if len(p.order) == maxProbes {
		delete(p.open, p.order[0])
		p.order = p.order[1:]
	}
	p.open[name] = time.Now()
	p.order = append(p.order, name)
	p.mu.Unlock()
	_, _ = w.Write([]byte(name)) // an error means that the client is gone
}

// take reports whether the probe is open, and closes it.
func (p *probes) take(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	began, ok := p.open[name]
	if !ok {
		return false
	}
	delete(p.open, name)
	for i, other := range p.order {
		if other == name {
			p.order = append(p.order[:i:i], p.order[i+1:]...)
			break
		}
	}
	return time.Since(began) < probeTTL
}

// before returns a handler that answers probes and passes all other requests to next.
func (p *probes) before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, is := strings.CutPrefix(r.URL.Path, p.path)
		if !is || r.Method != http.MethodGet || !p.take(name) {
			next.ServeHTTP(w, r)
			return
		}
		bare := *r
		bare.Header = http.Header{}
		peer := p.proxies.Addr(&bare)
		seen := probed{
			Host: r.Host, ForwardedFor: r.Header.Get("X-Forwarded-For") != "", Peer: peer.String(),
			Trusted: p.trusts(&bare, peer), Secure: p.proxies.Secure(r),
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_ = json.NewEncoder(w).Encode(seen)
	})
}

// trusts reports whether the settings name the peer as a proxy: then they accept its
// X-Forwarded-For.
func (p *probes) trusts(bare *http.Request, peer netip.Addr) bool {
	other := netip.MustParseAddr("192.0.2.1") // reserved for documentation
	if peer == other {
		return false
	}
	bare.Header = http.Header{"X-Forwarded-For": {other.String()}}
	return p.proxies.Addr(bare) == other
}
