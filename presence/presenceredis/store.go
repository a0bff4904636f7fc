// Package presenceredis is presence.Store and unread.Store in Redis: a single server,
// Sentinel or Cluster, of version 6.2 or later, without modules. The scripts of package
// scripts make all changes. Each of them may run twice or late.
package presenceredis

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/scripts"
)

// ErrForeign means that a key with our prefix holds data of another type, because another program uses this Redis. The
// key can be neither read nor written until it is deleted.
var ErrForeign = fmt.Errorf("%w: a key that begins with %s holds data of another program",
	presence.ErrMalformed, prefix)

const maxPipeline = 1024 // reads in one pipeline; longer lists go in several

// HashKeys receives the key of user hashes, before the first Renew succeeds.
type HashKeys interface {
	SetHashKey(key []byte) // it must not block
}

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Conn       *redisconn.Conn // required
	Partitions int             // P; default presence.DefaultPartitions
	Buckets    int             // B; default presence.DefaultBuckets
	Facts      Facts
	// RememberFor is how long pages without users are kept; default 24h, in whole seconds.
	RememberFor time.Duration
	// EmptyPages bounds the pages without users; default 100,000. Beyond it, those that
	// have been empty longest are forgotten, and come back under a new incarnation.
	EmptyPages int
	// PageStats is how long minutes of pages are kept; 0: not at all.
	PageStats time.Duration
	// PageDays is how many days of pages are kept; 0: none. Without PageStats there are none.
	PageDays int
	// LastSeen is how long departures of users are remembered, in whole seconds; 0: not at
	// all. Of more than MaxLastSeen (default presence.MaxLastSeen), spread evenly over the
	// partitions, those who departed first are forgotten.
	LastSeen    time.Duration
	MaxLastSeen int
	// FactsWait is how long a process that finds no cluster facts waits for a running
	// process to write them again, before it writes its own; default 1.6s. It must be
	// longer than running processes take to notice that Redis is back (half a second)
	// and to renew their leases.
	FactsWait time.Duration
	// IDSecrets seal and open the key of user hashes. They are not used without HashKeys,
	// which receives that key.
	IDSecrets [][]byte
	HashKeys  HashKeys
	// Backlog bounds the bytes of publications that wait for one watcher; default 8 MiB.
	// Beyond it they are dropped, and the watcher gets a Lost.
	Backlog int
	// Peers are the names of the other regions.
	Peers      []string
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnState    redisconn.States // optional
}

// Facts are what all processes of a region must agree on, in addition to P and B.
type Facts struct {
	Region string
	// Secret is the keyed check value of the cluster secret, never the secret itself. While
	// secrets rotate it has several values, "a,b,c": one of them must match.
	Secret string
	// Counters is the format of the counters in the same Redis; 0: this process does not know. The first process
	// writes it. Only the store of counters compares it, so that processes with counters of another format have
	// presence together.
	Counters int
	// Postgres says how counters use PostgreSQL: PostgresNone, PostgresTiered or PostgresSharedExact. Empty: this
	// process has no counters.
	Postgres string
	// Webhooks is the format of the webhooks' data in the same Redis; 0: it is not
	// compared.
	Webhooks int
}

// Store is the store in Redis. Its methods may be called from any goroutine.
type Store struct {
	cfg     Config
	conn    *redisconn.Runner
	ping    time.Duration // between two pings of a subscription; 0: the default of redisconn
	self    string        // id of this process in claims
	claims  atomic.Uint64 // number of its last claim
	looks   atomic.Uint64 // of Incomplete, at one bucket each
	highest atomic.Uint64 // highest incarnation seen in any count

	keys atomic.Pointer[keyspace] // nil until learnFormat has learned the format

	generations generationCache
	losses      *prometheus.CounterVec // see losses.go
	foreign     sync.Once              // logs that a key holds data of another program

	chores  chores
	minutes minuteWriter

	stop       context.CancelFunc // ends background
	background sync.WaitGroup     // the goroutines of chores, losses and minutes

	counting sync.Mutex // held while counts are written, so that runs arrive in the order of their numbers

	mu           sync.Mutex // guards all below
	partitions   []partition
	fences       []fences          // by bucket
	seals        map[string]string // of the key of user hashes, as last read, by hashkey.ID
	sealsMissing time.Time         // since when Redis has none; zero: it has some
	hashKey      []byte            // nil: not known, or not needed
	factsMissing time.Time         // since when Redis has none; zero: it has some
	factsHeld    bool              // this process's facts were accepted
}

type (
	client    = redisconn.Client
	scriptRun = redisconn.ScriptRun
)

var (
	_ presence.Store     = (*Store)(nil)
	_ presence.Processes = (*Store)(nil)
)

// Open returns a store in the Redis of cfg.Conn. While Redis does not answer, calls return
// presence.ErrUnavailable. The caller must Close the store, and then the connection.
func Open(cfg Config) *Store {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)
	cfg.RememberFor = cmp.Or(cfg.RememberFor, 24*time.Hour)
	cfg.EmptyPages = cmp.Or(cfg.EmptyPages, 100_000)
	cfg.MaxLastSeen = cmp.Or(cfg.MaxLastSeen, presence.MaxLastSeen)
	cfg.FactsWait = cmp.Or(cfg.FactsWait, 1600*time.Millisecond)
	cfg.Backlog = cmp.Or(cfg.Backlog, 8<<20)

	s := &Store{
		cfg: cfg,
		// The id is new at each start: claim.lua compares the numbers of a process's claims, which begin at 1 again.
		self:       rand.Text(),
		chores:     chores{wake: make(chan struct{}, 1), todo: map[int]bool{}},
		partitions: make([]partition, cfg.Partitions),
		fences:     make([]fences, cfg.Buckets),
	}

	s.generations.marks = cfg.Conn.Marks
	s.conn = cfg.Conn.Runner(redisconn.RunnerConfig{
		Scripts:     scripts.Presence,
		Unavailable: presence.ErrUnavailable,
		Classify:    s.classify,
		Registerer:  cfg.Registerer,
		OnState:     cfg.OnState,
	})

	s.losses = newLosses(cfg.Registerer)
	s.minutes = minuteWriter{
		store:     s,
		retention: int64(cfg.PageStats / time.Minute),
		days:      cfg.PageDays,
		writer:    rand.Text(),
		visits:    map[visit]*minutes.Visits{},
	}

	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.background.Go(func() { s.doChores(ctx) })
	s.background.Go(func() { s.watchLosses(ctx) })
	if s.minutes.retention > 0 {
		s.background.Go(func() { s.minutes.keep(ctx) })
	}

	return s
}

// Close ends what the store runs. Later calls fail.
func (s *Store) Close() error {
	// When it is stopped, the minute writer still writes once, so the connection is closed last.
	s.stop()
	s.background.Wait()
	s.conn.Close()
	return nil
}

// classify wraps err in the corresponding error of the contract. It logs only the first error about data of another
// program, because such errors repeat until the key is deleted.
func (s *Store) classify(err error) error {
	// The code may be anywhere in the text: for an error in a script, Redis puts words of its own before it.
	if !strings.Contains(err.Error(), "WRONGTYPE") {
		return fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
	}

	s.foreign.Do(func() {
		s.cfg.Log.Warn().Err(err).Msg(ErrForeign.Error() + "; delete the key, its data is stale until then")
	})

	return fmt.Errorf("%w: %w", ErrForeign, err)
}

// raiseHighest raises highest to the incarnation of a count.
func (s *Store) raiseHighest(incarnation uint64) {
	// Every reader of counts raises it. A bucket that begins anew gets an incarnation above it, so it must never
	// fall.
	for {
		old := s.highest.Load()
		if incarnation <= old || s.highest.CompareAndSwap(old, incarnation) {
			return
		}
	}
}
