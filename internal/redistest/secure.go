package redistest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"headcount/internal/servertest"
)

// certificate returns the certificate of this test process's servers. It sets SSL_CERT_FILE, as the documentation says,
// so that this process and those that it starts trust it. It has to be called before the first TLS connection of the
// process, because Go reads that file only once.
func certificate(t testing.TB) servertest.Certificate {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()

	if shared.loopback.File == "" {
		c, err := servertest.NewLoopbackCertificate(sharedDir(t, "certificate"))
		if err == nil {
			err = os.Setenv("SSL_CERT_FILE", c.File)
		}
		if err != nil {
			t.Fatal(err)
		}
		shared.loopback = c
	}

	return shared.loopback
}

// ACL returns the path of the file of Redis users that the documentation recommends.
func ACL() string {
	// Searched upward from the package whose tests run, because a path from the build may be trimmed.
	dir, _ := os.Getwd()
	for {
		file := filepath.Join(dir, "deploy", "redis.acl")
		if _, err := os.Stat(file); err == nil || dir == filepath.Dir(dir) {
			return file
		}
		dir = filepath.Dir(dir)
	}
}

// user matches the first line of a file of Redis users, with the name and the password.
var user = regexp.MustCompile(`^user (\S+) on >(\S+) `)

// login returns the name and the password of the user in ACL, as a URL has them.
func login(t testing.TB) string {
	t.Helper()

	text, err := os.ReadFile(ACL())
	if err != nil {
		t.Fatal(err)
	}

	m := user.FindSubmatch(text)
	if m == nil {
		t.Fatal("redistest: deploy/redis.acl does not begin with a user that is on and has a password")
	}

	return string(m[1]) + ":" + string(m[2])
}

// StartSecure starts a server that speaks only TLS, with a certificate that this process trusts, and has the user of
// deploy/redis.acl. Its URL is for that user.
func StartSecure(t testing.TB, args ...string) *Server {
	t.Helper()
	return newSecure(t, t.TempDir(), args...).startFor(t)
}

func newSecure(t testing.TB, dir string, args ...string) *Server {
	t.Helper()
	s := newServer(dir)
	c := certificate(t)

	s.login = login(t)
	// Clients trust only this certificate, so that they notice a wrong one.
	s.tls = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}

	text, err := os.ReadFile(c.File)
	if err != nil || !s.tls.RootCAs.AppendCertsFromPEM(text) {
		t.Fatalf("read the certificate: %v", err)
	}
	// There is no plain port, so a client without TLS fails.
	s.args = append(s.args, "--port", "0", "--tls-port", s.port, "--tls-auth-clients", "no", "--aclfile", ACL(),
		"--tls-cert-file", c.File, "--tls-key-file", c.Key, "--tls-ca-cert-file", c.File)
	s.args = append(s.args, args...)

	return s
}

// StartSecureCluster starts a Cluster of masters whose servers are like those of StartSecure.
func StartSecureCluster(t testing.TB, masters int) *Cluster {
	t.Helper()
	c := &Cluster{}
	t.Cleanup(c.Kill)
	c.start(t, t.TempDir(), masters, 0, func(dir string, args ...string) *Server {
		return newSecure(t, dir, append(args, "--tls-cluster", "yes")...)
	})

	return c
}

// StartSentinelWithUser is StartSentinel with the user of deploy/redis.acl. Its URL is for that user.
func StartSentinelWithUser(t testing.TB) *Sentinel {
	t.Helper()

	s := StartSentinel(t, "--aclfile", ACL())
	s.Master.login = login(t)
	return s
}

// Denied returns what the server has denied its users since it started. Each line has the reason, the object and the
// user.
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
