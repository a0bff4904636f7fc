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
	"golang.org/x/time/rate"

	"headcount/internal/setting"
)

// certificatePoll is the time between two reads of the files of the certificate.
const certificatePoll = time.Second

// HasTLS reports whether visitors use TLS to this process.
func (c *Config) HasTLS() bool { return c.TLSCert != "" || len(c.Domains) > 0 }

// acmeDir returns the directory of the certificates of --domain.
func (c *Config) acmeDir() string {
	if c.ACMEDir == "" && c.DataDir != "" {
		return filepath.Join(c.DataDir, "acme")
	}

	return c.ACMEDir
}

func (c *Config) checkTLS() error {
	if c.TLSCert != "" && c.TLSKey == "" {
		return setting.Errorf("tls-key", "it is missing; name the file of the key that belongs to --tls-cert")
	}
	if c.TLSKey != "" && c.TLSCert == "" {
		return setting.Errorf("tls-cert", "it is missing; name the file of the certificate that belongs to --tls-key")
	}
	if c.TLSCert != "" && len(c.Domains) > 0 {
		return setting.Errorf("domain", "--tls-cert gives a certificate already; leave one of the two out")
	}
	if c.Redirect != "" && !c.HasTLS() {
		return setting.Errorf("http-redirect", "this process does not speak TLS, so it cannot send visitors to "+
			"https; give --domain or --tls-cert, or leave the redirect to the proxy")
	}
	if len(c.Domains) > 0 && c.acmeDir() == "" {
		return setting.Errorf("acme-dir", "--domain needs a directory, since an authority gives few new "+
			"certificates a week; name one that outlives the process, or give --data-dir")
	}

	for _, name := range c.Domains {
		if !isHostName(name) {
			return setting.Errorf("domain", "%q is not the full name of a host; write one like "+
				"counter.example.com", name)
		}
	}

	if len(c.Domains) > 0 && !setting.IsWebURL(c.ACMEURL) {
		return setting.Errorf("acme-url", "it is not an http or https URL; write https://host/path of the "+
			"authority's directory")
	}

	return nil
}

// isHostName reports whether the name is the full name of a host, and not its address.
func isHostName(name string) bool {
	_, err := netip.ParseAddr(name)
	isAddress := err == nil
	hasDot := strings.Contains(strings.Trim(name, "."), ".")

	return !isAddress && hasDot && !strings.ContainsAny(name, "*/: ")
}

// certificates are the certificates of the public listener.
type certificates struct {
	*tls.Config
	run      func(context.Context) // keeps them current until ctx ends
	redirect http.Handler          // of --http-redirect
	shown    func() []*tls.Certificate
}

// overdue reports whether a certificate in use should have been renewed by now.
func (c *certificates) overdue() bool {
	old := func(cert *tls.Certificate) bool { return ageProblem(cert.Leaf, time.Now()) != "" }

	return slices.ContainsFunc(c.shown(), old)
}

// openCertificates opens the certificates of the settings. It fails if the files of a certificate cannot be used.
func openCertificates(cfg Config, log zerolog.Logger) (*certificates, error) {
	if len(cfg.Domains) > 0 {
		return domainCertificates(cfg, log), nil
	}

	f := &certificateFiles{cert: cfg.TLSCert, key: cfg.TLSKey, log: log}
	if _, err := f.load(); err != nil {
		return nil, setting.Errorf("tls-cert", "%v; name the files of a certificate and its key that this process "+
			"can read", err)
	}

	shown := func() []*tls.Certificate { return []*tls.Certificate{f.current.Load()} }

	return &certificates{&tls.Config{GetCertificate: f.get}, f.run, toHTTPS{f}, shown}, nil
}

// hosts is the set of hosts that have a certificate.
type hosts interface{ has(host string) bool }

func (f *certificateFiles) has(host string) bool {
	return f.current.Load().Leaf.VerifyHostname(host) == nil
}

type domains []string

func (d domains) has(host string) bool { return slices.Contains(d, strings.ToLower(host)) }

// toHTTPS redirects visitors of hosts to port 443 of the same host.
type toHTTPS struct{ hosts }

// redirectMaxAge bounds how long a browser may remember the redirect, because an operator may remove it.
const redirectMaxAge = "max-age=3600"

// overTLSAlone makes browsers use https by themselves, for as long as they may remember the redirect.
func overTLSAlone(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Strict-Transport-Security", redirectMaxAge)
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

	w.Header().Set("Cache-Control", redirectMaxAge)
	w.Header().Set("Location", "https://"+host+r.URL.RequestURI())
	w.WriteHeader(http.StatusPermanentRedirect)
}

// certificateFiles is a certificate in two files, which are replaced when it is renewed.
type certificateFiles struct {
	cert, key string
	log       zerolog.Logger
	current   atomic.Pointer[tls.Certificate]
	seen      []byte // the content that was loaded or refused last; only load uses it
}

func (f *certificateFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return f.current.Load(), nil
}

// load reads the files, and uses the certificate if the content differs from the last one. It does not
// compare times, because files in a Kubernetes volume are links to other files.
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

// run loads new files until ctx ends. While they are not a valid pair, for instance between the replacement
// of one file and of the other, the last certificate stays in use.
func (f *certificateFiles) run(ctx context.Context) {
	look := time.NewTicker(certificatePoll)
	defer look.Stop()

	unread := "" // the error of the last read, if the files could not be read

	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}

		changed, err := f.load()
		isNews := changed || err != nil && err.Error() != unread
		if isNews && err != nil {
			f.log.Error().Err(err).Msg("the new certificate cannot be used; the server keeps using the last one")
		} else if isNews {
			f.log.Info().Time("until", f.current.Load().Leaf.NotAfter).Msg("the server has a new certificate")
		}

		unread = ""
		if err != nil && !changed {
			unread = err.Error()
		}
	}
}

// maxWaitingHandshakes bounds the handshakes of a domain that wait for a certificate. They wait only until the
// authority has issued the first certificate of their kind (ECDSA or RSA), which may take minutes, and keep
// waiting even after their clients have gone.
const maxWaitingHandshakes = 100

var errManyWait = errors.New("many clients wait for the certificate already")

type getCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// boundedWait returns get with a bound of n handshakes that wait for it at once. The handshake of the authority, which
// checks the proof, is not bounded.
func boundedWait(n int, get getCertificate) getCertificate {
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

// domainCertificates returns certificates that an authority issues by ACME. The authority checks for a
// proof on port 443 of the domain (tls-alpn-01), which the listener gives, or with --http-redirect on port
// 80 (http-01). The first visitor of a domain waits for its first certificate; autocert renews it in time.
func domainCertificates(cfg Config, log zerolog.Logger) *certificates {
	manager := &autocert.Manager{
		Prompt:     autocert.AcceptTOS,
		Cache:      autocert.DirCache(cfg.acmeDir()),
		HostPolicy: autocert.HostWhitelist(cfg.Domains...),
		Client:     &acme.Client{DirectoryURL: cfg.ACMEURL, UserAgent: "headcount"},
		Email:      cfg.ACMEEmail,
	}

	var redirect http.Handler
	if cfg.Redirect != "" { // the manager offers http-01 only after a call of HTTPHandler
		redirect = manager.HTTPHandler(toHTTPS{domains(cfg.Domains)})
	}

	config := manager.TLSConfig()
	logged := rate.Sometimes{Interval: time.Minute}
	last := make([]atomic.Pointer[tls.Certificate], len(cfg.Domains)) // the last certificate of each domain
	gets := make([]func(*tls.ClientHelloInfo) (*tls.Certificate, error), len(cfg.Domains))
	for i := range gets {
		gets[i] = boundedWait(maxWaitingHandshakes, manager.GetCertificate)
	}

	config.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		domain := slices.Index(cfg.Domains, strings.ToLower(hello.ServerName))
		get := manager.GetCertificate // which refuses all other names at once
		if domain >= 0 {
			get = gets[domain]
		}
		cert, err := get(hello)

		if errors.Is(err, errManyWait) {
			// Those who wait need a certificate of the other kind.
			if known := last[domain].Load(); known != nil {
				cert = known
				err = nil
			}
		}

		issued := err == nil && domain >= 0 && cert.Leaf != nil
		if issued && !slices.Contains(hello.SupportedProtos, acme.ALPNProto) {
			last[domain].Store(cert)
		}

		if err != nil && domain >= 0 {
			logged.Do(func() {
				log.Error().Err(err).Str("domain", hello.ServerName).Msg("there is no certificate for a visitor; " +
					"does port 443 of the domain lead to --listen? This is logged at most once a minute")
			})
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
