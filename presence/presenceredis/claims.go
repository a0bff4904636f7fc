package presenceredis

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/scripts"
)

// fences is a copy of a bucket's fences. Store.mu guards it. The stamp changes with every
// claim; while it stays the same, epochs found valid under it stay valid.
type fences struct {
	run   uint64   // number of the last run of counts.lua
	stamp string   // as of the last reply
	valid []uint64 // by partition: the epoch that was valid under stamp
}

// Generation implements presence.Partitions. It is a hash over data that changes when a
// master restarts, is replaced or is emptied. When a former server answers again, such as after
// its name had moved and moved back, it lacks what the one in between had: it gets another token,
// because under its former generation it would go on with versions older than those that clients know.
func (s *Store) Generation(ctx context.Context) (uint64, error) {
	// Taken before the read: if another server answers meanwhile, set stores the result as one from before.
	_, runs := s.generations.get()

	var generation uint64
	err := s.do(ctx, func(ctx context.Context, c *client) (err error) {
		generation, err = s.generation(ctx, c)
		if err != nil || !s.generations.returned(generation) {
			return err
		}

		// A former server is back. A new token gives its data a generation of its own.
		err = c.Set(ctx, s.at().tokenKey(0), rand.Text(), 0).Err()
		if err != nil {
			return err
		}
		generation, err = s.generation(ctx, c)

		return err
	})
	if err != nil {
		return 0, fmt.Errorf("presenceredis: generation: %w", err)
	}

	s.generations.set(generation, runs)

	return generation, nil
}

// generation hashes the run of every master and the tokens of the buckets. It creates the tokens that are missing.
func (s *Store) generation(ctx context.Context, c *client) (uint64, error) {
	parts, err := s.masterRuns(ctx, c)
	if err != nil {
		return 0, err
	}

	for created := false; ; created = true {
		// FLUSHALL changes no run id. It removes the tokens.
		tokens, err := s.readTokens(ctx, c)
		if err != nil {
			return 0, err
		}

		pipe := c.Pipeline()
		missing := 0
		for b, token := range tokens {
			if token == "" {
				// All processes that find the token missing try it, and must agree on one.
				pipe.SetNX(ctx, s.at().tokenKey(b), rand.Text(), 0)
				missing++
			}
		}

		if missing == 0 {
			for _, token := range tokens {
				parts = append(parts, "token "+token)
			}

			h := xxhash.New()
			for _, p := range parts {
				_, _ = h.WriteString(p + "\n")
			}
			return h.Sum64(), nil
		}

		// Another process may create a token first. So the tokens are read once more, whoever created them.
		if created {
			return 0, fmt.Errorf("%w: Redis was emptied a moment ago", presence.ErrUnavailable)
		}

		s.conn.Metrics.Commands.Add(float64(missing))
		if _, err := pipe.Exec(ctx); err != nil {
			return 0, err
		}
	}
}

// masterRuns returns a text for each master that identifies its run, sorted.
func (s *Store) masterRuns(ctx context.Context, c *client) (texts []string, err error) {
	var mu sync.Mutex
	err = c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		server := pipe.Info(ctx, "server")
		replication := pipe.Info(ctx, "replication")
		s.conn.Metrics.Commands.Add(2)

		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}

		// The run of a replica would pass for another generation, and everything would be written again.
		if role := redisconn.InfoField(replication.Val(), "role"); role != "master" {
			return fmt.Errorf("%w: a %s answered instead of a master; a failover is under way",
				presence.ErrUnavailable, role)
		}

		// The masters are asked in parallel.
		mu.Lock()
		defer mu.Unlock()
		// A replica that becomes master keeps its run id and gets another replication id; a restart changes the run
		// id.
		texts = append(texts, "run "+redisconn.InfoField(server.Val(), "run_id")+
			" "+redisconn.InfoField(replication.Val(), "master_replid"))

		return nil
	})
	slices.Sort(texts) // the masters answer in any order

	return texts, err
}

// tokens returns how many buckets have a token: one for a single server, and all for a
// Cluster, so that every master has some.
func (s *Store) tokens(c *client) int {
	if c.Cluster != nil {
		return s.cfg.Buckets
	}
	return 1
}

// readTokens returns the tokens. A missing token is empty: the server was emptied.
func (s *Store) readTokens(ctx context.Context, c *client) ([]string, error) {
	pipe := c.Pipeline()
	got := make([]*redis.StringCmd, s.tokens(c))
	for b := range got {
		got[b] = pipe.Get(ctx, s.at().tokenKey(b))
	}

	s.conn.Metrics.Commands.Add(float64(len(got)))
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}

	tokens := make([]string, len(got))
	for b, g := range got {
		if g.Err() != nil && !errors.Is(g.Err(), redis.Nil) {
			return nil, g.Err()
		}
		tokens[b] = g.Val()
	}
	return tokens, nil
}

// Claim implements presence.Partitions. It writes the epochs first, and then the fences.
func (s *Store) Claim(ctx context.Context, owner string, partitions []int, again bool) ([]presence.Claim, error) {
	if len(partitions) == 0 {
		return nil, nil
	}

	fail := func(err error) ([]presence.Claim, error) {
		return nil, fmt.Errorf("presenceredis: claim %d partitions: %w", len(partitions), err)
	}

	generation, err := s.Generation(ctx)
	if err != nil {
		return fail(err)
	}

	runs := s.claimRuns(owner, generation, partitions, again)
	if err := s.conn.Run(ctx, runs); err != nil {
		return fail(err)
	}

	claims := make([]presence.Claim, len(partitions))
	for i, p := range partitions {
		reply := runs[i].Reply.([]any)
		epoch, former := reply[0].(int64), reply[2].(int64)

		// A later call of this process has claimed the partition, and its epoch is the one that holds.
		if epoch < 0 {
			return fail(fmt.Errorf("%w: partition %d was claimed again meanwhile", presence.ErrUnavailable, p))
		}

		claims[i] = presence.Claim{
			Partition: p, Generation: generation, Epoch: uint64(epoch), Whole: reply[5].(int64) == 1,
		}

		if former > 0 { // epochs are milliseconds, see claim.lua
			claims[i].Held = time.Duration(epoch-former) * time.Millisecond
		}
	}

	if err := s.refuseFormer(ctx, generation, newestLost(claims, runs)); err != nil {
		return fail(err)
	}

	// Until the fences are written, the former owner could still write counts. But it writes members first, and these
	// are refused already, because of the new epoch.
	if err := s.fence(ctx, claims, generation, again); err != nil {
		return fail(err)
	}

	s.keepClaims(claims, runs)

	return claims, nil
}

// newestLost returns the epoch of the newest claim of this process that Redis lacked when claims were granted; 0: it
// lacked none.
func newestLost(claims []presence.Claim, runs []*scriptRun) (newest uint64) {
	for i, c := range claims {
		before := runs[i].Args[4].(uint64)
		former := runs[i].Reply.([]any)[2].(int64)
		if c.Epoch > 0 && uint64(former) < before {
			newest = max(newest, before)
		}
	}

	return newest
}

// refuseFormer fails if Redis is a former server that no process remembers: it lacks a claim of this process, and began
// its generation before that claim was made. So it has not lost data since, but has older data. It gets another token,
// as in Generation.
func (s *Store) refuseFormer(ctx context.Context, generation, lost uint64) error {
	if lost == 0 {
		return nil
	}

	return s.conn.Do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Add(2)
		state, err := c.HMGet(ctx, s.at().stateKey(0), "generation", "void").Result()
		if err != nil {
			return err
		}

		began := texts(state)
		void, _ := strconv.ParseUint(began[1], 10, 64) // the time when the generation began, see fence.lua
		if began[0] != strconv.FormatUint(generation, 10) || void >= lost {
			return nil
		}

		if err := c.Set(ctx, s.at().tokenKey(0), rand.Text(), 0).Err(); err != nil {
			return err
		}
		return redisconn.Answered(fmt.Errorf("%w: a former server is back", presence.ErrUnavailable))
	})
}

// claimRuns returns the runs of the script that claim partitions.
func (s *Store) claimRuns(owner string, generation uint64, partitions []int, again bool) []*scriptRun {
	number := s.claims.Add(1)
	runs := make([]*scriptRun, len(partitions))

	s.mu.Lock()
	defer s.mu.Unlock()

	for i, p := range partitions {
		before := s.partitions[p].epoch
		// After a loss the script leaves a partition to whoever has claimed it since. Without a claim of its own this
		// process cannot tell who that is.
		repairs := again && before > 0

		runs[i] = &scriptRun{
			Script: scripts.Claim,
			Keys:   []string{s.at().ownerKey(p), s.at().dirtyKey(p)},
			Args:   []any{owner, generation, s.self, number, before, flag(repairs)},
		}
	}

	return runs
}

// keepClaims records claims that were granted, with what the replies of their runs say about the partitions.
func (s *Store) keepClaims(claims []presence.Claim, runs []*scriptRun) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// A concurrent call may have claimed the same partition later, and that claim is the one that is valid.
	for i, c := range claims {
		if p := &s.partitions[c.Partition]; p.epoch < c.Epoch {
			reply := runs[i].Reply.([]any)
			// If the list of unwritten pages is empty it is known; otherwise Load reads it.
			*p = partition{
				epoch: c.Epoch, unwritten: map[string]struct{}{}, known: reply[1].(int64) == 0,
				shards: max(1, int(reply[3].(int64))), members: int(reply[4].(int64)),
			}
		}
	}
}

// fence writes the claims that were granted to every bucket.
func (s *Store) fence(ctx context.Context, claims []presence.Claim, generation uint64, again bool) error {
	var runs []*scriptRun

	refused := func(c presence.Claim) bool { return c.Epoch == 0 }
	claims = slices.DeleteFunc(slices.Clone(claims), refused)
	// fence.lua builds the string of epochs from left to right.
	slices.SortFunc(claims, func(a, b presence.Claim) int { return a.Partition - b.Partition })

	for chunk := range slices.Chunk(claims, fenceBatch) {
		args := make([]any, 0, 5+2*len(chunk))
		// Another stamp each time: processes check once more the epochs that they have found valid.
		args = append(args,
			generation, flag(again), s.highest.Load(), strings.Join(s.cfg.Peers, ","), rand.Text()[:stampSize])

		for _, c := range chunk {
			args = append(args, c.Partition, c.Epoch)
		}

		for b := range s.cfg.Buckets {
			keys := []string{s.at().stateKey(b), s.at().fenceKey(b), s.at().readyKey(b), s.at().logKey(b)}
			runs = append(runs, &scriptRun{Script: scripts.Fence, Keys: keys, Args: args})
		}
	}

	return s.conn.Run(ctx, runs)
}

// Incomplete implements presence.Partitions. It costs one command per bucket, and looks
// at one bucket unless everywhere.
func (s *Store) Incomplete(ctx context.Context, partitions []int, everywhere bool) (missing []int, err error) {
	if len(partitions) == 0 {
		return nil, nil
	}

	members := make([]any, len(partitions))
	for i, p := range partitions {
		members[i] = p
	}

	// Each look takes the next bucket, so that repeated looks check them all.
	buckets := []int{int(s.looks.Add(1) % uint64(s.cfg.Buckets))}
	if everywhere {
		buckets = buckets[:0]
		for b := range s.cfg.Buckets {
			buckets = append(buckets, b)
		}
	}

	answers := make([]*redis.BoolSliceCmd, len(buckets))

	err = s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		for i, b := range buckets {
			answers[i] = pipe.SMIsMember(ctx, s.at().readyKey(b), members...)
		}

		s.conn.Metrics.Commands.Add(float64(len(buckets)))

		_, err := pipe.Exec(ctx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("presenceredis: find incomplete partitions: %w", err)
	}

	for i, p := range partitions {
		if slices.ContainsFunc(answers, func(a *redis.BoolSliceCmd) bool { return !a.Val()[i] }) {
			missing = append(missing, p)
		}
	}

	return missing, nil
}

// Load implements presence.Partitions. It reads a bounded number of members at a time,
// each with its own deadline, so that many members take long, but do not fail.
func (s *Store) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	var runs []*scriptRun
	var of []int // for each of runs: the index of its claim
	s.mu.Lock()
	for i, c := range claims {
		shards := 1
		// Of a claim that was replaced the number does not matter: load.lua refuses it.
		if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
			shards = p.shards
		}

		for first := 0; first < shards; first += loadShards {
			keys := []string{s.at().ownerKey(c.Partition), s.at().dirtyKey(c.Partition)}
			for j := first; j < min(first+loadShards, shards); j++ {
				keys = append(keys, s.at().memberKey(c.Partition, j))
			}

			runs = append(runs, &scriptRun{
				Script: scripts.Load,
				Keys:   keys,
				Args:   []any{c.Epoch, c.Generation, flag(first == 0), shards},
			})
			of = append(of, i)
		}
	}
	s.mu.Unlock()

	snaps := make([]presence.Snapshot, len(claims))
	for len(runs) > 0 {
		n := min(loadRuns, len(runs))
		if err := s.conn.Run(ctx, runs[:n]); err != nil {
			return nil, fmt.Errorf("presenceredis: load %d partitions: %w", len(claims), err)
		}

		for k, run := range runs[:n] {
			if err := loaded(run, &snaps[of[k]]); err != nil {
				return nil, fmt.Errorf("presenceredis: load partition %d: %w", claims[of[k]].Partition, err)
			}
		}

		runs = runs[n:]
		of = of[n:]
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range claims {
		p := &s.partitions[c.Partition]
		if p.epoch != c.Epoch || p.known {
			continue
		}

		// All pages of a snapshot count as unwritten: the former owner may have ended before it wrote their counts.
		for _, page := range snaps[i].Pages {
			p.unwritten[page] = struct{}{}
		}

		p.known = true
	}

	return snaps, nil
}

// loaded adds the reply of one run of load.lua to snap.
func loaded(run *scriptRun, snap *presence.Snapshot) error {
	reply := run.Reply.([]any)
	if err := statusError(byte('0' + reply[0].(int64))); err != nil {
		return err
	}

	pages, err := pagesIn(reply[1].(string))
	if err != nil {
		return err
	}

	snap.Pages = append(snap.Pages, pages...)

	fields := reply[2].([]any)
	for j := 0; j+1 < len(fields); j += 2 {
		m, err := member(fields[j].(string), fields[j+1].(string), reply[3].(int64))
		if err != nil {
			return err
		}

		snap.Members = append(snap.Members, m)
	}

	return nil
}
