package main

import (
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
)

// probes let `headcount check` find out how a request of its own reaches this server: with which
// Host and proxy headers. The admin address returns the name of a new probe. The first request for
// that name at the public address is answered with the request's own headers and the length of its
// body; any other name is not found.
type probes struct {
	proxies *identity.Proxies
	path    string                       // prefix of all probes at the public address
	open    *lru.Cache[string, struct{}] // by name; a further one replaces the oldest
}

const (
	probePath = "/-/probe/" // below --base-path
	maxProbes = 64          // that may be open
)

// probeMethods are those of a probe without a body, and of one with it.
var probeMethods = []string{http.MethodGet, http.MethodPost}

// probed describes a request as the server received it.
type probed struct {
	Host         string `json:"host"`
	ForwardedFor bool   `json:"forwarded_for"` // the request has an X-Forwarded-For
	Peer         string `json:"peer"`          // address of the peer: the proxy, if there is one
	Trusted      bool   `json:"trusted"`       // --trusted-proxies names the peer
	Secure       bool   `json:"secure"`        // the server knows that the client used TLS
	Body         int64  `json:"body"`          // bytes of the body
}

func newProbes(cfg Config) *probes {
	open, _ := lru.New[string, struct{}](maxProbes) // fails only for a size under 1

	return &probes{proxies: cfg.Proxies, path: cfg.BasePath + probePath, open: open}
}

// begin answers with the name of a new probe.
func (p *probes) begin(w http.ResponseWriter, _ *http.Request) {
	name := rand.Text()
	p.open.Add(name, struct{}{})
	_, _ = w.Write([]byte(name)) // an error means that the client is gone
}

// before returns a handler that answers probes and passes all other requests to next.
func (p *probes) before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, is := strings.CutPrefix(r.URL.Path, p.path)
		isProbe := is && slices.Contains(probeMethods, r.Method)
		if !isProbe || !p.open.Remove(name) { // a probe is answered once
			next.ServeHTTP(w, r)
			return
		}

		peer, trusted := p.proxies.Peer(r)
		seen := probed{
			Host: r.Host, ForwardedFor: r.Header.Get("X-Forwarded-For") != "", Peer: peer.String(),
			Trusted: trusted, Secure: p.proxies.Secure(r),
		}

		// A body that breaks off is one that the proxy has cut, and its length says so.
		seen.Body, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, counterapi.MaxBody))

		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_ = json.NewEncoder(w).Encode(seen)
	})
}
