package certificates

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/crypto/acme"

	"headcount/internal/setting"
)

// While the two files do not fit each other, that is logged once, and the last certificate stays in use.
func TestLoadOfCertificate(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	f := &files{cert: filepath.Join(dir, "c"), key: filepath.Join(dir, "k"), log: zerolog.New(&log)}
	if _, err := f.load(); err == nil {
		t.Fatal("files that do not exist are accepted")
	}

	for _, name := range []string{f.cert, f.key} {
		if err := os.WriteFile(name, []byte("no PEM"), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// An unusable pair is an error once. The files are not read again until they change.
	if changed, err := f.load(); err == nil || !changed || !strings.Contains(err.Error(), f.cert) {
		t.Fatalf("got %t, %v", changed, err)
	}

	if changed, err := f.load(); err != nil || changed {
		t.Fatalf("the unchanged files were read again: %t, %v", changed, err)
	}
}

// While the authority has not issued a certificate yet, a bounded number of clients waits for it. The authority's own
// handshake never waits.
func TestHandshakesThatWaitAreBounded(t *testing.T) {
	const most = 3
	began := make(chan struct{}, most)
	given := make(chan struct{})

	get := boundedWait(most, func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if hello.SupportedProtos == nil {
			began <- struct{}{}
			<-given
		}

		return &tls.Certificate{}, nil
	})

	var waiting sync.WaitGroup
	for range most {
		waiting.Go(func() {
			if _, err := get(&tls.ClientHelloInfo{}); err != nil {
				t.Error(err)
			}
		})
	}

	// All places to wait are taken.
	for range most {
		<-began
	}

	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{"h2"}}); !errors.Is(err, errManyWait) {
		t.Errorf("a client beyond the bound got %v, want errManyWait", err)
	}

	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{acme.ALPNProto}}); err != nil {
		t.Errorf("the handshake of the authority got %v", err)
	}

	close(given)
	waiting.Wait()
	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{"h2"}}); err != nil {
		t.Errorf("with a certificate a client got %v", err)
	}
}

// A request may spell the name of a host in any case, and with a dot at its end.
func TestDomainsHaveNoCase(t *testing.T) {
	c, err := Open(Config{Domains: []string{"counter.example.com"}, Dir: t.TempDir(), Plain: true})
	if err != nil {
		t.Fatal(err)
	}

	for _, host := range []string{"counter.example.com", "COUNTER.example.com:80", "counter.example.com."} {
		w := httptest.NewRecorder()
		c.Redirect.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://"+host+"/p", nil))
		if w.Code != http.StatusPermanentRedirect {
			t.Errorf("%s: %d %s, want a redirect to https", host, w.Code, w.Body)
		}
	}
}

// Without a place for it each certificate would be ordered again at every start, until the authority gives no more.
func TestADirectoryThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	_, err := Open(Config{Domains: []string{"counter.example.com"}, Dir: filepath.Join(file, "acme")})
	var refused *setting.Error
	if !errors.As(err, &refused) || refused.Name != "acme-dir" {
		t.Errorf("got %v, want --acme-dir refused", err)
	}
}

// The authority's library takes a domain in many spellings. Those who wait for its certificate are bounded in all of
// them.
func TestServerEverySpellingOfADomainIsBounded(t *testing.T) {
	release := make(chan struct{})
	authority := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer authority.Close()

	c, err := Open(Config{
		Domains: []string{"counter.example.com"}, Directory: authority.URL, Dir: t.TempDir(), Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}

	ended := make(chan error, MaxWaiting+1)
	var waiting sync.WaitGroup
	for range MaxWaiting + 1 {
		waiting.Go(func() {
			_, err := c.GetCertificate(&tls.ClientHelloInfo{ServerName: "ｃounter.example.com"}) // a wide c
			ended <- err
		})
	}

	select {
	case err := <-ended:
		if !errors.Is(err, errManyWait) {
			t.Errorf("the first client that did not wait got %v, want errManyWait", err)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("%d clients wait for one certificate, want %d", MaxWaiting+1, MaxWaiting)
	}

	close(release)
	waiting.Wait()
}

// While clients of another kind wait for their certificate, the one that is shown to them meanwhile is known at once:
// the metrics ask for it.
func TestServerShownWaitsForNoAuthority(t *testing.T) {
	release := make(chan struct{})
	authority := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer authority.Close()

	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "counter.example.com"), certificateFor(t, "counter.example.com"),
		0o600); err != nil {
		t.Fatal(err)
	}

	c, err := Open(Config{
		Domains: []string{"counter.example.com"}, Directory: authority.URL, Dir: dir, Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}

	first := &tls.ClientHelloInfo{
		ServerName: "counter.example.com", CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256},
	}
	if _, err := c.GetCertificate(first); err != nil {
		t.Fatal(err)
	}

	// Those of RSA wait, except one, which gets the other certificate.
	served := make(chan error, MaxWaiting+1)
	var waiting sync.WaitGroup
	for range MaxWaiting + 1 {
		waiting.Go(func() {
			_, err := c.GetCertificate(&tls.ClientHelloInfo{ServerName: "counter.example.com"})
			served <- err
		})
	}
	if err := <-served; err != nil {
		t.Error(err)
	}

	shown := make(chan int, 1)
	waiting.Go(func() { shown <- len(c.Shown()) })
	select {
	case n := <-shown:
		if n != 1 {
			t.Errorf("%d certificates are shown, want 1", n)
		}
	case <-time.After(10 * time.Second):
		t.Error("whoever asks what is shown waits for the authority")
	}

	close(release)
	waiting.Wait()
}

// certificateFor returns a key and its certificate, as the cache of the authority's library has them.
func certificateFor(t *testing.T, host string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}

	of := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{host},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(90 * 24 * time.Hour),
	}
	cert, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}

	return append(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})...)
}
