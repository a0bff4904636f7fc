package config

import (
	"path/filepath"

	"headcount/internal/setting"
)

// HasTLS reports whether visitors use TLS to this process.
func (c *Server) HasTLS() bool { return c.TLSCert != "" || len(c.Domains) > 0 }

// CertificateDir returns the directory of the certificates of --domain.
func (c *Server) CertificateDir() string {
	if c.ACMEDir == "" && c.DataDir != "" {
		return filepath.Join(c.DataDir, "acme")
	}

	return c.ACMEDir
}

func (c *Server) checkTLS() error {
	if c.TLSCert != "" && c.TLSKey == "" {
		return setting.Errorf("tls-key", "it is missing; name the file of the key that belongs to --tls-cert")
	}
	if c.TLSKey != "" && c.TLSCert == "" {
		return setting.Errorf("tls-cert", "it is missing; name the file of the certificate that belongs to --tls-key")
	}
	if c.TLSCert != "" && len(c.Domains) > 0 {
		return setting.Errorf("domain", "--tls-cert gives a certificate already; leave one of the two out")
	}
	if c.Redirect != "" && !c.HasTLS() {
		return setting.Errorf("http-redirect", "this process does not speak TLS, so it cannot send visitors to "+
			"https; give --domain or --tls-cert, or leave the redirect to the proxy")
	}
	if len(c.Domains) > 0 && c.CertificateDir() == "" {
		return setting.Errorf("acme-dir", "--domain needs a directory, since an authority gives few new "+
			"certificates a week; name one that outlives the process, or give --data-dir")
	}

	// Checked here, because an authority counts each request that fails against a limit.
	for i, name := range c.Domains {
		host, ok := setting.HostName(name)
		if !ok {
			return setting.Errorf("domain", "%q is not the full name of a host; write one like "+
				"counter.example.com", name)
		}
		c.Domains[i] = host
	}

	if len(c.Domains) > 0 && !setting.IsWebURL(c.ACMEURL) {
		return setting.Errorf("acme-url", "it is not an http or https URL; write https://host/path of the "+
			"authority's directory")
	}

	return nil
}
