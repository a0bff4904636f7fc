// Package redisconn is a connection to Redis: single, Sentinel or Cluster, 6.2 or newer. It detects which of these
// answers, runs scripts, fails at once while Redis does not answer or refuses commands, and reports when that begins
// and ends. The stores in Redis are built on it.
package redisconn

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/tracing"
)

// ErrConfig is wrapped by every error about invalid settings.
var ErrConfig = errors.New("bad setting")

const (
	dialTimeout = time.Second
	readTimeout = 3 * time.Second
	callTimeout = 5 * time.Second // for a whole call, if its context has no earlier deadline

	reloadTimeout = 500 * time.Millisecond // for asking a server of a Cluster for the masters

	poolPerCore = 20 // connections
)

// Traffic counts the bytes that each connection carried. Any goroutine may call it.
type Traffic interface{ Carried(sent, received int) }

// Config tunes a Conn. A zero field takes its default.
type Config struct {
	// URL is redis:// or rediss://. With ?addr= (repeatable) it is a Cluster, with ?master_name= a Sentinel. Otherwise
	// it is a single server, or a Cluster if that server reports that it is part of one. Required.
	URL string
	// Dial is the time limit for connecting; default 1s.
	Dial time.Duration
	// Meanwhile is the consequence that the log gives for an outage; default "counts are stale meanwhile".
	Meanwhile string
	OnBytes   Traffic // optional
	Log       zerolog.Logger
}

// Conn is the connection of a process to one Redis. All stores of the process share it, each through a Runner: they
// have one pool, one circuit breaker, one probe, and one place that logs outages. Its methods may be called from any
// goroutine.
//
// The pool has up to 20 connections for each core, or as many as ?pool_size= of the URL says, and 10 more for
// pipelines; on a Cluster it has that many for each server. A command or a pipeline uses a connection for one round
// trip: no command blocks in Redis, and work with many round trips, such as an export, takes a connection for each of
// them. Subscriptions have connections of their own. A bounded Runner uses at most half of the pool, so that the others
// always find a connection.
type Conn struct {
	DB    int    // number of the database
	Marks *Marks // detects whether Redis has lost writes that it acknowledged

	cfg     Config
	dial    func() redis.UniversalClient
	pool    int // connections, besides those for pipelines
	breaker *outage.Breaker

	dialling chan struct{} // a lock that allows setting client
	client   atomic.Value  // *Client: atomic.Pointer[Client] has each importing package compile go-redis's 700 methods

	denied atomic.Bool // a command was denied since the last probe
	stop   context.CancelFunc
	ended  chan struct{}
	added  chan struct{} // has capacity 1: there is a new Runner

	mu      sync.Mutex // guards runners, and is held while they are notified
	runners []*Runner
}

// Client is a client for the kind of Redis that was found: a single server or a Cluster.
type Client struct {
	redis.UniversalClient
	Cluster *redis.ClusterClient // nil for a single server
	Publish string               // PUBLISH or SPUBLISH
}

// Open returns a connection to the Redis of a URL. It fails if settings are invalid. A Redis that does not answer is no
// error: calls then fail until it does. Close must be called after the Runners are closed.
func Open(cfg Config) (*Conn, error) {
	cfg.Dial = cmp.Or(cfg.Dial, dialTimeout)
	cfg.Meanwhile = cmp.Or(cfg.Meanwhile, "counts are stale meanwhile")
	quiet.Do(func() { redis.SetLogger(silence{}) })
	s := &Conn{
		Marks:    newMarks(),
		cfg:      cfg,
		breaker:  outage.NewBreaker("redis"),
		dialling: make(chan struct{}, 1),
		ended:    make(chan struct{}),
		added:    make(chan struct{}, 1),
	}

	if problem := CheckURL(cfg.URL); problem != "" {
		return nil, fmt.Errorf("redisconn: %w: URL of Redis: %s", ErrConfig, problem)
	}

	s.parse(cfg.URL)

	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.watchState(ctx) // until Close

	return s, nil
}

// Close closes the connections. Calls in progress may fail. It is not an error if a server has gone before and its TLS
// connection cannot be closed properly.
func (s *Conn) Close() error {
	s.stop()
	s.dialling <- struct{}{} // keeps any call from connecting again

	var err error
	if c := s.connected(); c != nil {
		err = c.Close() // this also ends a probe that waits for a server, for which watchState waits
	}

	<-s.ended
	// The goodbye of TLS is a write, which fails when the server has gone before.
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	return err
}

// quiet silences go-redis's own logger, which writes to stderr; the errors of calls say the same.
var quiet sync.Once

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// parse sets s.dial according to the URL. It ignores errors, because CheckURL has found none.
func (s *Conn) parse(raw string) {
	u, _ := url.Parse(raw)
	switch q := u.Query(); {
	case q.Has("master_name"):
		o, _ := redis.ParseFailoverURL(raw)
		s.DB = o.DB
		s.pool = poolSize(o.PoolSize)

		o.PoolSize = s.pool
		o.MaxRetries = -1 // only the caller knows what may be repeated
		// Otherwise go-redis would ignore the deadlines of callers, and wait for its own.
		o.ContextTimeoutEnabled = true
		s.timeouts(&o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)

		// The oldest protocol that every server has; nothing of RESP3 is used.
		o.Protocol = 2
		o.DisableIdentity = true
		// One attempt to connect. Whether there is another one is decided by the caller and by the probe.
		o.DialerRetries = 1
		o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
		o.OnConnect = s.reached
		s.dial = func() redis.UniversalClient { return redis.NewFailoverClient(o) }
	case q.Has("addr"):
		o, _ := redis.ParseClusterURL(raw)
		s.pool = poolSize(o.PoolSize)
		o.PoolSize = s.pool
		s.dial = func() redis.UniversalClient { return redis.NewClusterClient(s.clusterOptions(o)) }
	default:
		o, _ := redis.ParseURL(raw)
		s.DB = o.DB
		s.pool = poolSize(o.PoolSize)

		o.PoolSize = s.pool
		o.MaxRetries = -1
		o.ContextTimeoutEnabled = true
		s.timeouts(&o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)

		o.Protocol = 2
		o.DisableIdentity = true
		o.DialerRetries = 1
		// These are pushes of RESP3, so with protocol 2 it would be in vain to ask for them.
		o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
		o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
		o.OnConnect = s.reached
		s.dial = func() redis.UniversalClient { return redis.NewClient(o) }
	}
}

// poolSize returns the size in the URL, or the default.
func poolSize(size int) int { return cmp.Or(size, poolPerCore*runtime.GOMAXPROCS(0)) }

// timeouts sets the timeouts that the URL does not set.
func (s *Conn) timeouts(dial, read, write *time.Duration) {
	*dial = cmp.Or(*dial, s.cfg.Dial)
	*read = cmp.Or(*read, readTimeout)
	*write = cmp.Or(*write, readTimeout)
}

func (s *Conn) clusterOptions(o *redis.ClusterOptions) *redis.ClusterOptions {
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	s.timeouts(&o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)

	o.Protocol = 2
	o.DisableIdentity = true
	o.DialerRetries = 1
	o.DisableRoutingPolicies = true // keys are declared, so COMMAND is not needed to find them
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
	o.OnConnect = s.reached

	return o
}

// reached reads the run id of the server at the other end of a new connection.
func (s *Conn) reached(ctx context.Context, c *redis.Conn) error {
	// This runs before any command of the connection, so Marks.Runs changes before old data can be read.
	info, err := c.Info(ctx, "server").Result()
	if err != nil && !redis.IsAuthError(err) && !redis.IsPermissionError(err) {
		return err
	}

	// A user may have all rights that we need except INFO. Then the run id is empty.
	s.Marks.reached(InfoField(info, "run_id"))
	return nil
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialer returns a function that dials like other, and counts the bytes of its connections if Config.OnBytes is set.
func (s *Conn) dialer(timeout time.Duration, tls *tls.Config, other dialFunc) dialFunc {
	if s.cfg.OnBytes == nil {
		return other
	}

	// The dialer that go-redis would make by itself, if it had none from here.
	dial := redis.NewDialer(&redis.Options{DialTimeout: timeout, TLSConfig: tls})
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}

		return &counted{c, s.cfg.OnBytes}, nil
	}
}

// counted is a connection whose bytes are counted.
type counted struct {
	net.Conn
	on Traffic
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.on.Carried(0, n)
	return n, err
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.on.Carried(n, 0)
	return n, err
}

// connected returns the client, or nil if Redis has never been reached.
func (s *Conn) connected() *Client {
	c, _ := s.client.Load().(*Client)
	return c
}

// onCluster reports whether Redis has been reached and is a Cluster.
func (s *Conn) onCluster() bool {
	c := s.connected()
	return c != nil && c.Cluster != nil
}

// connect returns the client. The first call that reaches Redis creates it.
func (s *Conn) connect(ctx context.Context) (*Client, error) {
	if c := s.connected(); c != nil {
		return c, nil
	}

	// A channel instead of a mutex, so that a call whose time is over stops waiting.
	select {
	case s.dialling <- struct{}{}:
		defer func() { <-s.dialling }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}

	// Another call may have connected in the meantime.
	if c := s.connected(); c != nil {
		return c, nil
	}

	// A client that cannot find out what it talks to is closed again, since the next one may be of another kind.
	u := s.dial()
	c, err := s.probe(ctx, u)
	if err != nil {
		_ = u.Close()
		return nil, err
	}

	s.client.Store(c)
	// watchState then notifies the Runners.
	s.breaker.Signal()
	return c, nil
}

// probe finds out whether a single server or a Cluster answers.
func (s *Conn) probe(ctx context.Context, u redis.UniversalClient) (*Client, error) {
	server, err := u.Info(ctx, "server").Result()
	if err != nil {
		return nil, err
	}

	// What is known of the kind of Redis holds for the life of the client; a Redis that changes it needs a restart.
	c := &Client{UniversalClient: u, Publish: "PUBLISH"}
	c.Cluster, _ = u.(*redis.ClusterClient)
	single, _ := u.(*redis.Client)

	if c.Cluster == nil {
		info, err := u.Info(ctx, "cluster").Result()
		if err != nil {
			return nil, err
		}

		// The URL names one server, but that is part of a Cluster.
		if InfoField(info, "cluster_enabled") == "1" {
			o := single.Options()
			c.Cluster = redis.NewClusterClient(s.clusterOptions(&redis.ClusterOptions{
				Addrs:        []string{o.Addr},
				Username:     o.Username,
				Password:     o.Password,
				TLSConfig:    o.TLSConfig,
				DialTimeout:  o.DialTimeout,
				ReadTimeout:  o.ReadTimeout,
				WriteTimeout: o.WriteTimeout,
				PoolSize:     o.PoolSize,
			}))
			c.UniversalClient = c.Cluster
			_ = u.Close()
		}
	}

	if c.Cluster != nil {
		major, _, _ := strings.Cut(InfoField(server, "redis_version"), ".")
		n, err := strconv.Atoi(major)
		if err == nil && n >= 7 {
			// A sharded publication goes to the subscribers of one master, any other to all servers of the Cluster.
			c.Publish = "SPUBLISH"
		}
	}

	return c, nil
}

// InfoField returns one field of an INFO reply.
func InfoField(info, name string) string {
	for line := range strings.SplitSeq(info, "\n") {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && k == name {
			return v
		}
	}
	return ""
}

// ErrAway is wrapped by the errors of calls that were not sent, because Redis did not answer or refused commands a
// moment ago.
var ErrAway = errors.New("it did not answer a moment ago")

// do runs fn against Redis, unless the circuit breaker is open.
func (s *Conn) do(ctx context.Context, fn func(context.Context, *Client) error) error {
	// During an outage only one call each half second waits for Redis.
	done, err := s.breaker.Allow()
	if err != nil {
		return ErrAway
	}

	start := time.Now()
	err = s.attempt(ctx, fn)
	// A caller that leaves before a connection could be made says nothing about Redis.
	early := ctx.Err() != nil && time.Since(start) < dialTimeout // the caller gave up before Redis could have answered
	// An error that Redis itself replied shows that it works.
	if err == nil || answered(err) {
		done(nil)
	} else if early {
		done(outage.ErrNotItsFault)
	} else {
		done(err)
		s.breaker.Failed(err)
	}

	if err != nil {
		s.refused(err)
	}

	return err
}

// doApart runs fn against Redis regardless of the circuit breaker, and does not affect it.
func (s *Conn) doApart(ctx context.Context, fn func(context.Context, *Client) error) error {
	// The breaker is for all masters, and this call may concern one that is gone while the others work.
	err := s.attempt(ctx, fn)
	if err != nil {
		s.refused(err)
	}

	return err
}

// attempt runs fn against Redis.
func (s *Conn) attempt(ctx context.Context, fn func(context.Context, *Client) error) error {
	within, span := tracing.Start(ctx, "redis")
	defer span.End()
	call, cancel := context.WithTimeout(within, callTimeout)
	defer cancel()

	c, err := s.connect(call)
	if err == nil {
		err = fn(call, c)
	}

	return err
}

// Masters calls fn for every master, on a Cluster from several goroutines. It reads the list of masters again, but uses
// the last known list if that takes too long.
func (c *Client) Masters(ctx context.Context, fn func(context.Context, redis.Cmdable) error) error {
	if c.Cluster == nil {
		return fn(ctx, c.UniversalClient)
	}

	reload, cancel := context.WithTimeout(ctx, reloadTimeout)
	defer cancel()
	// The list alone has that limit; fn has the time of the caller.
	return c.Cluster.ForEachMaster(reload, func(_ context.Context, m *redis.Client) error { return fn(ctx, m) })
}
