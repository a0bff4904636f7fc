// Package certificates has the certificates that visitors of a server are shown: from files that are replaced when they
// are renewed, or from an authority, by ACME. It also says what visitors would think of a certificate.
package certificates

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/crypto/acme"
	"golang.org/x/crypto/acme/autocert"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"headcount/internal/setting"
)

// poll is the time between two reads of the files of the certificate.
const poll = time.Second

// Config names the files of a certificate, or the domains for which an authority issues certificates.
type Config struct {
	Cert, Key string // files, as PEM

	Domains   []string // as setting.HostName writes them
	Directory string   // the URL of the authority
	Email     string   // to which it may write
	Dir       string   // where its certificates are kept
	Plain     bool     // visitors also come to port 80, and the authority may check its proof there

	Log zerolog.Logger
}

// Certificates are the certificates of a listener.
type Certificates struct {
	*tls.Config
	Run      func(context.Context)     // keeps them current until ctx ends
	Redirect http.Handler              // sends visitors without TLS to https
	Shown    func() []*tls.Certificate // the certificates in use
}

// Overdue reports whether a certificate in use should have been renewed by now.
func (c *Certificates) Overdue() bool {
	old := func(cert *tls.Certificate) bool { return CheckAge(cert.Leaf, time.Now()) != nil }

	return slices.ContainsFunc(c.Shown(), old)
}

// Open opens the certificates. It fails if the files of a certificate, or the directory for those of an authority,
// cannot be used.
func Open(cfg Config) (*Certificates, error) {
	if len(cfg.Domains) > 0 {
		if err := makeWritable(cfg.Dir); err != nil {
			return nil, setting.Errorf("acme-dir", "%v; name a directory that this process may write", err)
		}

		return ofDomains(cfg), nil
	}

	// The files are read at the start, so that a wrong one is refused before visitors come.
	f := &files{cert: cfg.Cert, key: cfg.Key, log: cfg.Log}
	if _, err := f.load(); err != nil {
		return nil, setting.Errorf("tls-cert", "%v; name the files of a certificate and its key that this process "+
			"can read", err)
	}

	shown := func() []*tls.Certificate { return []*tls.Certificate{f.current.Load()} }

	return &Certificates{&tls.Config{GetCertificate: f.get}, f.run, toHTTPS{f}, shown}, nil
}

// makeWritable makes the directory, unless it is there, and fails if this process may not write there.
func makeWritable(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}

	// Nothing is written: on a full disk the certificates that are there serve on.
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}

	return nil
}

// hosts is the set of hosts that have a certificate.
type hosts interface{ has(host string) bool }

func (f *files) has(host string) bool {
	return f.current.Load().Leaf.VerifyHostname(host) == nil
}

type domains []string

func (d domains) has(host string) bool { return d.index(host) >= 0 }

// index returns the index of the domain that a client names, in whatever spelling, or -1.
func (d domains) index(name string) int {
	host, ok := setting.HostName(name)
	if !ok {
		return -1
	}

	return slices.Index(d, host)
}

// toHTTPS redirects visitors of hosts to port 443 of the same host.
type toHTTPS struct{ hosts }

// redirectMaxAge bounds how long a browser may remember the redirect, because an operator may remove it.
const redirectMaxAge = "max-age=3600"

// OverTLSAlone makes browsers use https by themselves, for as long as they may remember the redirect.
func OverTLSAlone(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Strict-Transport-Security", redirectMaxAge)
		handler.ServeHTTP(w, r)
	})
}

func (h toHTTPS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The redirect is to port 443, so the port of the request goes.
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}

	// A redirect to a name without a certificate would only lead visitors to a warning.
	if !h.has(host) {
		http.Error(w, "this server has no certificate for that host", http.StatusMisdirectedRequest)
		return
	}

	// Permanent, so that also a POST keeps its method and body; the header bounds how long that is.
	w.Header().Set("Cache-Control", redirectMaxAge)
	w.Header().Set("Location", "https://"+host+r.URL.RequestURI())
	w.WriteHeader(http.StatusPermanentRedirect)
}

// files is a certificate in two files, which are replaced when it is renewed.
type files struct {
	cert, key string
	log       zerolog.Logger
	current   atomic.Pointer[tls.Certificate]
	seen      []byte // the content that was loaded or refused last; only load uses it
}

func (f *files) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return f.current.Load(), nil
}

// load reads the files, and uses the certificate if the content differs from the last one. It does not
// compare times, because files in a Kubernetes volume are links to other files.
func (f *files) load() (changed bool, err error) {
	cert, err := os.ReadFile(f.cert)
	if err != nil {
		return false, err
	}

	key, err := os.ReadFile(f.key)
	if err != nil {
		return false, err
	}

	// The 0 byte keeps a line that moves from one file to the other from looking like no change.
	content := append(append(cert, 0), key...)
	if bytes.Equal(content, f.seen) {
		return false, nil
	}

	// Remembered also when it is refused, or the error would be logged each second.
	f.seen = content

	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return true, fmt.Errorf("%s and %s: %w", f.cert, f.key, err)
	}

	// Handshakes read the pointer without a lock; those under way keep the former certificate.
	f.current.Store(&pair)

	return true, nil
}

// run loads new files until ctx ends. While they are not a valid pair, for instance between the replacement
// of one file and of the other, the last certificate stays in use.
func (f *files) run(ctx context.Context) {
	look := time.NewTicker(poll)
	defer look.Stop()

	unread := "" // the error of the last read, if the files could not be read

	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}

		changed, err := f.load()
		// Files that cannot be read give the same error each second, which is logged once.
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

// MaxWaiting bounds the handshakes of a domain that wait for a certificate. They wait only until the
// authority has issued the first certificate of their kind (ECDSA or RSA), which may take minutes, and keep
// waiting even after their clients have gone.
const MaxWaiting = 100

var errManyWait = errors.New("many clients wait for the certificate already")

type getCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// boundedWait returns get with a bound of n handshakes that wait for it at once. The handshake of the authority, which
// checks the proof, is not bounded.
func boundedWait(n int, get getCertificate) getCertificate {
	places := make(chan struct{}, n)

	return func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if slices.Contains(hello.SupportedProtos, acme.ALPNProto) {
			return get(hello)
		}

		// Refused instead of queued: a client that has gone would keep its place in a queue.
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			return get(hello)
		default:
			return nil, errManyWait
		}
	}
}

// handshake is what a visitor asked for and was shown.
type handshake struct {
	hello *tls.ClientHelloInfo
	cert  *tls.Certificate
}

// kindOnly returns the part of a hello that decides on the kind of the certificate, without the connection.
func kindOnly(hello *tls.ClientHelloInfo) *tls.ClientHelloInfo {
	return &tls.ClientHelloInfo{
		ServerName: hello.ServerName, CipherSuites: hello.CipherSuites,
		SignatureSchemes: hello.SignatureSchemes, SupportedCurves: hello.SupportedCurves,
	}
}

// ofDomains returns certificates that an authority issues by ACME. The authority checks for a
// proof on port 443 of the domain (tls-alpn-01), which the listener gives, or with cfg.Plain on port 80
// (http-01). The first visitor of a domain waits for its first certificate; autocert renews it in time.
func ofDomains(cfg Config) *Certificates {
	manager := &autocert.Manager{
		Prompt:     autocert.AcceptTOS,
		Cache:      autocert.DirCache(cfg.Dir),
		HostPolicy: autocert.HostWhitelist(cfg.Domains...),
		Client:     &acme.Client{DirectoryURL: cfg.Directory, UserAgent: "headcount"},
		Email:      cfg.Email,
	}

	var redirect http.Handler
	if cfg.Plain { // the manager offers http-01 only after a call of HTTPHandler
		redirect = manager.HTTPHandler(toHTTPS{domains(cfg.Domains)})
	}

	config := manager.TLSConfig()
	// Strangers can make handshakes fail as often as they like, and must not fill the log.
	logged := rate.Sometimes{Interval: time.Minute}
	last := make([]atomic.Pointer[handshake], len(cfg.Domains)) // the last one of each domain
	gets := make([]func(*tls.ClientHelloInfo) (*tls.Certificate, error), len(cfg.Domains))
	// Each domain has a bound of its own, so one whose proof fails holds up no other.
	for i := range gets {
		gets[i] = boundedWait(MaxWaiting, manager.GetCertificate)
	}

	config.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		// In any spelling that the manager takes, or another one would be a way around the bound.
		domain := domains(cfg.Domains).index(hello.ServerName)
		get := manager.GetCertificate // which refuses all other names at once
		if domain >= 0 {
			get = gets[domain]
		}
		cert, err := get(hello)

		// The certificate of the proof is shown to the authority alone, and is none for visitors.
		issued := err == nil && domain >= 0 && cert.Leaf != nil
		if issued && !slices.Contains(hello.SupportedProtos, acme.ALPNProto) {
			last[domain].Store(&handshake{hello: kindOnly(hello), cert: cert})
		}

		if errors.Is(err, errManyWait) {
			// Those that wait need a certificate of another kind (ECDSA or RSA), so this client gets the last one. It
			// is not noted for this client's kind, for which the manager would make everybody wait.
			if known := last[domain].Load(); known != nil {
				cert = known.cert
				err = nil
			}
		}

		if err != nil && domain >= 0 {
			logged.Do(func() {
				cfg.Log.Error().Err(err).Str("domain", hello.ServerName).Msg("there is no certificate for a visitor; " +
					"does port 443 of the domain lead to --listen? This is logged at most once a minute")
			})
		}

		return cert, err
	}
	shown := func() (all []*tls.Certificate) {
		for i := range last {
			shake := last[i].Load()
			if shake == nil {
				continue
			}

			// The manager renews also what nobody is shown, so it is asked what the next client like
			// this one would be shown.
			cert, err := manager.GetCertificate(shake.hello)
			if err != nil {
				cert = shake.cert
			}
			all = append(all, cert)
		}
		return all
	}

	return &Certificates{config, func(context.Context) {}, redirect, shown}
}
