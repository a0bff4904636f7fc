// Package probe finds out whether a proxy passes on what a server needs. Probes are the server's part: it describes a
// request as it was received. Check is that of a program that sends such requests to the server's public address.
package probe

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

// Probes let Check find out how a request of its own reaches this server: with which Host and proxy headers. The admin
// address returns the name of a new probe. The first request for that name at the public address is answered with the
// request's own headers and the length of its body; any other name is not found.
type Probes struct {
	proxies *identity.Proxies
	path    string                       // prefix of all probes at the public address
	open    *lru.Cache[string, struct{}] // by name; a further one replaces the oldest
}

const (
	publicPath = "/-/probe/" // below --base-path
	maxOpen    = 64
)

// methods are those of a probe without a body, and of one with it.
var methods = []string{http.MethodGet, http.MethodPost}

// received describes a request as the server received it.
type received struct {
	Host         string `json:"host"`
	ForwardedFor bool   `json:"forwarded_for"` // the request has an X-Forwarded-For
	Peer         string `json:"peer"`          // address of the peer: the proxy, if there is one
	Trusted      bool   `json:"trusted"`       // --trusted-proxies names the peer
	Secure       bool   `json:"secure"`        // the server knows that the client used TLS
	Body         int64  `json:"body"`          // bytes of the body
}

// New returns the probes of a server that serves visitors below basePath.
func New(proxies *identity.Proxies, basePath string) *Probes {
	open, _ := lru.New[string, struct{}](maxOpen) // fails only for a size under 1

	return &Probes{proxies: proxies, path: basePath + publicPath, open: open}
}

// Begin answers with the name of a new probe.
func (p *Probes) Begin(w http.ResponseWriter, _ *http.Request) {
	name := rand.Text()
	p.open.Add(name, struct{}{})
	_, _ = w.Write([]byte(name)) // an error means that the client is gone
}

// Before returns a handler that answers probes and passes all other requests to next.
func (p *Probes) Before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Only a GET or POST is a probe: the preflight of a browser must not use it up.
		name, is := strings.CutPrefix(r.URL.Path, p.path)
		isProbe := is && slices.Contains(methods, r.Method)
		if !isProbe || !p.open.Remove(name) { // a probe is answered once
			next.ServeHTTP(w, r)
			return
		}

		peer, trusted := p.proxies.Peer(r)
		seen := received{
			Host: r.Host, ForwardedFor: r.Header.Get("X-Forwarded-For") != "", Peer: peer.String(),
			Trusted: trusted, Secure: p.proxies.Secure(r),
		}

		// A body that breaks off is one that the proxy has cut, and its length says so.
		seen.Body, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, counterapi.MaxBody))

		// A cache in front must not answer the next probe.
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_ = json.NewEncoder(w).Encode(seen)
	})
}
