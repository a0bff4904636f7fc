// Package redisstore is presence.Store and unread.Store in Redis: single, Sentinel or Cluster,
// 6.2 or newer, without modules. All changes are made by the scripts of package
// scripts, each of which may run twice or late.
package redisstore

import (
	"cmp"
	"context"
	"crypto/rand"
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
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/rs/zerolog"
	"github.com/sony/gobreaker/v2"

	"headcount/presence"
	"headcount/scripts"
)

var (
	// ErrConfig is in every error about settings that cannot work.
	ErrConfig = errors.New("bad setting")
	// ErrForeign says that a key of ours holds data of another type: another
	// program uses this Redis under our prefix. presence.ErrUnavailable is in the
	// same errors: nothing can be read or written until it is put right.
	ErrForeign = errors.New("a key that begins with " + prefix + " holds data of another program")
)

const (
	dialTimeout = time.Second
	readTimeout = 3 * time.Second
	callTimeout = 5 * time.Second // of a whole call, when its context has no earlier end

	tripAfter  = 3                      // failures in a row until calls fail without trying
	probeEvery = 500 * time.Millisecond // between two tries while they do

	maxPipeline = 1024 // scripts in one pipeline; longer lists go in several
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	// URL is redis:// or rediss://, with ?addr= (repeatable) a Cluster, with
	// ?master_name= a Sentinel, else a single server, or a Cluster when that server
	// says that it is part of one. Required.
	URL        string
	Partitions int // P; default presence.DefaultPartitions
	Buckets    int // B; default presence.DefaultBuckets
	Facts      Facts
	// RememberFor is how long pages with nobody on them are remembered; default
	// 24h, whole seconds.
	RememberFor time.Duration
	// FactsWait is how long a process that finds no cluster facts waits for a
	// running one to write them again, before it writes its own; default 3s. It
	// must be longer than running processes take to renew their leases.
	FactsWait time.Duration
	// Backlog is how many bytes of publications wait for one watcher; default
	// 8 MiB. Beyond, they are dropped and the watcher is told to read again.
	Backlog int
	// Peers are the names of the regions that this one shares its counts with.
	Peers []string
	// Dial is how long it may take to connect; default 1s.
	Dial time.Duration
	// OnBytes is told of the bytes that each connection carried, from any
	// goroutine. Optional.
	OnBytes func(sent, received int)
	Log     zerolog.Logger
	// OnState is told when Redis comes and goes, from one goroutine; it begins
	// with away. It must not block. Optional.
	OnState func(up bool)
}

// Facts are what all processes of a region must agree on beside P and B.
type Facts struct {
	Region string
	// Secret is the keyed check value of the cluster secret, never the secret; of
	// several, a,b,c, while they rotate: then any is right, and the first is the
	// next process's to match.
	Secret string
}

// Store is the store in Redis. Its methods may be called from any goroutine.
type Store struct {
	cfg     Config
	dial    func() redis.UniversalClient
	db      int
	scripts map[string]script
	breaker *gobreaker.TwoStepCircuitBreaker[struct{}]
	metrics *metrics
	ping    time.Duration // between two pings of a subscription
	self    string        // id of this process in claims
	claims  atomic.Uint64 // number of its last claim
	floor   atomic.Uint64 // highest incarnation seen in any count

	dialling chan struct{} // holds one: the right to set client
	client   atomic.Pointer[client]

	wake  chan struct{} // holds one: the breaker's state may have changed
	stop  context.CancelFunc
	ended chan struct{}

	mu           sync.Mutex // guards all below
	partitions   []partition
	factsMissing time.Time // since when there are none; zero: they are there
	factsHeld    bool      // this process has been accepted with its facts
}

// client is what has been found out about the other side.
type client struct {
	redis.UniversalClient
	cluster *redis.ClusterClient // nil when it is none
	publish string               // PUBLISH or SPUBLISH
}

type script struct{ text, sha string }

var (
	_ presence.Store     = (*Store)(nil)
	_ presence.Processes = (*Store)(nil)
)

// Open returns a store over the Redis of that URL. It fails when settings
// cannot work, not when Redis does not answer: then calls return
// presence.ErrUnavailable until it does. Close ends it.
func Open(cfg Config) (*Store, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)
	cfg.RememberFor = cmp.Or(cfg.RememberFor, 24*time.Hour)
	cfg.FactsWait = cmp.Or(cfg.FactsWait, 3*time.Second)
	cfg.Backlog = cmp.Or(cfg.Backlog, 8<<20)
	cfg.Dial = cmp.Or(cfg.Dial, dialTimeout)
	switch {
	case cfg.Partitions < 1 || cfg.Buckets < 1:
		return nil, fmt.Errorf("redisstore: %w: %d partitions, %d buckets", ErrConfig, cfg.Partitions, cfg.Buckets)
	case cfg.RememberFor < time.Second:
		return nil, fmt.Errorf("redisstore: %w: pages remembered for %s, less than a second", ErrConfig, cfg.RememberFor)
	}
	quiet.Do(func() { redis.SetLogger(silence{}) })
	s := &Store{
		cfg:        cfg,
		scripts:    map[string]script{},
		ping:       pingEvery,
		self:       rand.Text(),
		dialling:   make(chan struct{}, 1),
		wake:       make(chan struct{}, 1),
		ended:      make(chan struct{}),
		partitions: make([]partition, cfg.Partitions),
	}
	if err := s.parse(cfg.URL); err != nil {
		return nil, err
	}
	for _, name := range []string{
		"claim", "fence", "members", "load", "counts", "read", "detach", "renew", "leave", "log", "own", "relog", "peers", "hello", "merge",
		"change", "topics", "save",
	} {
		text := scripts.Source(name)
		s.scripts[name] = script{text, redis.NewScript(text).Hash()}
	}
	s.breaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name:          "redis",
		Timeout:       probeEvery,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= tripAfter },
		OnStateChange: func(string, gobreaker.State, gobreaker.State) { s.look() },
		IsExcluded:    func(err error) bool { return errors.Is(err, errNotItsFault) },
	})
	s.metrics = newMetrics(s)
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	go s.watchState(ctx)
	return s, nil
}

// Close ends the store's connections. Calls under way may fail.
func (s *Store) Close() error {
	s.stop()
	<-s.ended
	s.dialling <- struct{}{} // nobody dials any more
	if c := s.client.Load(); c != nil {
		return c.Close()
	}
	return nil
}

// quiet takes the word from go-redis, which writes to stderr: what it has to say
// is in the errors of calls.
var quiet sync.Once

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// parse makes s.dial of the URL.
func (s *Store) parse(raw string) error {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "redis" && u.Scheme != "rediss" {
		return fmt.Errorf("redisstore: %w: the URL of Redis must be redis://… or rediss://…", ErrConfig) // it may hold a password: it is not shown
	}
	bad := func(err error) error { return fmt.Errorf("redisstore: %w: URL of Redis: %w", ErrConfig, err) }
	switch q := u.Query(); {
	case q.Has("master_name"):
		o, err := redis.ParseFailoverURL(raw)
		if err != nil {
			return bad(err)
		}
		s.db = o.DB
		o.MaxRetries = -1 // the scripts may run twice, but it is the caller who says when
		o.ContextTimeoutEnabled = true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
		o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
		o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
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
		s.db = o.DB
		o.MaxRetries = -1
		o.ContextTimeoutEnabled = true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
		o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
		o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
		o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
		s.dial = func() redis.UniversalClient { return redis.NewClient(o) }
	}
	return nil
}

func (s *Store) clusterOptions(o *redis.ClusterOptions) *redis.ClusterOptions {
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = cmp.Or(o.DialTimeout, s.cfg.Dial), cmp.Or(o.ReadTimeout, readTimeout), cmp.Or(o.WriteTimeout, readTimeout)
	o.Protocol, o.DisableIdentity, o.DialerRetries = 2, true, 1
	o.DisableRoutingPolicies = true // keys are declared: no COMMAND is needed to find them
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.Dialer = s.dialer(o.DialTimeout, o.TLSConfig, o.Dialer)
	return o
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialer counts the bytes of connections, when somebody wants to know.
func (s *Store) dialer(timeout time.Duration, tls *tls.Config, other dialFunc) dialFunc {
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
	on func(sent, received int)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.on(0, n)
	return n, err
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.on(n, 0)
	return n, err
}

// connect returns the client, made by the first call that finds Redis answering.
func (s *Store) connect(ctx context.Context) (*client, error) {
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
	if err != nil {
		_ = u.Close()
		return nil, err
	}
	s.client.Store(c)
	s.look()
	return c, nil
}

// probe finds out what answers.
func (s *Store) probe(ctx context.Context, u redis.UniversalClient) (*client, error) {
	server, err := u.Info(ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	memory, err := u.Info(ctx, "memory").Result()
	if err != nil {
		return nil, err
	}
	if p := infoField(memory, "maxmemory_policy"); strings.HasPrefix(p, "allkeys") && infoField(memory, "maxmemory") != "0" {
		s.cfg.Log.Warn().Str("maxmemory_policy", p).Msg("redis drops keys when its memory is full; counts will then be wrong: set noeviction")
	}
	c := &client{UniversalClient: u, publish: "PUBLISH"}
	c.cluster, _ = u.(*redis.ClusterClient)
	single, _ := u.(*redis.Client)
	if c.cluster == nil {
		info, err := u.Info(ctx, "cluster").Result()
		if err != nil {
			return nil, err
		}
		if infoField(info, "cluster_enabled") == "1" {
			o := single.Options()
			c.cluster = redis.NewClusterClient(s.clusterOptions(&redis.ClusterOptions{
				Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
				DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, PoolSize: o.PoolSize,
			}))
			c.UniversalClient = c.cluster
			_ = u.Close()
		}
	}
	if major, _, _ := strings.Cut(infoField(server, "redis_version"), "."); c.cluster != nil {
		if n, err := strconv.Atoi(major); err == nil && n >= 7 {
			c.publish = "SPUBLISH"
		}
	}
	return c, nil
}

// infoField is one field of an INFO reply.
func infoField(info, name string) string {
	for line := range strings.SplitSeq(info, "\n") {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && k == name {
			return v
		}
	}
	return ""
}

var errNoReply = errors.New("redis: no reply")

// errNotItsFault marks a failure that says nothing about Redis: the caller left.
var errNotItsFault = errors.New("the caller left")

// do runs fn against Redis, unless it is known not to answer.
func (s *Store) do(ctx context.Context, fn func(context.Context, *client) error) error {
	done, err := s.breaker.Allow()
	if err != nil {
		return fmt.Errorf("%w: it did not answer a moment ago", presence.ErrUnavailable)
	}
	start := time.Now()
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := s.connect(call)
	if err == nil {
		err = fn(call, c)
	}
	switch {
	case err == nil || answered(err):
		done(nil)
	case ctx.Err() != nil && time.Since(start) < dialTimeout:
		done(errNotItsFault)
	default:
		done(err)
	}
	if err != nil {
		s.metrics.errors.Inc()
		return classify(err)
	}
	return nil
}

// answered reports whether err is the word of a server that is able to serve.
func answered(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	for _, p := range []string{"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN"} {
		if strings.HasPrefix(reply.Error(), p) {
			return false
		}
	}
	return true
}

// classify gives err the meaning that the contract has for it.
func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, presence.ErrUnavailable), errors.Is(err, presence.ErrFenced), errors.Is(err, presence.ErrLost),
		errors.Is(err, presence.ErrFacts), errors.Is(err, presence.ErrNameTaken):
		return err
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return fmt.Errorf("%w: %w: %w", presence.ErrUnavailable, ErrForeign, err)
	}
	return fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
}

// call is one run of a script.
type call struct {
	script string
	keys   []string
	args   []any
	reply  any
	err    error // classified
}

// run runs scripts in pipelines, in order for each key, and fills in what became
// of them. The first error is returned, too.
func (s *Store) run(ctx context.Context, calls []*call) error {
	for chunk := range slices.Chunk(calls, maxPipeline) {
		err := s.do(ctx, func(ctx context.Context, c *client) error { return s.pipeline(ctx, c, chunk) })
		if err != nil {
			for _, cl := range chunk {
				if cl.reply == nil && cl.err == nil {
					cl.err = err
				}
			}
		}
	}
	for _, cl := range calls {
		if cl.err != nil {
			return cl.err
		}
	}
	return nil
}

// pipeline runs one pipeline of scripts, and those again that the server did not
// know: a pipeline does not heal by itself. Its error is nil when any of them was
// answered; the others have theirs.
func (s *Store) pipeline(ctx context.Context, c *client, calls []*call) error {
	for attempt := 0; ; attempt++ {
		cmds := make([]*redis.Cmd, len(calls))
		pipe := c.Pipeline()
		for i, cl := range calls {
			sc := s.scripts[cl.script]
			if attempt < 2 {
				cmds[i] = pipe.EvalSha(ctx, sc.sha, cl.keys, cl.args...)
			} else {
				cmds[i] = pipe.Eval(ctx, sc.text, cl.keys, cl.args...)
			}
			s.metrics.runs[cl.script].Inc()
		}
		s.metrics.commands.Add(float64(len(calls)))
		_, err := pipe.Exec(ctx)
		var unknown []*call
		served := false
		for i, cl := range calls {
			v, e := cmds[i].Result()
			if e == nil && v == nil { // go-redis says nothing of it when a connection is refused
				e = cmp.Or(err, errNoReply)
			}
			switch {
			case e == nil:
				cl.reply, cl.err, served = v, nil, true
			case attempt < 2 && redis.HasErrorPrefix(e, "NOSCRIPT"):
				unknown = append(unknown, cl)
			default:
				cl.reply, cl.err = nil, classify(e)
				served = served || answered(e)
			}
		}
		if len(unknown) == 0 {
			if served {
				return nil
			}
			return err
		}
		if attempt == 0 {
			if err := s.loadScripts(ctx, c); err != nil {
				return err
			}
		}
		calls = unknown
	}
}

// loadScripts makes the scripts known to every master.
func (s *Store) loadScripts(ctx context.Context, c *client) error {
	return c.masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		for _, sc := range s.scripts {
			pipe.ScriptLoad(ctx, sc.text)
		}
		s.metrics.commands.Add(float64(len(s.scripts)))
		_, err := pipe.Exec(ctx)
		return err
	})
}

// masters calls fn for every master, on a Cluster from several goroutines.
func (c *client) masters(ctx context.Context, fn func(context.Context, redis.Cmdable) error) error {
	if c.cluster == nil {
		return fn(ctx, c.UniversalClient)
	}
	return c.cluster.ForEachMaster(ctx, func(ctx context.Context, m *redis.Client) error { return fn(ctx, m) })
}

// look has watchState look at the state.
func (s *Store) look() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// watchState tells OnState, and probes while Redis is away, so that the store
// heals also when nobody calls it.
func (s *Store) watchState(ctx context.Context) {
	defer close(s.ended)
	tick := time.NewTimer(0)
	defer tick.Stop()
	for told := false; ; {
		up := s.up()
		if up != told {
			told = up
			if up {
				s.cfg.Log.Info().Msg("redis answers")
			} else {
				s.cfg.Log.Warn().Msg("redis does not answer")
			}
			if s.cfg.OnState != nil {
				s.cfg.OnState(up)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			if s.up() {
				continue
			}
			tick.Reset(probeEvery)
		case <-tick.C:
			if s.up() {
				continue
			}
			_ = s.do(ctx, func(ctx context.Context, c *client) error {
				return c.masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return m.Ping(ctx).Err() })
			})
			tick.Reset(probeEvery + 10*time.Millisecond) // a breaker that just opened lets nothing through before
		}
	}
}

// up reports whether Redis answered when last asked.
func (s *Store) up() bool {
	return s.client.Load() != nil && s.breaker.State() == gobreaker.StateClosed
}

// seen remembers the highest incarnation of any count.
func (s *Store) seen(incarnation uint64) {
	for {
		old := s.floor.Load()
		if incarnation <= old || s.floor.CompareAndSwap(old, incarnation) {
			return
		}
	}
}
