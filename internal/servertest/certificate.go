package servertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Certificate names the files of a certificate and of its key.
type Certificate struct{ File, Key string }

// NewCertificate writes a self-signed certificate like template, and its key, into dir.
func NewCertificate(dir string, template *x509.Certificate) (c Certificate, err error) {
	c = Certificate{File: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}

	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, err
	}

	template.SerialNumber = big.NewInt(1)

	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return c, err
	}

	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return c, err
	}

	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})
	if err := os.WriteFile(c.File, certPEM, 0o600); err != nil {
		return c, err
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded})
	return c, os.WriteFile(c.Key, keyPEM, 0o600)
}

// NewLoopbackCertificate is NewCertificate for servers on the loopback address, which may also be each other's clients.
func NewLoopbackCertificate(dir string) (Certificate, error) {
	return NewCertificate(dir, &x509.Certificate{
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
}
