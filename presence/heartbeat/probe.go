package heartbeat

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence/seal"
)

// prober answers each probe once, to the address that it came from. A probe is signed like
// any datagram, and its answer is not longer than the probe.
type prober struct{ *Transport }

// ReceiveProbe implements Probes.
func (t prober) ReceiveProbe(from string, answer bool, number uint64) {
	// An answer to an answer would never end. Without UDP there is no address to answer to.
	if answer || !t.from.IsValid() {
		return
	}

	// Every answer has the number 1: the prober accepts only one of them, and needs no more.
	e := NewEncoder(Source{t.cfg.Name, t.cfg.Incarnation}, from, t.keys, 0)
	e.now = t.cfg.Now

	e.probe(ofAnswer, number, func(datagram []byte) { t.write(datagram, net.UDPAddrFromAddrPort(t.from)) })
}

// probe packs a probe or an answer.
func (e *Encoder) probe(what byte, number uint64, emit func(datagram []byte)) {
	// Without the hash of a ring: the prober has none to compare it with.
	e.begin(what, 0, emit)
	e.open(recordProbe)
	e.buf = le.AppendUint64(e.buf, number)
	e.flush()
}

// probeAgain is the time between two probes of one process.
const probeAgain = 300 * time.Millisecond

// answered waits for the answer to a probe.
type answered struct {
	number uint64
	ok     bool
}

// ReceiveProbe implements Probes.
func (a *answered) ReceiveProbe(_ string, answer bool, number uint64) {
	a.ok = a.ok || answer && number == a.number
}

// CheckName returns why other processes, which dial name, would not reach the one behind conn and the TCP listener of
// the same port. It answers as that process would.
func CheckName(ctx context.Context, within time.Duration, conn net.PacketConn, name string, secrets [][]byte) error {
	answers, err := New(Config{Conn: conn, Keys: secrets, Name: name, Log: zerolog.Nop()})
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	var answering sync.WaitGroup
	defer answering.Wait()
	defer cancel()
	answering.Go(func() { answers.Run(ctx) })

	return Reach(ctx, within, name, secrets)
}

// Reach returns why this machine does not reach the process called to, over TCP and over UDP.
func Reach(ctx context.Context, within time.Duration, to string, secrets [][]byte) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()

	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", to)
	if err != nil {
		return fmt.Errorf("cannot be reached from here: %w; see whether it runs, and whether a firewall lets TCP and "+
			"UDP through", err)
	}
	// That the connection could be opened shows that TCP gets through.
	_ = conn.Close()

	if err := Probe(ctx, to, secrets); err != nil {
		return fmt.Errorf("is reached over TCP, but does not answer over UDP: %w; see whether a firewall lets UDP "+
			"through, and whether its --cluster-secret is the same", err)
	}

	return nil
}

// Probe returns nil once a datagram with these secrets has reached the process called to,
// and the answer has come back. It repeats the probe until ctx ends. Releases without
// probes do not answer.
func Probe(ctx context.Context, to string, secrets [][]byte) error {
	keys, err := seal.NewKeys(secrets, "heartbeat")
	if err != nil {
		return err
	}

	addr, err := dns{}.Resolve(ctx, to)
	if err != nil {
		return err
	}

	udp := addr.(*net.UDPAddr)
	// As for a Transport: without signatures nothing leaves this machine.
	if !keys.Signed() && !udp.IP.IsLoopback() {
		return fmt.Errorf("without a cluster secret nothing is sent to %s", udp)
	}

	conn, err := net.DialUDP("udp", nil, udp)
	if err != nil {
		return err
	}
	defer conn.Close()

	// With the port in its name, so that two probes at a time are two senders.
	self := Source{"probe from " + conn.LocalAddr().String(), uint64(time.Now().UnixMilli())}
	encoder := NewEncoder(self, to, keys, 0)

	got := &answered{number: rand.Uint64()}
	// By the clock of this machine: the prober is no member, so it does not know the time of the cluster.
	decoder, err := NewDecoder(DecoderConfig{Name: self.Gateway, Keys: keys, OnProbe: got})
	if err != nil {
		return err
	}

	return exchange(ctx, conn, encoder, decoder, got)
}

// exchange sends probes until the decoder has got the answer. The error says that nothing listens, or that no answer
// came before ctx ended.
func exchange(ctx context.Context, conn net.Conn, encoder *Encoder, decoder *Decoder, got *answered) error {
	buf := make([]byte, MaxDatagram+1)
	var next time.Time // when another probe is sent

	for ctx.Err() == nil {
		now := time.Now()
		var err error
		if !now.Before(next) {
			encoder.probe(ofProbe, got.number, func(datagram []byte) { _, err = conn.Write(datagram) })
			next = now.Add(probeAgain)
		}

		n := 0
		if err == nil {
			_ = conn.SetReadDeadline(next)
			n, err = conn.Read(buf)
		}

		switch {
		case err == nil:
			_ = decoder.Decode(buf[:n]) // anything but the answer is ignored
		case errors.Is(err, syscall.ECONNREFUSED):
			return err // no process listens there
		default: // a timeout, or the network is down for a moment
			select {
			case <-ctx.Done():
			case <-time.After(time.Until(next)):
			}
		}

		if got.ok {
			return nil
		}
	}

	return errors.New("no answer")
}
