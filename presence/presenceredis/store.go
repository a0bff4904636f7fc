// Package presenceredis is presence.Store and unread.Store in Redis: single, Sentinel or Cluster,
// 6.2 or newer, without modules. All changes are made by the scripts of package
// scripts, each of which may run twice or late.
package presenceredis

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/scripts"
)

var (
	// ErrConfig is in every error about settings that cannot work.
	ErrConfig = redisconn.ErrConfig
	// ErrForeign says that a key of ours holds data of another type: another
	// program uses this Redis under our prefix. presence.ErrUnavailable is in the
	// same errors: nothing can be read or written until it is put right.
	ErrForeign = errors.New("a key that begins with " + prefix + " holds data of another program")
)

const maxPipeline = 1024 // reads in one pipeline; longer lists go in several

// HashKeys get the key of user hashes, before the first Renew succeeds.
type HashKeys interface {
	SetHashKey(key []byte) // it must not block
}

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
	// EmptyPages is how many pages with nobody on them are remembered; default
	// 100,000. Beyond, those that have been empty longest are forgotten and come
	// back under a new incarnation.
	EmptyPages int
	// PageStats is how long minutes of pages are remembered; 0: not at all.
	PageStats time.Duration
	// FactsWait is how long a process that finds no cluster facts waits for a
	// running one to write them again, before it writes its own; default 1.6s. It
	// must be longer than running processes take to notice that Redis is back, half
	// a second, and to renew their leases.
	FactsWait time.Duration
	// IDSecrets seal and open the key of user hashes, which HashKeys get. Without
	// HashKeys they are not looked at.
	IDSecrets [][]byte
	HashKeys  HashKeys
	// Backlog is how many bytes of publications wait for one watcher; default
	// 8 MiB. Beyond, they are dropped and the watcher is told to read again.
	Backlog int
	// Peers are the names of the regions that this one shares its counts with.
	Peers []string
	// Dial is how long it may take to connect; default 1s.
	Dial       time.Duration
	OnBytes    redisconn.Traffic     // optional
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnState    redisconn.States // optional
}

// Facts are what all processes of a region must agree on beside P and B.
type Facts struct {
	Region string
	// Secret is the keyed check value of the cluster secret, never the secret; of
	// several, a,b,c, while they rotate: then any is right, and the first is the
	// next process's to match.
	Secret string
	// Counters is the number of the format of the counters that are in the same Redis. 0:
	// nobody knows it, and nobody compares it.
	Counters int
	// Postgres says where PostgreSQL is for counters: none, behind or beside. Empty: this process has no counters.
	Postgres string
	// Webhooks is that of what is kept of webhooks there, likewise.
	Webhooks int
}

// Store is the store in Redis. Its methods may be called from any goroutine.
type Store struct {
	cfg    Config
	conn   *redisconn.Conn
	db     int
	ping   time.Duration // between two pings of a subscription; 0: the default of redisconn
	self   string        // id of this process in claims
	claims atomic.Uint64 // number of its last claim
	looks  atomic.Uint64 // of Incomplete, at one bucket each
	floor  atomic.Uint64 // highest incarnation seen in any count

	generations generationCache
	marks       *redisconn.Marks
	losses      *prometheus.CounterVec // see losses.go

	chores      chores
	stopChores  context.CancelFunc
	choresEnded chan struct{}
	lossesEnded chan struct{}
	minutes     minuteWriter

	counting sync.Mutex // held while counts are written, so that runs come in the order of their numbers

	mu           sync.Mutex // guards all below
	partitions   []partition
	fences       []fences          // by bucket
	seals        map[string]string // of the key of user hashes, as last seen, by hashkey.ID
	sealsMissing time.Time         // since when there are none; zero: they are there
	hashKey      []byte            // nil: not known, or not needed
	factsMissing time.Time         // since when there are none; zero: they are there
	factsHeld    bool              // this process has been accepted with its facts
}

type (
	client = redisconn.Client
	call   = redisconn.Call
)

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
	cfg.EmptyPages = cmp.Or(cfg.EmptyPages, 100_000)
	cfg.FactsWait = cmp.Or(cfg.FactsWait, 1600*time.Millisecond)
	cfg.Backlog = cmp.Or(cfg.Backlog, 8<<20)
	switch {
	case cfg.Partitions < 1 || cfg.Buckets < 1:
		return nil, fmt.Errorf("presenceredis: %w: %d partitions, %d buckets", ErrConfig, cfg.Partitions, cfg.Buckets)
	case cfg.RememberFor < time.Second:
		return nil, fmt.Errorf("presenceredis: %w: pages remembered for %s, less than a second", ErrConfig, cfg.RememberFor)
	}
	s := &Store{
		cfg:         cfg,
		self:        rand.Text(),
		chores:      chores{wake: make(chan struct{}, 1), overfull: map[int]bool{}, sweep: map[int]bool{}},
		choresEnded: make(chan struct{}),
		lossesEnded: make(chan struct{}),
		marks:       redisconn.NewMarks(),
		partitions:  make([]partition, cfg.Partitions),
		fences:      make([]fences, cfg.Buckets),
	}
	conn, err := redisconn.Open(redisconn.Config{
		URL: cfg.URL, Scripts: scripts.Presence, Unavailable: presence.ErrUnavailable, Classify: classify, ProbeWrite: s.probeWrite,
		Dial: cfg.Dial, OnBytes: cfg.OnBytes, OnRun: s, Marks: s.marks, Registerer: cfg.Registerer, Log: cfg.Log, OnState: cfg.OnState,
	})
	if err != nil {
		return nil, fmt.Errorf("presenceredis: %w", err)
	}
	s.conn, s.db = conn, conn.DB
	ctx, stop := context.WithCancel(context.Background())
	s.stopChores = stop
	s.losses = newLosses(cfg.Registerer)
	go s.doChores(ctx)    // ends with Close
	go s.watchLosses(ctx) // likewise
	s.minutes.start(s)
	return s, nil
}

// Marks are those of this process, for the other stores that it has in this Redis.
func (s *Store) Marks() *redisconn.Marks { return s.marks }

// Cause is why Redis cannot be used; nil: it can.
func (s *Store) Cause() error { return s.conn.Cause() }

// Close ends the store's connections. Calls under way may fail.
func (s *Store) Close() error {
	s.minutes.stop()
	s.stopChores()
	<-s.choresEnded
	<-s.lossesEnded
	return s.conn.Close()
}

func (s *Store) do(ctx context.Context, fn func(context.Context, *client) error) error {
	return s.conn.Do(ctx, fn)
}

func (s *Store) run(ctx context.Context, calls []*call) error { return s.conn.Run(ctx, calls) }

func (s *Store) known(ctx context.Context) (*client, error) { return s.conn.Known(ctx) }

// probeWrite has every master carry out a write that changes nothing: the token
// of a bucket is there, or is made as Generation makes it.
func (s *Store) probeWrite(ctx context.Context, c *client) (commands int, err error) {
	pipe := c.Pipeline()
	tokens := s.tokens(c)
	for b := range tokens {
		pipe.SetNX(ctx, tokenKey(b), rand.Text(), 0)
	}
	_, err = pipe.Exec(ctx)
	return tokens, err
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

// raiseFloor remembers the highest incarnation of any count.
func (s *Store) raiseFloor(incarnation uint64) {
	for {
		old := s.floor.Load()
		if incarnation <= old || s.floor.CompareAndSwap(old, incarnation) {
			return
		}
	}
}
