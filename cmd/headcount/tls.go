package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/crypto/acme"
	"golang.org/x/crypto/acme/autocert"

	"headcount/internal/setting"
)

// lookForCertificate is the time between two looks at the files of the certificate.
const lookForCertificate = time.Second

// HasTLS tells whether visitors speak TLS to this process.
func (c *Config) HasTLS() bool { return c.TLSCert != "" || len(c.Domains) > 0 }

// acmeDir is where certificates of --domain are kept.
func (c *Config) acmeDir() string {
	if c.ACMEDir == "" && c.DataDir != "" {
		return filepath.Join(c.DataDir, "acme")
	}
	return c.ACMEDir
}

func (c *Config) checkTLS() error {
	switch {
	case c.TLSCert != "" && c.TLSKey == "":
		return setting.Errorf("tls-key", "it is missing; name the file of the key that belongs to --tls-cert")
	case c.TLSKey != "" && c.TLSCert == "":
		return setting.Errorf("tls-cert", "it is missing; name the file of the certificate that belongs to --tls-key")
	case c.TLSCert != "" && len(c.Domains) > 0:
		return setting.Errorf("domain", "--tls-cert gives a certificate already; leave one of the two out")
	case c.Redirect != "" && !c.HasTLS():
		return setting.Errorf("http-redirect", "this process does not speak TLS, so it cannot send visitors to https; give --domain or --tls-cert, or leave the redirect to the proxy")
	case len(c.Domains) > 0 && c.acmeDir() == "":
		return setting.Errorf("acme-dir", "--domain needs a directory, since an authority gives few new certificates a week; name one that outlives the process, or give --data-dir")
	}
	for _, name := range c.Domains {
		if _, err := netip.ParseAddr(name); err == nil || !strings.Contains(strings.Trim(name, "."), ".") || strings.ContainsAny(name, "*/: ") {
			return setting.Errorf("domain", "%q is not the full name of a host; write one like counter.example.com", name)
		}
	}
	if len(c.Domains) > 0 && !isWebURL(c.ACMEURL) {
		return setting.Errorf("acme-url", "it is not an http or https URL; write https://host/path of the authority's directory")
	}
	return nil
}

// certificates are what the public listener shows its visitors.
type certificates struct {
	*tls.Config
	run      func(context.Context) // keeps them current until ctx ends
	redirect http.Handler          // of --http-redirect
	shown    func() []*tls.Certificate
}

// overdue reports whether visitors were shown a certificate that nobody renews.
func (c *certificates) overdue() bool {
	return slices.ContainsFunc(c.shown(), func(cert *tls.Certificate) bool { return ageProblem(cert.Leaf, time.Now()) != "" })
}

// openCertificates reads the certificate. It fails if that cannot work.
func openCertificates(cfg Config, log zerolog.Logger) (*certificates, error) {
	if len(cfg.Domains) > 0 {
		return domainCertificates(cfg, log), nil
	}
	f := &certificateFiles{cert: cfg.TLSCert, key: cfg.TLSKey, log: log}
	if _, err := f.load(); err != nil {
		return nil, setting.Errorf("tls-cert", "%v; name the files of a certificate and its key that this process can read", err)
	}
	return &certificates{&tls.Config{GetCertificate: f.get}, f.run, toHTTPS{f}, func() []*tls.Certificate { return []*tls.Certificate{f.current.Load()} }}, nil
}

// hosts are those that have a certificate.
type hosts interface{ has(host string) bool }

func (f *certificateFiles) has(host string) bool {
	return f.current.Load().Leaf.VerifyHostname(host) == nil
}

type domains []string

func (d domains) has(host string) bool { return slices.Contains(d, strings.ToLower(host)) }

// toHTTPS sends visitors of hosts to port 443 of the same host.
type toHTTPS struct{ hosts }

// redirectKept is how long a browser may remember it: an operator may take it back.
const redirectKept = "max-age=3600"

// overTLSAlone has browsers ask for https by themselves, for as long as they remember the redirect.
func overTLSAlone(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Strict-Transport-Security", redirectKept)
		handler.ServeHTTP(w, r)
	})
}

func (h toHTTPS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if !h.has(host) {
		http.Error(w, "this server has no certificate for that host", http.StatusMisdirectedRequest)
		return
	}
	w.Header().Set("Cache-Control", redirectKept)
	w.Header().Set("Location", "https://"+host+r.URL.RequestURI())
	w.WriteHeader(http.StatusPermanentRedirect)
}

// certificateFiles is a certificate in two files, which somebody replaces now and then.
type certificateFiles struct {
	cert, key string
	log       zerolog.Logger
	current   atomic.Pointer[tls.Certificate]
	seen      []byte // the content that was loaded or refused last; only load uses it
}

func (f *certificateFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return f.current.Load(), nil
}

// load reads the files, and takes them if they differ from those that it saw last. The
// content tells, not the time: files in a volume of Kubernetes are links to others.
func (f *certificateFiles) load() (changed bool, err error) {
	cert, err := os.ReadFile(f.cert)
	if err != nil {
		return false, err
	}
	key, err := os.ReadFile(f.key)
	if err != nil {
		return false, err
	}
	content := append(append(cert, 0), key...)
	if bytes.Equal(content, f.seen) {
		return false, nil
	}
	f.seen = content
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return true, fmt.Errorf("%s and %s: %w", f.cert, f.key, err)
	}
	f.current.Store(&pair)
	return true, nil
}

// run takes new files until ctx ends. While they are no certificate, such as between the
// replacement of the one and of the other, the last one goes on.
func (f *certificateFiles) run(ctx context.Context) {
	look := time.NewTicker(lookForCertificate)
	defer look.Stop()
	unread := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		changed, err := f.load()
		switch {
		case err != nil && (changed || err.Error() != unread):
			f.log.Error().Err(err).Msg("the new certificate cannot be used; the server goes on with the last one")
		case err == nil && changed:
			f.log.Info().Time("until", f.current.Load().Leaf.NotAfter).Msg("the server has a new certificate")
		}
		if unread = ""; err != nil && !changed {
			unread = err.Error()
		}
	}
}

// handshakesAtOnce is how many handshakes wait for a certificate at once. Only while the authority
// has not given the first one do they wait at all, for minutes if it is slow, and also after their
// clients have gone.
const handshakesAtOnce = 100

var errManyWait = errors.New("many clients wait for the certificate already")

// waitingAtMost has no more handshakes wait for get at once. The authority's own, which asks for
// the proof, does not wait.
func waitingAtMost(n int, get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	turns := make(chan struct{}, n)
	return func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if slices.Contains(hello.SupportedProtos, acme.ALPNProto) {
			return get(hello)
		}
		select {
		case turns <- struct{}{}:
			defer func() { <-turns }()
			return get(hello)
		default:
			return nil, errManyWait
		}
	}
}

// domainCertificates come from an authority by ACME. It asks for proof on port 443 of the
// domain (tls-alpn-01), and the listener gives it; or, with --http-redirect, on port 80
// (http-01). The first visitor of a domain waits for
// its first certificate; autocert renews it in time.
func domainCertificates(cfg Config, log zerolog.Logger) *certificates {
	manager := &autocert.Manager{
		Prompt:     autocert.AcceptTOS,
		Cache:      autocert.DirCache(cfg.acmeDir()),
		HostPolicy: autocert.HostWhitelist(cfg.Domains...),
		Client:     &acme.Client{DirectoryURL: cfg.ACMEURL, UserAgent: "headcount"},
		Email:      cfg.ACMEEmail,
	}
	var redirect http.Handler
	if cfg.Redirect != "" { // the manager offers this proof once it is asked for the handler
		redirect = manager.HTTPHandler(toHTTPS{domains(cfg.Domains)})
	}
	config := manager.TLSConfig()
	var told atomic.Int64                                             // the last minute in which something was logged
	last := make([]atomic.Pointer[tls.Certificate], len(cfg.Domains)) // what was shown for each
	get := waitingAtMost(handshakesAtOnce, manager.GetCertificate)
	config.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := get(hello)
		domain := slices.Index(cfg.Domains, strings.ToLower(hello.ServerName))
		if err == nil && domain >= 0 && cert.Leaf != nil && !slices.Contains(hello.SupportedProtos, acme.ALPNProto) {
			last[domain].Store(cert)
		}
		if minute := time.Now().Unix() / 60; err != nil && domain >= 0 && told.Swap(minute) != minute {
			log.Error().Err(err).Str("domain", hello.ServerName).Msg("there is no certificate for a visitor; does port 443 of the domain lead to --listen? This is logged at most once a minute")
		}
		return cert, err
	}
	shown := func() (all []*tls.Certificate) {
		for i := range last {
			if cert := last[i].Load(); cert != nil {
				all = append(all, cert)
			}
		}
		return all
	}
	return &certificates{config, func(context.Context) {}, redirect, shown}
}
