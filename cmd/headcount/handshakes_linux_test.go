package main

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// halfOpen begins a handshake, and keeps the connection until the server closes it or stop is closed.
func halfOpen(c net.Conn, begun chan<- struct{}, stop <-chan struct{}) {
	_ = c.SetReadDeadline(time.Unix(1, 0)) // the handshake stops when it is the server's turn
	_ = tls.Client(c, &tls.Config{InsecureSkipVerify: true}).Handshake()
	_ = c.SetReadDeadline(time.Time{})
	select {
	case begun <- struct{}{}:
	default:
	}

	closed := make(chan struct{})
	go func() { // ends with the connection
		defer close(closed)
		_, _ = io.Copy(io.Discard, c)
	}()

	select {
	case <-closed:
	case <-stop:
	}
	_ = c.Close()
	<-closed
}

// One address begins handshakes without finishing them, and replaces each one that the server closes. Newcomers from
// another address do not wait.
func TestClockHalfOpenHandshakes(t *testing.T) {
	c, err := servertest.NewLoopbackCertificate(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	addr := serveHere(t, "--tls-cert="+c.File, "--tls-key="+c.Key, "--max-connections=1000")

	var attack sync.WaitGroup
	stop := make(chan struct{})
	defer attack.Wait()
	defer close(stop)

	attackers := 1000
	if testkit.Race { // each handshake takes ten times as long
		attackers = 100
	}

	begun := make(chan struct{}, attackers)
	for range attackers {
		attack.Go(func() {
			for {
				attacker, err := net.Dial("tcp", addr)
				if err == nil {
					halfOpen(attacker, begun, stop)
				}

				select {
				case <-stop:
					return
				case <-time.After(time.Second):
				}
			}
		})
	}

	// All attackers hold a half-open handshake.
	for range cap(begun) {
		<-begun
	}

	// The newcomers have another address.
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	web := &http.Client{Timeout: testkit.Timeout, Transport: &http.Transport{
		DialContext: dialer.DialContext, DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}

	watch := testkit.NewStopwatch(t)
	slow := 0
	for range 100 {
		began := watch.Elapsed()
		start := time.Now()
		answer, err := web.Get("https://" + addr + "/p/counter")
		if err == nil {
			_ = answer.Body.Close()
		} else if time.Since(start) < 3*time.Second { // on a busy machine a handshake may take so long
			t.Fatal(err)
		}

		took := watch.Elapsed() - began

		if took > 500*time.Millisecond {
			slow++
		}
		if slow > 1 {
			t.Fatalf("more than one of 100 newcomers waited for over 500ms; the last one waited for %s", took)
		}
	}
}
