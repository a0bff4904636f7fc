package certificates

import (
	"bytes"
	"crypto/tls"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"
	"golang.org/x/crypto/acme"
)

// While the files are no pair, the log says so once and the last certificate stays in use.
func TestLoadOfCertificate(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	f := &files{cert: filepath.Join(dir, "c"), key: filepath.Join(dir, "k"), log: zerolog.New(&log)}
	if _, err := f.load(); err == nil {
		t.Fatal("files that do not exist are taken")
	}

	for _, name := range []string{f.cert, f.key} {
		if err := os.WriteFile(name, []byte("no PEM"), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	// A pair that cannot be used is an error once; until the files change, they are not read again.
	if changed, err := f.load(); err == nil || !changed || !strings.Contains(err.Error(), f.cert) {
		t.Fatalf("got %t, %v", changed, err)
	}

	if changed, err := f.load(); err != nil || changed {
		t.Fatalf("the same files are read again: %t, %v", changed, err)
	}
}

// While the authority has issued nothing yet, only so many clients wait for it, and its own handshake never waits.
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

	// All places are taken.
	for range most {
		<-began
	}

	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{"h2"}}); !errors.Is(err, errManyWait) {
		t.Errorf("a further one: %v", err)
	}

	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{acme.ALPNProto}}); err != nil {
		t.Errorf("the authority: %v", err)
	}

	close(given)
	waiting.Wait()
	if _, err := get(&tls.ClientHelloInfo{SupportedProtos: []string{"h2"}}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
