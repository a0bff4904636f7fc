package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/acme"
)

// issuer signs certificates.
type issuer struct {
	t      *testing.T
	domain string
	key    *ecdsa.PrivateKey
	root   *x509.Certificate
}

func newIssuer(t *testing.T, domain string) *issuer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	i := &issuer{t: t, domain: domain, key: key}
	i.root = i.sign(&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority for tests"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, key.Public())

	return i
}

func (i *issuer) sign(of, by *x509.Certificate, key crypto.PublicKey) *x509.Certificate {
	i.t.Helper()
	if by == nil {
		by = of
	}
	der, err := x509.CreateCertificate(rand.Reader, of, by, key, i.key)
	if err != nil {
		i.t.Fatal(err)
	}

	cert, err := x509.ParseCertificate(der)
	if err != nil {
		i.t.Fatal(err)
	}

	return cert
}

// issue returns a certificate for the domain, as PEM.
func (i *issuer) issue(number int64, key crypto.PublicKey) []byte {
	return i.issueFor(time.Hour, number, key)
}

// issueFor is issue with the time until the end of the certificate, which began an hour ago.
func (i *issuer) issueFor(left time.Duration, number int64, key crypto.PublicKey) []byte {
	cert := i.sign(&x509.Certificate{
		SerialNumber: big.NewInt(number), DNSNames: []string{i.domain},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(left),
	}, i.root, key)

	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.root.Raw})...)
}

// authority is a small ACME server (RFC 8555) for one account and one domain. It asks the server for its proof over TLS
// (RFC 8737) or on port 80. Signatures and nonces are tested by x/crypto/acme itself.
type authority struct {
	*issuer
	url   string
	prove func() string // returns the address to which the domain leads
	plain string        // the address of port 80, if the authority asks for the proof there
	first time.Duration // until the end of the first certificate; 0: an hour, as of all others

	mu     sync.Mutex // guards the fields below
	status string     // of the order and its one authorization
	chain  []byte
	orders int
}

func newAuthority(t *testing.T, domain string, prove func() string) *authority {
	t.Helper()
	a := &authority{issuer: newIssuer(t, domain), prove: prove}
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	a.url = server.URL

	return a
}

func (a *authority) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w.Header().Set("Replay-Nonce", "nonce")
	if r.Method != http.MethodPost {
		say(w, http.StatusOK, map[string]any{
			"newNonce": a.url + "/nonce", "newAccount": a.url + "/account", "newOrder": a.url + "/orders",
			"revokeCert": a.url + "/no", "keyChange": a.url + "/no",
		})

		return
	}

	proof := "tls-alpn-01"
	if a.plain != "" {
		proof = "http-01"
	}

	challenge := map[string]any{"type": proof, "url": a.url + "/challenge", "token": "token", "status": a.status}

	switch r.URL.Path {
	case "/account":
		w.Header().Set("Location", a.url+"/account/1")
		say(w, http.StatusCreated, map[string]any{"status": "valid"})
		return

	case "/orders":
		a.orders++
		a.status = "pending"
		w.Header().Set("Location", a.url+"/order")
		w.WriteHeader(http.StatusCreated)

	case "/challenge":
		challenge["status"] = "processing"
		if err := a.check(); err != nil {
			a.t.Errorf("the proof: %v", err)
			a.status = "invalid"
		} else if a.status == "pending" {
			a.status = "ready"
		}

		say(w, http.StatusOK, challenge)
		return

	case "/authorization":
		status := a.status
		if status == "ready" {
			status = "valid"
		}
		say(w, http.StatusOK, map[string]any{
			"status": status, "identifier": map[string]string{"type": "dns", "value": a.domain},
			"challenges": []any{challenge},
		})

		return

	case "/finalize":
		var signed struct{ Payload string }
		var body struct{ CSR string }
		_ = json.NewDecoder(r.Body).Decode(&signed)
		payload, _ := base64.RawURLEncoding.DecodeString(signed.Payload)
		_ = json.Unmarshal(payload, &body)
		der, _ := base64.RawURLEncoding.DecodeString(body.CSR)
		csr, err := x509.ParseCertificateRequest(der)
		if err != nil || csr.CheckSignature() != nil || len(csr.DNSNames) != 1 || csr.DNSNames[0] != a.domain ||
			a.status != "ready" {
			a.t.Errorf("the request for a certificate: %v, %v, in state %s", err, csr, a.status)
		} else {
			a.chain = a.issue(2, csr.PublicKey)
			if a.orders == 1 && a.first > 0 {
				a.chain = a.issueFor(a.first, 1, csr.PublicKey)
			}
			a.status = "valid"
		}

	case "/certificate":
		w.Header().Set("Content-Type", "application/pem-certificate-chain")
		_, _ = w.Write(a.chain)
		return
	}

	say(w, 0, map[string]any{
		"status": a.status, "identifiers": []any{map[string]string{"type": "dns", "value": a.domain}},
		"authorizations": []string{a.url + "/authorization"}, "finalize": a.url + "/finalize",
		"certificate": a.url + "/certificate",
	})
}

// plainly asks an address without TLS for a path of a host.
func plainly(t *testing.T, addr, host, path string) (body string, answer *http.Response) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}

	req.Host = host
	answer, err = http.DefaultTransport.RoundTrip(req) // follows no redirects
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()

	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}

	return string(text), answer
}

func say(w http.ResponseWriter, status int, body map[string]any) {
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/json")
	}
	if status != 0 {
		w.WriteHeader(status)
	}
	_ = json.NewEncoder(w).Encode(body)
}

// check asks the domain for its proof.
func (a *authority) check() error {
	if a.plain != "" {
		got, answer := plainly(a.t, a.plain, a.domain, "/.well-known/acme-challenge/token")
		if answer.StatusCode != http.StatusOK || !strings.HasPrefix(got, "token.") {
			return fmt.Errorf("%s, %q", answer.Status, got)
		}
		return nil
	}

	// RFC 8737: a certificate with a critical extension, in a handshake for acme-tls/1 alone.
	c, err := tls.Dial("tcp", a.prove(), &tls.Config{
		ServerName: a.domain, NextProtos: []string{acme.ALPNProto}, InsecureSkipVerify: true,
	})
	if err != nil {
		return err
	}
	defer c.Close()

	state := c.ConnectionState()
	for _, e := range state.PeerCertificates[0].Extensions {
		if e.Id.String() == "1.3.6.1.5.5.7.1.31" && e.Critical && state.NegotiatedProtocol == acme.ALPNProto {
			return nil
		}
	}

	return fmt.Errorf("protocol %q, certificate %v", state.NegotiatedProtocol, state.PeerCertificates[0].Extensions)
}
