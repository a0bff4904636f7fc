package heartbeat_test

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"headcount/internal/testkit"
	"headcount/presence/heartbeat"
)

// A process answers a probe that is signed with one of its secrets.
func TestServerProbe(t *testing.T) {
	listen := func() *net.UDPConn {
		conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}

	conn := listen()
	to := conn.LocalAddr().String()
	tr, _ := start(t, heartbeat.Config{Conn: conn, Name: to, Keys: [][]byte{[]byte("new"), []byte("old")}})

	for _, secrets := range [][][]byte{{[]byte("new")}, {[]byte("old"), []byte("new")}} {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
		if err := heartbeat.Probe(ctx, to, secrets); err != nil {
			t.Errorf("%s: %v", secrets, err)
		}
		cancel()
	}

	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	go func() { // ends the probe when its datagram has been refused
		defer cancel()
		for ctx.Err() == nil && metric(t, tr, "datagrams_dropped_total", "in key") == 0 {
			time.Sleep(time.Millisecond)
		}
	}()

	if err := heartbeat.Probe(ctx, to, [][]byte{[]byte("a stranger's")}); err == nil {
		t.Error("a probe with a foreign secret was answered")
	}
	<-ctx.Done()
	if metric(t, tr, "datagrams_dropped_total", "in key") == 0 {
		t.Error("the probe with a foreign secret did not arrive")
	}

	// A process of an older release does not answer, and neither does a firewall.
	deaf := listen()
	defer deaf.Close()
	soon, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if err := heartbeat.Probe(soon, deaf.LocalAddr().String(), nil); err == nil {
		t.Error("a probe without an answer returned no error")
	}

	gone := listen()
	_ = gone.Close()
	if err := heartbeat.Probe(t.Context(), gone.LocalAddr().String(), nil); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a probe of an address without a process returns %v", err)
	}

	if err := heartbeat.Probe(t.Context(), "192.0.2.1:1", nil); err == nil {
		t.Error("an unsigned probe of another machine returned no error")
	}
}
