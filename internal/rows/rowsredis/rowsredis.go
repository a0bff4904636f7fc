// Package rowsredis is a store of rows in Redis: a single server, one behind Sentinel, or a Cluster.
//
// Redis has three kinds of keys for each partition, all with the partition's hash tag: a hash with the owner and the
// number of the newest commit, a hash for each collection, and a string for each ID, which expires. Two scripts write
// them, rows_claim.lua and rows_commit.lua; scripts/README.md describes the keys. On a single server all commits of a
// call are one run of the script. On a Cluster each partition is a slot of its own, so they are one pipeline.
//
// Redis may lose its newest commits in a failover, or everything. The store notices neither: the number in the next
// commit shows it.
package rowsredis

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/scripts"
)

// Config tunes a Store.
type Config struct {
	// Conn is the connection to Redis. The Store must be closed before it. Required.
	Conn *redisconn.Conn
	// Inbox is the name of the region that writes the rows, if they are its inbox here. An inbox has owners, numbers
	// and rows of its own, in the same slots. Empty: the rows are this region's own.
	Inbox string
	// Registerer is for the metrics; nil: there are none.
	Registerer prometheus.Registerer
	OnState    redisconn.States // notified whether Redis is available; optional
	// Accept returns an error if the rows in a Redis must not be used. It is called before anything else. Nil: any
	// Redis is accepted.
	Accept func(context.Context, *redisconn.Client) error
}

// Store is a rows.Store in Redis. All methods may be called from any goroutine.
type Store struct {
	conn *redisconn.Conn
	// There are few commits and claims at a time, so they are not bounded: they never wait for reads, nor for commits
	// to a master that does not answer. The number of reads is not limited, so they are bounded.
	writes, reads *redisconn.Runner
	tags          []string // prefixes of all keys of a partition
}

var _ rows.Store = (*Store)(nil)

type client = redisconn.Client

// New returns a Store in the Redis of cfg.Conn. While Redis does not answer, calls return rows.ErrUnavailable.
func New(cfg Config) *Store {
	runner := redisconn.RunnerConfig{
		Scripts:     scripts.Rows,
		Unavailable: rows.ErrUnavailable,
		Classify:    classify,
		Apart:       true, // one master of a Cluster may be unavailable while the others work
		Registerer:  cfg.Registerer,
		Metrics:     "headcount_rows_redis",
		OnState:     cfg.OnState,
		Accept:      cfg.Accept,
	}
	s := &Store{conn: cfg.Conn, writes: cfg.Conn.Runner(runner)}

	// Only one of the two reports the state of Redis, because it is the same connection.
	runner.Scripts = nil
	runner.OnState = nil
	runner.Bounded = true
	runner.Metrics = "headcount_rows_redis_reads"
	s.reads = cfg.Conn.Runner(runner)

	// Tags of other kinds, of buckets and of presence's partitions, begin with other letters.
	s.tags = redisconn.EvenTags("r", rows.Partitions)
	for i, tag := range s.tags {
		s.tags[i] = "hc:{" + tag + "}:"
		if cfg.Inbox != "" {
			s.tags[i] += "in:" + cfg.Inbox + ":"
		}
	}

	return s
}

// Close makes all further calls fail. It does not end calls of Watch.
func (s *Store) Close() {
	s.writes.Close()
	s.reads.Close()
}

// classify converts an error of a call to one of the contract.
func classify(err error) error {
	if strings.Contains(err.Error(), "WRONGTYPE") {
		// The error of Redis does not name the key.
		const mend = "another program wrote a key that begins with hc:{r; delete it"
		return fmt.Errorf("redis: %w: %s: %w", rows.ErrMalformed, mend, err)
	}

	return fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
}

// malformed returns the error for a value of a key that no store of rows can have written.
func malformed(key, what, value string) error {
	return fmt.Errorf("redis: %w: %q has the %s %q; delete it", rows.ErrMalformed, key, what, value)
}

func (s *Store) ownerKey(partition int) string { return s.tags[partition] + "o" }

func (s *Store) collectionKey(partition int, collection string) string {
	return s.tags[partition] + "r:" + collection
}

func (s *Store) idKey(partition int, id *rows.ID) string {
	return s.tags[partition] + "i:" + string(id.Bytes[:])
}

// channel returns the channel of a partition. It names the database, because channels are shared by all databases.
func (s *Store) channel(partition int) string {
	return s.tags[partition] + "n/" + strconv.Itoa(s.conn.DB)
}

// Claim implements rows.Store.
func (s *Store) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	c, err := s.writes.Known(ctx) // to learn what kind of Redis it is
	if err != nil {
		return nil, err
	}

	spans := groups(c, len(partitions), func(int) int { return 1 })
	runs := make([]*redisconn.ScriptRun, len(spans))
	for i, span := range spans {
		runs[i] = s.claimRun(owner, partitions[span.first:span.end])
	}
	// The error of Run is only the first one of the runs. One master of a Cluster may be unavailable while others
	// answer.
	_ = s.writes.Run(ctx, runs)

	claims := make([]rows.Claim, len(partitions))
	for i, span := range spans {
		s.claimed(runs[i], partitions[span.first:span.end], claims[span.first:span.end])
	}
	// An owner that claims a single partition again must not take a failed claim for one that was refused.
	if everyFailed(claims) {
		return nil, claims[0].Err
	}

	return claims, nil
}

// claimed sets the claims of the partitions of one run.
func (s *Store) claimed(run *redisconn.ScriptRun, partitions []rows.Former, claims []rows.Claim) {
	replies := list(run.Reply)
	for i, former := range partitions {
		err := run.Err
		if err == nil {
			claims[i], err = s.claim(former.Partition, list(replies[i]))
		}
		if err != nil {
			claims[i] = rows.Claim{Err: err}
		}
	}
}

func everyFailed(claims []rows.Claim) bool {
	for i := range claims {
		if claims[i].Err == nil {
			return false
		}
	}

	return len(claims) > 0
}

func (s *Store) claimRun(owner string, partitions []rows.Former) *redisconn.ScriptRun {
	run := &redisconn.ScriptRun{Script: scripts.RowsClaim, Args: []any{owner}}
	for _, former := range partitions {
		run.Keys = append(run.Keys, s.ownerKey(former.Partition))
		run.Args = append(run.Args, former.Epoch)
	}

	return run
}

// claim converts the reply of rows_claim.lua for a partition.
func (s *Store) claim(partition int, reply []any) (claim rows.Claim, err error) {
	claim.Epoch, err = s.number(partition, "epoch", reply[0])
	if err != nil {
		return rows.Claim{}, err
	}

	claim.Number, err = s.number(partition, "number", reply[1])

	return claim, err
}

// number parses a number that a script found in a partition.
func (s *Store) number(partition int, what string, reply any) (uint64, error) {
	text, _ := reply.(string)

	// The scripts compare epochs and numbers as strings, so a malformed one in Redis is only noticed here.
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, malformed(s.ownerKey(partition), what, text)
	}

	return n, nil
}

// list returns the elements of a reply.
func list(reply any) []any {
	all, _ := reply.([]any)

	return all
}

// span is a part of a list.
type span struct{ first, end int }

// maxArgs bounds the arguments of one run of a script for several partitions. Redis is blocked during the run.
const maxArgs = 1 << 16

// groups divides a list into parts, each for one run of a script. On a Cluster a run has one element, because elements
// are in different slots. Otherwise a run has as many elements as fit, given the number of arguments of each.
func groups(c *client, n int, args func(i int) int) (spans []span) {
	left := 0 // arguments that still fit into the last run
	for i := range n {
		size := args(i)

		// A single element may be larger than maxArgs. It cannot be divided, so it gets a run of its own.
		if i == 0 || c.Cluster != nil || size > left {
			spans = append(spans, span{first: i})
			left = maxArgs
		}

		left -= size
		spans[len(spans)-1].end = i + 1
	}

	return spans
}
