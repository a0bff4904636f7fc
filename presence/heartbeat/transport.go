package heartbeat

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/wake"
	"headcount/presence/seal"
)

// Beats receives the beats for the node of this process.
type Beats interface{ ReceiveBeat(b *Beat) }

// Replies receives the replies for the gateway of this process.
type Replies interface{ ReceiveReply(r *Reply) }

// Tables receives the ring hashes of other processes.
type Tables interface {
	Disagree(from string, hash uint64)
}

// Probes receives probes and answers to probes.
type Probes interface {
	ReceiveProbe(from string, answer bool, number uint64)
}

// Resolver finds the addresses of processes.
type Resolver interface {
	// Resolve finds the address of a name, which is then used for 30 s. A slow Resolve
	// delays only the datagrams to that name.
	Resolve(ctx context.Context, name string) (net.Addr, error)
}

// Config tunes a Transport. A zero field takes its default.
type Config struct {
	Conn net.PacketConn // required; Run closes it
	// Keys are the cluster's secrets: the first signs, all verify. Without keys datagrams
	// are not signed, and only addresses of this machine are allowed.
	Keys [][]byte
	// Name is the address, "host:port", that other processes send to. Datagrams to another
	// name are refused, so all processes must spell it the same way.
	Name        string
	Incarnation uint64           // of this process, see presence.NewIncarnation
	Partitions  int              // P; default presence.DefaultPartitions
	Now         func() time.Time // the time of the cluster, the zero time while it is not known; default time.Now

	Resolver Resolver // default: DNS

	// The reading goroutine calls these, so they must not block. They own the messages that
	// they get. OnTable is called for every datagram whose sender has another ring, see SetTable.
	OnBeat  Beats
	OnReply Replies
	OnTable Tables

	Registerer prometheus.Registerer // of the transport's metrics; nil: none
	Log        zerolog.Logger
}

const (
	// maxQueued bounds the messages that wait for one destination, in approximate bytes.
	// Further messages are dropped; their sender repeats what matters.
	maxQueued = 4 << 20
	// maxDestinations bounds the destinations, each of which has a goroutine. Messages to
	// further destinations are dropped until idle ones were forgotten.
	maxDestinations = 1024

	resolveEvery   = 30 * time.Second // until an address is looked up again
	resolvePause   = time.Second      // pause after a lookup that failed
	resolveTimeout = 2 * time.Second
	idleAfter      = time.Minute // until an idle destination is forgotten
	drainTimeout   = time.Second // to send what is queued when Run ends
	socketBuffer   = 4 << 20     // bytes requested; the system may grant less
)

// Transport sends and receives messages as datagrams. Its methods may be
// called from any goroutine.
type Transport struct {
	cfg     Config
	keys    *seal.Keys
	decoder *Decoder // the reader's
	table   atomic.Uint64

	mu       sync.Mutex
	running  context.Context // of the senders; nil: Run has not begun, or is ending
	senders  sync.WaitGroup
	to       map[string]*destination
	sequence uint64 // the highest sequence number of the forgotten destinations

	datagrams, bytes, drops *prometheus.CounterVec
	in, inBytes             prometheus.Counter
	out, outBytes           prometheus.Counter
	from                    netip.AddrPort // sender of the datagram being read, over UDP; the reader's
}

// destination is one receiver. Only its run touches encoder and address.
type destination struct {
	t    *Transport
	name string
	wake chan struct{} // holds one: something is queued
	back atomic.Bool   // the receiver has begun anew, perhaps at another address

	mu      sync.Mutex
	beats   []*Beat
	replies []*Reply
	queued  int // see maxQueued

	encoder  *Encoder
	addr     net.Addr
	resolved time.Time // when addr is to be looked up again
}

// New returns a Transport that drops everything until Run.
func New(cfg Config) (*Transport, error) {
	if cfg.Resolver == nil {
		cfg.Resolver = dns{}
	}
	if cfg.Conn == nil {
		return nil, fmt.Errorf("heartbeat: %w: no connection", seal.ErrConfig)
	}
	// Whoever reaches the port could otherwise make users come and go.
	if udp, ok := cfg.Conn.LocalAddr().(*net.UDPAddr); ok && len(cfg.Keys) == 0 && !udp.IP.IsLoopback() {
		return nil, fmt.Errorf("heartbeat: %w: without a cluster secret %s must be a loopback address",
			seal.ErrConfig, udp)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	keys, err := seal.NewKeys(cfg.Keys, "heartbeat")
	if err != nil {
		return nil, err
	}

	t := &Transport{
		cfg:  cfg,
		keys: keys,
		to:   map[string]*destination{},
		datagrams: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_datagrams_total", Help: "Datagrams between processes, by direction, without dropped ones.",
		}, []string{"direction"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_datagram_bytes_total", Help: "Bytes of datagrams between processes, by direction.",
		}, []string{"direction"}),
		drops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_datagrams_dropped_total",
			Help: "Datagrams not received (in), and messages or datagrams not sent (out), by direction and reason.",
		}, []string{"direction", "reason"}),
	}

	// Looked up once, because every datagram counts there.
	t.in = t.datagrams.WithLabelValues("in")
	t.inBytes = t.bytes.WithLabelValues("in")
	t.out = t.datagrams.WithLabelValues("out")
	t.outBytes = t.bytes.WithLabelValues("out")

	for _, reason := range []string{"queue", "address", "error"} { // shown from 0 on
		t.drops.WithLabelValues("out", reason)
	}
	t.drops.WithLabelValues("in", "error")

	t.decoder, err = NewDecoder(DecoderConfig{
		Now:  cfg.Now,
		Name: cfg.Name, Partitions: cfg.Partitions, Keys: keys,
		OnBeat: cfg.OnBeat, OnReply: cfg.OnReply, OnTable: comparison{t}, OnProbe: prober{t},
	})
	if err != nil {
		return nil, err
	}

	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(t.datagrams, t.bytes, t.drops)
	}

	return t, nil
}

// comparison is the Tables of a Transport's Decoder.
type comparison struct{ *Transport }

// SetTable sets the hash of this process's ring; 0: it has no ring.
func (t *Transport) SetTable(hash uint64) { t.table.Store(hash) }

// Began has the address of another process looked up before something is sent there: a process that has begun anew may
// be at another one.
func (t *Transport) Began(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()

	// A destination that does not exist yet is looked up at its first message anyway.
	if d := t.to[name]; d != nil {
		d.back.Store(true)
	}
}

func (t comparison) Disagree(from string, hash uint64) {
	if t.cfg.OnTable != nil && hash != t.table.Load() {
		t.cfg.OnTable.Disagree(from, hash)
	}
}

// SendBeat sends b to another process, or drops it; the transport owns b from then on. The
// receiver takes this process for b.Source. SendBeat never blocks.
func (t *Transport) SendBeat(to string, b *Beat) {
	// About what it takes in memory, which maxQueued bounds.
	size := 64 + 8*len(b.Alive)
	for i := range b.Ops {
		size += 48 + len(b.Ops[i].Page)
	}

	t.send(to, size, b, nil)
}

// SendReply sends r, as SendBeat sends a beat.
func (t *Transport) SendReply(to string, r *Reply) {
	size := 64 + 8*len(r.Unknown)
	for i := range r.Counts {
		size += 80 + len(r.Counts[i].Page)
	}

	t.send(to, size, nil, r)
}

func (t *Transport) send(to string, size int, b *Beat, r *Reply) {
	t.mu.Lock()
	defer t.mu.Unlock()

	d, reason := t.destinationLocked(to)
	if d == nil {
		t.dropped("out", reason)
		return
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	// A single message is queued whatever its size, or it would never be sent.
	if d.queued > 0 && d.queued+size > maxQueued {
		t.dropped("out", "queue")
		return
	}

	d.queued += size
	if b != nil {
		d.beats = append(d.beats, b)
	} else {
		d.replies = append(d.replies, r)
	}

	wake.Signal(d.wake)
}

// destinationLocked returns the destination of that name, which it creates if necessary. If it
// cannot, it returns the reason.
func (t *Transport) destinationLocked(name string) (d *destination, reason string) {
	d = t.to[name]
	switch {
	case t.running == nil:
		return nil, "closed"
	case d != nil:
		return d, ""
	case len(t.to) >= maxDestinations:
		return nil, "destinations"
	}

	// A sequence number never returns, not even after the destination was forgotten: receivers take it for a replay.
	encoder := NewEncoder(Source{t.cfg.Name, t.cfg.Incarnation}, name, t.keys, t.sequence)
	encoder.now = t.cfg.Now

	d = &destination{t: t, name: name, wake: make(chan struct{}, 1), encoder: encoder}
	t.to[name] = d
	ctx := t.running
	// Start it while mu is held: Run takes mu before it waits for the senders, and no sender may start after that.
	t.senders.Go(func() { d.run(ctx) })

	return d, ""
}

func (t *Transport) dropped(direction, reason string) {
	t.drops.WithLabelValues(direction, reason).Inc()
}

// Run runs the transport's goroutines: one that reads, and one for each destination that
// writes. It returns when ctx has ended, the queued messages have been sent (for at most
// drainTimeout) and all goroutines have returned.
func (t *Transport) Run(ctx context.Context) error {
	if c, ok := t.cfg.Conn.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok { // datagrams that do not fit into the buffers are lost
		_ = c.SetReadBuffer(socketBuffer)
		_ = c.SetWriteBuffer(socketBuffer)
	}

	// The senders outlive ctx, so that they can send what is queued when it ends.
	open, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	t.mu.Lock()
	t.running = open
	t.mu.Unlock()

	var reader sync.WaitGroup
	broken := make(chan error, 1)
	reader.Go(func() { broken <- t.read(open) })

	var err error
	select {
	case <-ctx.Done():
	case err = <-broken:
	}

	t.mu.Lock()
	t.running = nil // from here on nothing is queued and no sender starts
	t.mu.Unlock()

	stop()
	// A network that takes nothing must not hold up the end of the process.
	t.cfg.Conn.SetWriteDeadline(time.Now().Add(drainTimeout))
	t.senders.Wait()

	t.cfg.Conn.Close() // ends the reader
	reader.Wait()

	return err
}

// read receives datagrams until ctx ends or the connection breaks.
func (t *Transport) read(ctx context.Context) error {
	// Decode retains nothing of a datagram, so one buffer is enough.
	buf := make([]byte, MaxDatagram+1) // one more byte shows that a datagram is too long

	receive := func() (int, error) {
		n, _, err := t.cfg.Conn.ReadFrom(buf)
		return n, err
	}

	if udp, ok := t.cfg.Conn.(*net.UDPConn); ok { // this method does not allocate the address
		receive = func() (int, error) {
			n, from, err := udp.ReadFromUDPAddrPort(buf)
			t.from = from
			return n, err
		}
	}

	for warned := false; ; {
		n, err := receive()

		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("heartbeat: read: %w", err)
		default: // for instance the system's report that an earlier datagram could not be sent
			t.dropped("in", "error")
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
			continue
		}

		if err := t.decoder.Decode(buf[:n]); err != nil {
			t.dropped("in", seal.ReasonOf(err))
			if errors.Is(err, ErrVersion) && !warned {
				warned = true // log once: such datagrams continue until one of the processes is replaced
				t.cfg.Log.Error().Uint8("format", buf[2]).Uint8("ours", version).
					Msg("a process of another version sends heartbeats in an unknown format; " +
						"run the same version everywhere")
			}
			continue
		}

		t.in.Inc()
		t.inBytes.Add(float64(n))
	}
}

// run sends the messages that are queued for the destination, until it was idle for
// idleAfter, or until ctx ends.
func (d *destination) run(ctx context.Context) {
	idle := time.NewTimer(idleAfter)
	defer idle.Stop()

	for {
		select {
		// Run takes no more messages by now, so this flush is the last one.
		case <-ctx.Done():
			d.flush(ctx)
			return
		case <-d.wake:
			d.flush(ctx)
			idle.Reset(idleAfter)
		case <-idle.C:
			retired := d.retire()
			if retired {
				return
			}
			idle.Reset(idleAfter)
		}
	}
}

// retire forgets the destination, unless messages are queued, and reports whether it did.
func (d *destination) retire() bool {
	t := d.t

	t.mu.Lock()
	defer t.mu.Unlock()

	d.mu.Lock()
	defer d.mu.Unlock()

	// A message may have come between the tick and the locks.
	if d.queued > 0 {
		return false
	}

	// The numbers of a later destination of that name must be greater.
	t.sequence = max(t.sequence, d.encoder.Sequence())
	delete(t.to, d.name)

	return true
}

// flush sends all queued messages. Messages that are queued meanwhile are packed together
// next time, so a slow network gets large batches.
func (d *destination) flush(ctx context.Context) {
	d.mu.Lock()
	beats, replies := d.beats, d.replies
	d.beats = nil
	d.replies = nil
	d.queued = 0
	d.mu.Unlock()

	if len(beats)+len(replies) == 0 {
		return
	}

	t := d.t
	resolved := d.resolve(ctx)
	if !resolved {
		t.drops.WithLabelValues("out", "address").Add(float64(len(beats) + len(replies)))
		return
	}

	write := func(datagram []byte) { t.write(datagram, d.addr) }
	// The ring as it is now: the receiver compares it with its own when this arrives.
	table := t.table.Load()
	d.encoder.Beats(beats, table, write)
	d.encoder.Replies(replies, table, write)
}

func (t *Transport) write(datagram []byte, to net.Addr) {
	// A datagram that cannot be sent is like one that gets lost: what matters is sent again with a later one.
	if _, err := t.cfg.Conn.WriteTo(datagram, to); err != nil {
		t.dropped("out", "error")
		return
	}

	t.out.Inc()
	t.outBytes.Add(float64(len(datagram)))
}

// resolve looks the address up if it is due, and reports whether an address is known. If
// the lookup fails, the old address stays.
func (d *destination) resolve(ctx context.Context) bool {
	now := time.Now()
	// Taken before the lookup, since a restart during it needs another one.
	restarted := d.back.Swap(false)
	if !restarted && now.Before(d.resolved) {
		return d.addr != nil
	}

	addr, err := d.t.cfg.Resolver.Resolve(ctx, d.name)
	if err == nil && !d.t.keys.Signed() {
		if udp, ok := addr.(*net.UDPAddr); ok && !udp.IP.IsLoopback() {
			// The name has moved to another machine, to which nothing may go without signatures.
			d.addr = nil
			err = fmt.Errorf("without a cluster secret nothing is sent to %s", udp)
		}
	}

	if err != nil {
		d.t.cfg.Log.Warn().Err(err).Str("to", d.name).
			Msg("the address of a process could not be looked up; retrying")
		// From the end of the lookup, which may have taken longer than the pause.
		d.resolved = time.Now().Add(resolvePause)
		return d.addr != nil
	}

	d.addr = addr
	d.resolved = now.Add(resolveEvery)
	return true
}

// dns is the system's Resolver.
type dns struct{}

func (dns) Resolve(ctx context.Context, name string) (net.Addr, error) {
	if ap, err := netip.ParseAddrPort(name); err == nil {
		return net.UDPAddrFromAddrPort(ap), nil
	}

	host, service, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()

	port, err := net.DefaultResolver.LookupPort(ctx, "udp", service)
	if err != nil {
		return nil, err
	}

	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}

	ip := ips[0]
	for _, other := range ips { // most container networks have only IPv4
		if other.Unmap().Is4() {
			ip = other
			break
		}
	}

	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip.Unmap(), uint16(port))), nil
}
