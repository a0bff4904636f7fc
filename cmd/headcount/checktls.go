package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"
)

// checkCertificates checks the files of --tls-cert, and the certificates of the public address.
func (c *checkCommand) checkCertificates(ctx context.Context, f *findings, _ bool) {
	host, shown := c.shown(ctx)
	if c.Config.TLSCert != "" {
		const thing = "--tls-cert"
		files := certificateFiles{cert: c.Config.TLSCert, key: c.Config.TLSKey}
		if _, err := files.load(); err != nil {
			f.wrongf(thing, "the certificate and its key cannot be used: %s; give the files of a pair in PEM.",
				oneLine(err))
			return
		}

		leaf := files.current.Load().Leaf
		problem := ageProblem(leaf, time.Now())
		ours := len(shown) == 0 || shown[0].Equal(leaf) // else a proxy in front has a certificate of its own
		if problem == "" && ours && host != "" {
			problem = nameProblem(leaf, host)
		}

		if problem != "" {
			f.wrongf(thing, "%s", problem)
			if ours {
				return // the public address has this certificate, so its problem is reported already
			}
		} else {
			f.finef(thing, "it fits its key, and is good until %s.", day(leaf.NotAfter))
		}
	}

	if len(shown) > 0 {
		if problem := chainProblem(shown, host, nil, time.Now()); problem != "" {
			f.wrongf("--public-url", "%s", problem)
		} else {
			f.finef("--public-url", "its certificate is for %s, and good until %s.", host, day(shown[0].NotAfter))
		}
	}
}

// shown returns the host of an https --public-url and the certificates that it presents to
// visitors; none if it does not answer.
func (c *checkCommand) shown(ctx context.Context) (host string, chain []*x509.Certificate) {
	u, err := url.Parse(c.PublicURL)
	if err != nil || u.Scheme != "https" {
		return "", nil
	}

	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()
	port := u.Port()
	if port == "" {
		port = "443"
	}

	// chainProblem verifies the chain that the dialer takes unseen.
	dialer := tls.Dialer{Config: &tls.Config{ServerName: u.Hostname(), InsecureSkipVerify: true}}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return u.Hostname(), nil
	}

	defer conn.Close()
	return u.Hostname(), conn.(*tls.Conn).ConnectionState().PeerCertificates
}

// renewWithin is how long before its end a certificate should have been renewed, or a third of
// its lifetime if that is shorter.
const renewWithin = 14 * 24 * time.Hour

func day(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 MST") }

// ageProblem returns the problem with a certificate's period of validity, or "".
func ageProblem(cert *x509.Certificate, now time.Time) string {
	left := cert.NotAfter.Sub(now)
	switch {
	case left <= 0:
		return fmt.Sprintf("the certificate ended on %s, and visitors are turned away; renew it.", day(cert.NotAfter))
	case now.Before(cert.NotBefore):
		return fmt.Sprintf("the certificate begins on %s only; see whether the clock of this machine is right.",
			day(cert.NotBefore))
	case left < min(renewWithin, cert.NotAfter.Sub(cert.NotBefore)/3):
		return fmt.Sprintf("the certificate ends on %s, and should have been renewed by now; see why it was not.",
			day(cert.NotAfter))
	default:
		return ""
	}
}

// nameProblem returns the problem if a certificate is not for the host, or "".
func nameProblem(cert *x509.Certificate, host string) string {
	if cert.VerifyHostname(host) == nil {
		return ""
	}

	names := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		names = append(names, ip.String())
	}

	if len(names) == 0 {
		names = []string{"no host"}
	}

	return fmt.Sprintf("the certificate is for %s, and not for %s; get one for that name.",
		strings.Join(names, ", "), host)
}

// chainProblem returns why visitors do not trust the certificates of a host, or "". roots are the
// authorities that they trust; nil: those of this system.
func chainProblem(chain []*x509.Certificate, host string, roots *x509.CertPool, now time.Time) string {
	leaf := chain[0]
	if problem := ageProblem(leaf, now); problem != "" {
		return problem
	}
	if problem := nameProblem(leaf, host); problem != "" {
		return problem
	}

	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}

	opts := x509.VerifyOptions{DNSName: host, Intermediates: between, Roots: roots, CurrentTime: now}
	_, err := leaf.Verify(opts)

	unknown := errors.As(err, new(x509.UnknownAuthorityError))
	alone := len(chain) == 1

	switch {
	case err == nil:
		return ""
	case !unknown:
		return fmt.Sprintf("the certificate is not trusted: %s.", oneLine(err))
	case alone:
		return fmt.Sprintf("the certificate comes alone, and no authority that this machine knows has signed it; "+
			"give the whole chain, with the intermediate certificates after it (signed by %q).", leaf.Issuer)
	default:
		return fmt.Sprintf("no authority that this machine knows has signed the certificate (%q has); get one from "+
			"an authority that browsers know.", chain[len(chain)-1].Issuer)
	}
}
