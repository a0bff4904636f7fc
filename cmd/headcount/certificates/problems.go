package certificates

import (
	"cmp"
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

// renewWithin is how long before its end a certificate should have been renewed, or a third of
// its lifetime if that is shorter.
const renewWithin = 14 * 24 * time.Hour

// Day returns a time as sentences about certificates write it.
func Day(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 MST") }

// CheckAge returns the problem with a certificate's period of validity.
func CheckAge(cert *x509.Certificate, now time.Time) error {
	left := cert.NotAfter.Sub(now)
	// The most urgent first: what has ended may also have been due for long.
	switch {
	case left <= 0:
		return fmt.Errorf("the certificate ended on %s, and visitors are turned away; renew it", Day(cert.NotAfter))
	case now.Before(cert.NotBefore):
		return fmt.Errorf("the certificate begins on %s only; see whether the clock of this machine is right",
			Day(cert.NotBefore))
	// Certificates of a few days would otherwise always seem overdue.
	case left < min(renewWithin, cert.NotAfter.Sub(cert.NotBefore)/3):
		return fmt.Errorf("the certificate ends on %s, and should have been renewed by now; see why it was not",
			Day(cert.NotAfter))
	default:
		return nil
	}
}

// CheckName returns the problem if a certificate is not for the host.
func CheckName(cert *x509.Certificate, host string) error {
	if cert.VerifyHostname(host) == nil {
		return nil
	}

	names := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		names = append(names, ip.String())
	}

	if len(names) == 0 {
		names = []string{"no host"}
	}

	return fmt.Errorf("the certificate is for %s, and not for %s; get one for that name",
		strings.Join(names, ", "), host)
}

// Check returns why visitors do not trust the certificates of a host. roots are the authorities that they trust; nil:
// those of this system.
func Check(chain []*x509.Certificate, host string, roots *x509.CertPool, now time.Time) error {
	leaf := chain[0]
	// Before the chain, whose error would name the same problem less plainly.
	if err := cmp.Or(CheckAge(leaf, now), CheckName(leaf, host)); err != nil {
		return err
	}

	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}

	opts := x509.VerifyOptions{DNSName: host, Intermediates: between, Roots: roots, CurrentTime: now}
	_, err := leaf.Verify(opts)

	// Both mistakes give the same error: a missing intermediate and an authority that nobody knows.
	unknown := errors.As(err, new(x509.UnknownAuthorityError))
	alone := len(chain) == 1

	switch {
	case err == nil:
		return nil
	case !unknown:
		return fmt.Errorf("the certificate is not trusted: %s", strings.Join(strings.Fields(err.Error()), " "))
	case alone:
		return fmt.Errorf("the certificate comes alone, and no authority that this machine knows has signed it; "+
			"give the whole chain, with the intermediate certificates after it (signed by %q)", leaf.Issuer)
	default:
		return fmt.Errorf("no authority that this machine knows has signed the certificate (%q has); get one from "+
			"an authority that browsers know", chain[len(chain)-1].Issuer)
	}
}

// Of returns the host of an https URL and the certificates that it shows its visitors; none if it does not answer.
func Of(ctx context.Context, address string) (host string, chain []*x509.Certificate) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" {
		return "", nil
	}

	// Check verifies the chain that the dialer takes unseen.
	dialer := tls.Dialer{Config: &tls.Config{ServerName: u.Hostname(), InsecureSkipVerify: true}}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	if err != nil {
		return u.Hostname(), nil
	}
	defer conn.Close()

	return u.Hostname(), conn.(*tls.Conn).ConnectionState().PeerCertificates
}
