package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/cmd/headcount/certificates"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// addresses receives the address of --listen from the log.
type addresses chan string

func (a addresses) Write(line []byte) (int, error) {
	var said struct{ Listen string }
	if json.Unmarshal(line, &said) == nil && said.Listen != "" {
		a <- said.Listen
	}

	return len(line), nil
}

// serveHere serves in this process until the test ends, and returns the address of --listen.
func serveHere(t *testing.T, args ...string) string {
	t.Helper()
	cfg, err := read(t, append(args, "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"), nil, "")
	if err != nil {
		t.Fatal(err)
	}

	said := make(addresses, 1)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, cfg, zerolog.New(said)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	select {
	case addr := <-said:
		return addr
	case err := <-ended:
		ended <- nil
		t.Fatal(err)
	}

	return ""
}

// serial returns the serial number of the certificate that a visitor receives.
func serial(t *testing.T, addr string, a *authority) int64 {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(a.root)
	c, err := tls.Dial("tcp", addr, &tls.Config{ServerName: a.domain, RootCAs: roots, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	if got := c.ConnectionState().NegotiatedProtocol; got != "h2" {
		t.Fatalf("the protocol is %q, want h2", got)
	}

	return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}

// A replaced certificate comes into use. A certificate without its key does not.
func TestServerCertificateFiles(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, "counter.example.com", nil)
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")

	write := func(path string, text []byte) {
		t.Helper()
		if err := os.WriteFile(path+".new", text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}

	one, text := newKey(t)
	write(cert, a.issue(10, one.Public()))
	write(key, text)

	plain := servertest.FreeAddr()
	addr := serveHere(t, "--tls-cert="+cert, "--tls-key="+key, "--http-redirect="+plain)
	redirects(t, plain)

	insecure := &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
	}

	resp, err := insecure.Get("https://" + addr + "/p/counter")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.Header.Get("Strict-Transport-Security") != "max-age=3600" {
		t.Errorf("over TLS the headers are %v", resp.Header)
	}
	if got := serial(t, addr, a); got != 10 {
		t.Fatalf("the first certificate is %d, want another", got)
	}

	// The two files cannot be replaced at the same moment. In between the old pair is used.
	two, text := newKey(t)
	write(cert, a.issue(11, two.Public())) // the new certificate without its key
	if got := serial(t, addr, a); got != 10 {
		t.Fatalf("without its key certificate %d is used", got)
	}
	write(key, text)
	testkit.Eventually(t, "the new certificate", func() bool { return serial(t, addr, a) == 11 })
}

// redirects checks where an address without TLS sends its visitors.
func redirects(t *testing.T, addr string) {
	t.Helper()
	for host, want := range map[string]string{
		"counter.example.com":    "https://counter.example.com/a%2Fb/counter?regions=1",
		"Counter.example.com:80": "https://Counter.example.com/a%2Fb/counter?regions=1",
		"example.com":            "",
	} {
		_, answer := plainly(t, addr, host, "/a%2Fb/counter?regions=1")
		status := http.StatusPermanentRedirect
		if want == "" {
			status = http.StatusMisdirectedRequest
		}

		if got := answer.Header.Get("Location"); got != want || answer.StatusCode != status {
			t.Errorf("%s: %s, %q; want %q", host, answer.Status, got, want)
		}
	}
}

// Port 80 sends visitors to https, and gives the authority its proof.
func TestServerRedirect(t *testing.T) {
	t.Parallel()
	plain := servertest.FreeAddr()
	a := newAuthority(t, "counter.example.com", nil)
	a.plain = plain
	addr := serveHere(t, "--domain="+a.domain, "--acme-url="+a.url+"/dir",
		"--acme-dir="+filepath.Join(t.TempDir(), "acme"), "--http-redirect="+plain)
	redirects(t, plain)

	if got := serial(t, addr, a); got != 2 {
		t.Errorf("certificate %d is used", got)
	}
}

// The authority issues a certificate once, and the next process reuses it.
func TestServerDomain(t *testing.T) {
	t.Parallel()
	var addr string
	a := newAuthority(t, "counter.example.com", func() string { return addr })

	args := []string{
		"--domain=" + a.domain, "--acme-url=" + a.url + "/dir", "--acme-dir=" + filepath.Join(t.TempDir(), "acme"),
	}

	for range 2 {
		t.Run("a process", func(t *testing.T) {
			addr = serveHere(t, args...)
			if got := serial(t, addr, a); got != 2 {
				t.Fatalf("certificate %d is used, want the issued one", got)
			}
			c, err := tls.Dial("tcp", addr, &tls.Config{ServerName: "other.example.com", InsecureSkipVerify: true})
			if err == nil {
				c.Close()
				t.Error("a domain that is not in the settings got a certificate")
			}
		})
	}

	// A third process finds the certificate in the directory as well, and shows it to its first visitor.
	cfg, err := read(t, args, nil, "")
	if err != nil {
		t.Fatal(err)
	}

	certs, err := openCertificates(&cfg, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}

	before := len(certs.Shown())
	if _, err := certs.GetCertificate(&tls.ClientHelloInfo{
		ServerName: a.domain, CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256},
	}); err != nil {
		t.Fatal(err)
	}
	if after := certs.Shown(); before != 0 || len(after) != 1 || after[0].Leaf.SerialNumber.Int64() != 2 {
		t.Errorf("%d certificates were shown before, then %v", before, after)
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	if a.orders != 1 {
		t.Errorf("%d certificates were ordered, want 1", a.orders)
	}
}

// The metrics report a certificate that should have been renewed, until it is renewed.
func TestServerCertificateThatNobodyRenewed(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	files := func(left time.Duration) []string {
		return certificateFor(t, time.Now().Add(-60*day), time.Now().Add(left), "counter.example.com")
	}

	old, renewed := files(day), files(60*day)
	r := run(t, old...)
	text := fetch(t, http.MethodGet, "http://"+r.admin+"/metrics", "")
	if !strings.Contains(text, "\nheadcount_certificate_overdue 1\n") {
		t.Fatal("a certificate that ends within a day is not overdue")
	}

	for i := range old { // the certificate and the key
		_, from, _ := strings.Cut(renewed[i], "=")
		_, to, _ := strings.Cut(old[i], "=")
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}

	testkit.Eventually(t, "that a new certificate is not overdue", func() bool {
		return strings.Contains(fetch(t, http.MethodGet, "http://"+r.admin+"/metrics", ""),
			"\nheadcount_certificate_overdue 0\n")
	})
}

// A certificate is renewed without visitors, too, so one that nobody was shown since is not overdue.
func TestServerRenewedWithoutVisitors(t *testing.T) {
	t.Parallel()
	var addr string
	a := newAuthority(t, "counter.example.com", func() string { return addr })
	a.first = 10 * time.Minute // within the last third of its life, so it is renewed at once

	r := run(t, "--domain="+a.domain, "--acme-url="+a.url+"/dir", "--acme-dir="+t.TempDir())
	addr = r.public
	if got := serial(t, addr, a); got != 1 {
		t.Fatalf("the only visitor is shown certificate %d, want the first", got)
	}

	testkit.Eventually(t, "that the renewed certificate is not overdue", func() bool {
		return strings.Contains(fetch(t, http.MethodGet, "http://"+r.admin+"/metrics", ""),
			"\nheadcount_certificate_overdue 0\n")
	})

	a.mu.Lock()
	defer a.mu.Unlock()
	if a.orders != 2 {
		t.Errorf("%d certificates were ordered, want 2", a.orders)
	}
}

// newKey returns a key, and its text for a file.
func newKey(t *testing.T) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}

	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// dialShared starts a server with these settings and TLS, and connects a client that speaks HTTP/2 by hand.
func dialShared(t *testing.T, args ...string) *tls.Conn {
	t.Helper()
	a := newAuthority(t, "counter.example.com", nil)
	key, keyText := newKey(t)
	cert, private := filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	for path, text := range map[string][]byte{cert: a.issue(10, key.Public()), private: keyText} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	c, err := tls.Dial("tcp", serveHere(t, append(args, "--tls-cert="+cert, "--tls-key="+private)...),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(testkit.Timeout))

	return c
}

// The server closes a client that reads nothing after --write-timeout, over HTTP/2 too.
func TestClockClientThatTakesNothingOverHTTP2(t *testing.T) {
	c := dialShared(t, "--write-timeout=200ms")

	// These settings let each answer, and all of them together, be of any length.
	if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+
		"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x7f\xff\xff\xff"+
		"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\x00\x00\x00"); err != nil {
		t.Fatal(err)
	}

	// Each request asks for a long answer.
	for i := range sharedRequests {
		get := binary.BigEndian.AppendUint32([]byte("\x00\x00\x16\x01\x05"), uint32(2*i+1))
		if _, err := io.WriteString(c, string(get)+"\x82\x87\x04\x0f/-/openapi.json\x01\x01h"); err != nil {
			t.Fatal(err)
		}
	}

	var err error
	for err == nil { // until the server has closed the connection
		time.Sleep(20 * time.Millisecond)
		_, err = io.WriteString(c, "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678")
	}

	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the client is still connected")
	}
}

// What a client sends over HTTP/2, and no handler reads, is buffered only in part. The number of simultaneous calls per
// connection is bounded.
func TestServerBodiesOverHTTP2(t *testing.T) {
	c := dialShared(t)

	// Settings, and a ping.
	if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+
		"\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678"); err != nil {
		t.Fatal(err)
	}

	const settings, ping, update = 4, 6, 8
	ofConnection, ofStream := 65535, 65535 // the defaults of RFC 9113
	streams := uint32(math.MaxUint32)

	// The settings of the server come before its answer to the ping.
	for pinged := false; !pinged; {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatal(err)
		}

		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			t.Fatal(err)
		}

		switch head[3] {
		case settings:
			for ; len(payload) > 0; payload = payload[6:] {
				switch value := binary.BigEndian.Uint32(payload[2:]); binary.BigEndian.Uint16(payload) {
				case 3:
					streams = value
				case 4:
					ofStream = int(value)
				}
			}
		case update:
			ofConnection += int(binary.BigEndian.Uint32(payload))
		case ping:
			pinged = true
		}
	}

	if ofConnection > sharedBodies || ofStream > sharedBodies || streams > sharedRequests {
		t.Errorf("a client may send %d bytes, %d of one body, and begin %d calls, which is too much",
			ofConnection, ofStream, streams)
	}
}

// Visitors who wait for a certificate that the authority does not issue do not delay visitors of another domain, nor
// those of their own domain for whom there is a certificate of the right kind.
func TestServerVisitorsDoNotWaitForCertificatesOfOthers(t *testing.T) {
	t.Parallel()
	var addr string
	a := newAuthority(t, "counter.example.com", func() string { return addr })
	dir := filepath.Join(t.TempDir(), "acme")
	addr = serveHere(t, "--domain="+a.domain, "--acme-url="+a.url+"/dir", "--acme-dir="+dir)
	serial(t, addr, a)

	// This authority does not answer until the end of the test.
	silent := make(chan struct{})
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		<-silent
		w.WriteHeader(http.StatusBadRequest)
	}))
	defer away.Close()

	args := []string{"--domain=" + a.domain + ",new.example.com", "--acme-url=" + away.URL, "--acme-dir=" + dir}
	cfg, err := read(t, args, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	certs, err := openCertificates(&cfg, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}

	hello := func(name string, cipher uint16) *tls.ClientHelloInfo {
		return &tls.ClientHelloInfo{ServerName: name, CipherSuites: []uint16{cipher}}
	}
	const modern, old = tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256

	served := func(when string) {
		t.Helper()
		if _, err := certs.GetCertificate(hello(a.domain, modern)); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}

	served("before")

	// For each certificate one visitor too many waits, so one of them gives up at once.
	var waiting sync.WaitGroup
	for _, who := range []*tls.ClientHelloInfo{hello("new.example.com", modern), hello(a.domain, old)} {
		var over atomic.Int32
		for range certificates.MaxWaiting + 1 {
			waiting.Go(func() {
				_, _ = certs.GetCertificate(who)
				over.Add(1)
			})
		}
		testkit.Eventually(t, "that one does not wait", func() bool { return over.Load() > 0 })
		served("while others wait for " + who.ServerName)
	}

	close(silent)
	waiting.Wait()
}
