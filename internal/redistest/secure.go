package redistest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Authority is the certificate authority of this test process.
type Authority struct {
	file string // its certificate
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

// Trust returns the authority of this test process, and has this process and
// those it starts trust it, as documented: by SSL_CERT_FILE. Call it before
// the first TLS connection of the process, because Go reads that file once.
func Trust(t testing.TB) *Authority {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.authority == nil {
		a, err := newAuthority(sharedDir(t, "authority"))
		if err == nil {
			err = os.Setenv("SSL_CERT_FILE", a.file)
		}
		if err != nil {
			t.Fatal(err)
		}
		shared.authority = a
	}
	return shared.authority
}

func newAuthority(dir string) (*Authority, error) {
	a := &Authority{file: filepath.Join(dir, "ca.pem"), pool: x509.NewCertPool()}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, err
	}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Authority of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, &a.key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a.pool.AddCert(a.cert)
	return a, writePEM(a.file, "CERTIFICATE", der)
}

// issue writes a key and a certificate of 127.0.0.1 into dir.
func (a *Authority) issue(dir string) (certFile, keyFile string, err error) {
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return "", "", err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "redis of a test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, // a server of a Cluster is both
	}, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return "", "", err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", err
	}
	return certFile, keyFile, errors.Join(writePEM(certFile, "CERTIFICATE", der), writePEM(keyFile, "PRIVATE KEY", private))
}

func writePEM(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// ACL is the file of Redis users that the product documents.
func ACL() string {
	dir, _ := os.Getwd() // of a package, or the root: a path from the build may be trimmed
	for {
		file := filepath.Join(dir, "deploy", "redis.acl")
		if _, err := os.Stat(file); err == nil || dir == filepath.Dir(dir) {
			return file
		}
		dir = filepath.Dir(dir)
	}
}

// user is the name and the password in a file of Redis users with one user.
var user = regexp.MustCompile(`^user (\S+) on >(\S+) `)

// login is the user of ACL, as a URL has it.
func login() (string, error) {
	text, err := os.ReadFile(ACL())
	if err != nil {
		return "", err
	}
	m := user.FindSubmatch(text)
	if m == nil {
		return "", errors.New("redistest: deploy/redis.acl does not begin with a user that is on and has a password")
	}
	return string(m[1]) + ":" + string(m[2]), nil
}

// StartSecure starts a server that speaks TLS alone, with a certificate of
// Trust's authority, and knows the user of deploy/redis.acl. URL is for that user.
func StartSecure(t testing.TB, args ...string) *Server {
	t.Helper()
	s, err := newSecure(t.TempDir(), Trust(t), args...)
	if err != nil {
		t.Fatal(err)
	}
	return s.startFor(t)
}

func newSecure(dir string, a *Authority, args ...string) (*Server, error) {
	s := newServer(dir)
	var err error
	if s.login, err = login(); err != nil {
		return nil, err
	}
	cert, key, err := a.issue(dir)
	if err != nil {
		return nil, err
	}
	s.tls = &tls.Config{RootCAs: a.pool, MinVersion: tls.VersionTLS12}
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		return nil, err
	}
	s.args = append(s.args, "--port", "0", "--tls-port", port, "--tls-auth-clients", "no", "--aclfile", ACL(),
		"--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", a.file)
	s.args = append(s.args, args...)
	return s, nil
}

// StartSecureCluster is StartCluster of masters alone, as StartSecure.
func StartSecureCluster(t testing.TB, masters int) *Cluster {
	t.Helper()
	a := Trust(t)
	c, err := startCluster(t.TempDir(), masters, 0, func(dir string, args ...string) (*Server, error) {
		return newSecure(dir, a, append(args, "--tls-cluster", "yes")...)
	})
	if c != nil {
		t.Cleanup(c.Kill)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// StartSentinelWithUser is StartSentinel of servers that know the user of
// deploy/redis.acl. URL is for that user.
func StartSentinelWithUser(t testing.TB) *Sentinel {
	t.Helper()
	s := StartSentinel(t, "--aclfile", ACL())
	var err error
	if s.Master.login, err = login(); err != nil {
		t.Fatal(err)
	}
	return s
}

// Denied is what the server has refused its users since it started, one line
// each: the reason, the object and the user.
func (s *Server) Denied(t testing.TB) []string {
	t.Helper()
	c := s.Client()
	defer c.Close()
	log, err := c.ACLLog(context.Background(), 100).Result()
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, l := range log {
		all = append(all, strings.Join([]string{l.Reason, l.Object, l.Username}, " "))
	}
	return all
}
