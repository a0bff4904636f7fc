// Package redisconn is a connection to Redis: single, Sentinel or Cluster, 6.2 or
// newer. It finds out what answers, runs scripts, fails at once while Redis does
// not answer or refuses commands, and says when that begins and ends. The stores
// in Redis are built on it.
package redisconn

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/tracing"
	"headcount/scripts"
)

// ErrConfig is in every error about settings that cannot work.
var ErrConfig = errors.New("bad setting")

const (
	dialTimeout = time.Second
	readTimeout = 3 * time.Second
	callTimeout = 5 * time.Second // of a whole call, when its context has no earlier end

	movingPause = 10 * time.Millisecond // until a command is sent again whose slot is moving

	maxPipeline = 1024 // scripts in one pipeline; longer lists go in several
)

// States is told when Redis comes and goes, from one goroutine; it begins with away.
// It must not block.
type States interface{ StoreState(up bool) }

// Runs is told which run of a server answers each new connection, from any goroutine, before anything
// is sent there. The run is empty when the server does not say it.
type Runs interface{ Reached(run string) }

// Traffic is told of the bytes that each connection carried, from any goroutine.
type Traffic interface{ Carried(sent, received int) }

// Config tunes a Conn. A zero field takes its default.
type Config struct {
	// URL is redis:// or rediss://, with ?addr= (repeatable) a Cluster, with
	// ?master_name= a Sentinel, else a single server, or a Cluster when that server
	// says that it is part of one. Required.
	URL string
	// Scripts are those that Run may run.
	Scripts []scripts.Name
	// Unavailable is in the errors of calls that Redis did not answer. Required.
	Unavailable error
	// Classify gives an error of Redis the meaning that the caller's contract has
	// for it. Required.
	Classify func(error) error
	// ProbeWrite has every master carry out a write that changes nothing, to find
	// out whether Redis serves again, and returns how many commands that took. It
	// may be called before Open returns. Required.
	ProbeWrite func(context.Context, *Client) (commands int, err error)
	// Accept is asked once Redis answers, before anything is done there. Until it returns
	// nil, its error is that of every call. Optional.
	Accept func(context.Context, *Client) error
	// Dial is how long it may take to connect; default 1s.
	Dial       time.Duration
	OnBytes    Traffic               // optional
	OnRun      Runs                  // optional
	Marks      *Marks                // of the process, when Redis is to be watched for losses; optional
	Registerer prometheus.Registerer // of the connection's metrics; nil: none
	Metrics    string                // what their names begin with; default headcount_redis
	Log        zerolog.Logger
	OnState    States // optional
}

// Conn is a connection to Redis. Its methods may be called from any goroutine.
type Conn struct {
	DB      int // number of the database
	Metrics *Metrics

	cfg     Config
	dial    func() redis.UniversalClient
	scripts map[scripts.Name]script
	breaker *outage.Breaker

	dialling chan struct{} // holds one: the right to set client
	client   atomic.Pointer[Client]

	// refusal is when Redis last refused a command that it would have to carry
	// out, and refusing what watchState makes of it: nothing is served then.
	refusal  atomic.Pointer[time.Time]
	refusing atomic.Bool
	stop     context.CancelFunc
	ended    chan struct{}
}

// Client is what has been found out about the other side.
type Client struct {
	redis.UniversalClient
	Cluster *redis.ClusterClient // nil when it is none
	Publish string               // PUBLISH or SPUBLISH
}

type script struct {
	text, sha string
	marked    bool
}

// Open returns a connection to the Redis of that URL. It fails when settings
// cannot work, not when Redis does not answer: then calls fail with
// Config.Unavailable until it does. Close ends it.
func Open(cfg Config) (*Conn, error) {
	cfg.Dial = cmp.Or(cfg.Dial, dialTimeout)
	cfg.Metrics = cmp.Or(cfg.Metrics, "headcount_redis")
	quiet.Do(func() { redis.SetLogger(silence{}) })
	s := &Conn{
		cfg:      cfg,
		scripts:  map[scripts.Name]script{},
		dialling: make(chan struct{}, 1),
		ended:    make(chan struct{}),
	}
	if err := s.parse(cfg.URL); err != nil {
		return nil, err
	}
	for _, name := range cfg.Scripts {
		text, marked := name.Source(), cfg.Marks != nil && slices.Contains(scripts.Marked, name)
		if marked {
			text = scripts.Mark() + text
		}
		s.scripts[name] = script{text, redis.NewScript(text).Hash(), marked}
	}
	s.breaker = outage.NewBreaker("redis")
	s.Metrics = newMetrics(s)
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.watchState(ctx) // ends with Close
	return s, nil
}

// Close ends the connections. Calls under way may fail. A server that has gone before,
// to which TLS can say no farewell, is no error.
func (s *Conn) Close() error {
	s.stop()
	<-s.ended
	s.dialling <- struct{}{} // nobody dials any more
	if c := s.client.Load(); c != nil {
		if err := c.Close(); !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			return err
		}
	}
	return nil
}

// Known is the client when there is one, or the word that Redis is away.
func (s *Conn) Known(ctx context.Context) (*Client, error) {
	if c := s.client.Load(); c != nil {
		return c, nil
	}
	var c *Client
	err := s.Do(ctx, func(_ context.Context, found *Client) error {
		c = found
		return nil
	})
	return c, err
}

// quiet takes the word from go-redis, which writes to stderr: what it has to say
// is in the errors of calls.
var quiet sync.Once

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// parse makes s.dial of the URL.
func (s *Conn) parse(raw string) error {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "redis" && u.Scheme != "rediss" {
		return fmt.Errorf("redisconn: %w: the URL of Redis must be redis://… or rediss://…", ErrConfig) // it may hold a password: it is not shown
	}
	bad := func(err error) error { return fmt.Errorf("redisconn: %w: URL of Redis: %w", ErrConfig, err) }
	switch q := u.Query(); {
	case q.Has("master_name"):
		o, err := redis.ParseFailoverURL(raw)
		if err != nil {
			return bad(err)
		}
		s.DB = o.DB
		o.MaxRetries = -1 // it is the caller who says when to repeat
		o.ContextTimeoutEnabled = true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
		o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
		o.Dialer, o.OnConnect = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer), s.reached
		s.dial = func() redis.UniversalClient { return redis.NewFailoverClient(o) }
	case q.Has("addr"):
		o, err := redis.ParseClusterURL(raw)
		if err != nil {
			return bad(err)
		}
		s.dial = func() redis.UniversalClient { return redis.NewClusterClient(s.clusterOptions(o)) }
	default:
		o, err := redis.ParseURL(raw)
		if err != nil {
			return bad(err)
		}
		s.DB = o.DB
		o.MaxRetries = -1
		o.ContextTimeoutEnabled = true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
		o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
		o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
		o.Dialer, o.OnConnect = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer), s.reached
		s.dial = func() redis.UniversalClient { return redis.NewClient(o) }
	}
	return nil
}

func (s *Conn) clusterOptions(o *redis.ClusterOptions) *redis.ClusterOptions {
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
	o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
	o.DisableRoutingPolicies = true // keys are declared: no COMMAND is needed to find them
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.Dialer, o.OnConnect = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer), s.reached
	return o
}

// reached asks a new connection which run of a server answers it.
func (s *Conn) reached(ctx context.Context, c *redis.Conn) error {
	if s.cfg.OnRun == nil {
		return nil
	}
	info, err := c.Info(ctx, "server").Result()
	if err != nil && !redis.IsAuthError(err) && !redis.IsPermissionError(err) {
		return err
	}
	s.cfg.OnRun.Reached(InfoField(info, "run_id"))
	return nil
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialer counts the bytes of connections, when somebody wants to know.
func (s *Conn) dialer(timeout time.Duration, tls *tls.Config, other dialFunc) dialFunc {
	if s.cfg.OnBytes == nil {
		return other
	}
	dial := redis.NewDialer(&redis.Options{DialTimeout: timeout, TLSConfig: tls})
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &counted{c, s.cfg.OnBytes}, nil
	}
}

// counted is a connection that tells of its bytes.
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

// connect returns the client, made by the first call that finds Redis answering.
func (s *Conn) connect(ctx context.Context) (*Client, error) {
	if c := s.client.Load(); c != nil {
		return c, nil
	}
	select {
	case s.dialling <- struct{}{}:
		defer func() { <-s.dialling }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if c := s.client.Load(); c != nil {
		return c, nil
	}
	u := s.dial()
	c, err := s.probe(ctx, u)
	if err == nil && s.cfg.Accept != nil {
		if err = s.cfg.Accept(ctx, c); err != nil {
			u = c.UniversalClient // of a Cluster, perhaps
		}
	}
	if err != nil {
		_ = u.Close()
		return nil, err
	}
	s.client.Store(c)
	s.breaker.Signal()
	return c, nil
}

// probe finds out what answers.
func (s *Conn) probe(ctx context.Context, u redis.UniversalClient) (*Client, error) {
	server, err := u.Info(ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	memory, err := u.Info(ctx, "memory").Result()
	if err != nil {
		return nil, err
	}
	if p := InfoField(memory, "maxmemory_policy"); strings.HasPrefix(p, "allkeys") && InfoField(memory, "maxmemory") != "0" {
		s.cfg.Log.Warn().Str("maxmemory_policy", p).Msg("redis drops keys when its memory is full; counts will then be wrong: set noeviction")
	}
	c := &Client{UniversalClient: u, Publish: "PUBLISH"}
	c.Cluster, _ = u.(*redis.ClusterClient)
	single, _ := u.(*redis.Client)
	if c.Cluster == nil {
		info, err := u.Info(ctx, "cluster").Result()
		if err != nil {
			return nil, err
		}
		if InfoField(info, "cluster_enabled") == "1" {
			o := single.Options()
			c.Cluster = redis.NewClusterClient(s.clusterOptions(&redis.ClusterOptions{
				Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
				DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, PoolSize: o.PoolSize,
			}))
			c.UniversalClient = c.Cluster
			_ = u.Close()
		}
	}
	if major, _, _ := strings.Cut(InfoField(server, "redis_version"), "."); c.Cluster != nil {
		if n, err := strconv.Atoi(major); err == nil && n >= 7 {
			c.Publish = "SPUBLISH"
		}
	}
	return c, nil
}

// InfoField is one field of an INFO reply.
func InfoField(info, name string) string {
	for line := range strings.SplitSeq(info, "\n") {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && k == name {
			return v
		}
	}
	return ""
}

var errNoReply = errors.New("redis: no reply")

// Do runs fn against Redis, unless it is known not to answer.
func (s *Conn) Do(ctx context.Context, fn func(context.Context, *Client) error) error {
	done, err := s.breaker.Allow()
	if err != nil {
		return fmt.Errorf("%w: it did not answer a moment ago", s.cfg.Unavailable)
	}
	start := time.Now()
	within, span := tracing.Start(ctx, "redis")
	defer span.End()
	call, cancel := context.WithTimeout(within, callTimeout)
	defer cancel()
	c, err := s.connect(call)
	if err == nil {
		err = fn(call, c)
	}
	switch {
	case err == nil || answered(err):
		done(nil)
	case ctx.Err() != nil && time.Since(start) < dialTimeout:
		done(outage.ErrNotItsFault)
	default:
		done(err)
		s.breaker.Failed(err)
	}
	if err != nil {
		s.Metrics.errors.Inc()
		s.refused(err)
		return s.cfg.Classify(err)
	}
	return nil
}

// Call is one run of a script.
type Call struct {
	Script scripts.Name
	Keys   []string
	Args   []any
	Reply  any
	Err    error // classified
}

// Run runs scripts in pipelines, in order for each key, and fills in what became
// of them. The first error is returned, too.
func (s *Conn) Run(ctx context.Context, calls []*Call) error {
	for chunk := range slices.Chunk(calls, maxPipeline) {
		err := s.Do(ctx, func(ctx context.Context, c *Client) error { return s.pipeline(ctx, c, chunk) })
		if err != nil {
			for _, cl := range chunk {
				if cl.Reply == nil && cl.Err == nil {
					cl.Err = err
				}
			}
		}
	}
	for _, cl := range calls {
		if cl.Err != nil {
			return cl.Err
		}
	}
	return nil
}

// scriptCmd runs a script. go-redis sends it once: its Cluster client repeats a whole
// pipeline after a lost connection, whatever MaxRetries says, and most scripts
// would count twice. Only MOVED and ASK, which say that nothing ran, it follows.
type scriptCmd struct {
	*redis.Cmd
	mark, number string // of a script that is marked
}

// NoRetry is what go-redis asks.
func (scriptCmd) NoRetry() bool { return true }

// command is one run of cl, by name or with the script's text.
func (s *Conn) command(ctx context.Context, c *Client, cl *Call, withText bool) (cmd scriptCmd) {
	sc := s.scripts[cl.Script]
	args := make([]any, 0, 6+len(cl.Keys)+len(cl.Args))
	if withText {
		args = append(args, "eval", sc.text)
	} else {
		args = append(args, "evalsha", sc.sha)
	}
	keys := len(args)
	args = append(args, len(cl.Keys))
	for _, key := range cl.Keys {
		args = append(args, key)
	}
	if sc.marked {
		cmd.mark = s.cfg.Marks.key(c, cl.Keys)
		args[keys] = len(cl.Keys) + 1
		args = append(args, cmd.mark)
	}
	args = append(args, cl.Args...)
	if sc.marked {
		var acknowledged string
		cmd.number, acknowledged = s.cfg.Marks.next(cmd.mark)
		args = append(args, cmd.number, acknowledged)
	}
	cmd.Cmd = redis.NewCmd(ctx, args...)
	return cmd
}

// moving reports whether a command did not run because its slot is on the way from one
// master of a Cluster to another.
func moving(err error) bool {
	return redis.HasErrorPrefix(err, "TRYAGAIN") || redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK")
}

// pipeline runs one pipeline of scripts, and those again that surely did not run: the
// server did not know the script, or its slot is moving. Its error is nil when any
// of them was answered; the others have theirs.
func (s *Conn) pipeline(ctx context.Context, c *Client, calls []*Call) error {
	for unknown := 0; ; { // how often the server did not know a script
		cmds := make([]scriptCmd, len(calls))
		pipe := c.Pipeline()
		for i, cl := range calls {
			cmds[i] = s.command(ctx, c, cl, unknown == 2)
			_ = pipe.Process(ctx, cmds[i])
			s.Metrics.runs[cl.Script].Inc()
		}
		s.Metrics.Commands.Add(float64(len(calls)))
		s.Metrics.batches.Observe(float64(len(calls)))
		began := time.Now()
		_, err := pipe.Exec(ctx)
		s.Metrics.seconds.Observe(time.Since(began).Seconds())
		var again []*Call
		served, load := false, false
		for i, cl := range calls {
			v, e := cmds[i].Result()
			if e == nil && v == nil { // go-redis says nothing of it when a connection is refused
				e = cmp.Or(err, errNoReply)
			}
			switch {
			case e == nil:
				cl.Reply, cl.Err, served = v, nil, true
				if cmds[i].number != "" {
					s.cfg.Marks.acknowledged(cmds[i].mark, cmds[i].number)
				}
				continue
			case unknown < 2 && redis.HasErrorPrefix(e, "NOSCRIPT"):
				again, load = append(again, cl), true
			case moving(e):
				again = append(again, cl)
			}
			cl.Reply, cl.Err = nil, s.cfg.Classify(e)
			served = served || answered(e)
			s.refused(e)
		}
		if len(again) == 0 {
			if served {
				return nil
			}
			return err
		}
		switch {
		case load:
			if unknown++; unknown == 1 {
				if err := s.loadScripts(ctx, c); err != nil {
					return err
				}
			}
		default:
			select {
			case <-ctx.Done():
				return nil // Redis answers
			case <-time.After(movingPause):
			}
		}
		calls = again
	}
}

// loadScripts makes the scripts known to every master.
func (s *Conn) loadScripts(ctx context.Context, c *Client) error {
	return c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		for _, sc := range s.scripts {
			pipe.ScriptLoad(ctx, sc.text)
		}
		s.Metrics.Commands.Add(float64(len(s.scripts)))
		_, err := pipe.Exec(ctx)
		return err
	})
}

// Masters calls fn for every master, on a Cluster from several goroutines.
func (c *Client) Masters(ctx context.Context, fn func(context.Context, redis.Cmdable) error) error {
	if c.Cluster == nil {
		return fn(ctx, c.UniversalClient)
	}
	return c.Cluster.ForEachMaster(ctx, func(ctx context.Context, m *redis.Client) error { return fn(ctx, m) })
}
