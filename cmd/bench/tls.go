//go:build linux

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// fannedOutOverTLS runs a scenario of the simulator against a server without TLS, and then
// against one that has TLS of its own.
func fannedOutOverTLS(args ...string) func(ctx context.Context, b *bench) (map[string]float64, error) {
	return func(ctx context.Context, b *bench) (map[string]float64, error) {
		dir, err := os.MkdirTemp("", "headcount-bench-")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
		if err := writeCertificate(cert, key); err != nil {
			return nil, err
		}
		var plain, secured map[string]float64
		if err := b.withServer(ctx, quick("35ms"), func(url string, pid int) (err error) {
			plain, err = b.simulate(ctx, "", url, pid, args...)
			return err
		}); err != nil {
			return nil, err
		}
		if err := b.withServer(ctx, append(quick("35ms"), "--tls-cert", cert, "--tls-key", key), func(url string, pid int) (err error) {
			secured, err = b.simulate(ctx, cert, strings.Replace(url, "http:", "https:", 1), pid, args...)
			return err
		}); err != nil {
			return nil, err
		}
		const cpu, rss = "server_cpu_s_per_million_counts", "server_rss_bytes_per_connection"
		return map[string]float64{
			"cpu_s_per_million": secured[cpu], "plain_cpu_s_per_million": plain[cpu], "times": secured[cpu] / plain[cpu],
			"rss_kb_each": secured[rss] / 1e3, "plain_rss_kb_each": plain[rss] / 1e3,
		}, nil
	}
}

// writeCertificate writes a certificate of the loopback address that is its own authority.
func writeCertificate(cert, key string) error {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return err
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return err
	}
	if err := os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}), 0o600); err != nil {
		return err
	}
	return os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), 0o600)
}
