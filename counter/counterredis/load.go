package counterredis

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file makes counters of PostgreSQL resident in Redis, for package tiered.

// Entry is a counter to make resident.
type Entry struct {
	Key   string
	State counter.State // of its row; zero if there is none
	// Staged is the result of Stage or StageRegisters, for a set or unique that is not empty.
	Staged string
}

// Load makes counters resident unless another process has done so already. tickets has the ticket of each bucket from
// before the rows were read. The error is ErrMoved if the rows have to be read again.
func (s *Store) Load(ctx context.Context, tickets map[int]string, entries []Entry) error {
	type entry struct {
		Key    string `json:"key"`
		State  string `json:"state"`
		Set    int    `json:"set,omitempty"`
		Staged int    `json:"staged,omitempty"`
	}
	by := map[int][]entry{}
	keys := map[int][]string{}
	for _, e := range entries {
		b := hashBucket(e.Key)
		if keys[b] == nil {
			keys[b] = append(bucketKeys(b, true), shardedKey(b))
		}
		out := entry{Key: e.Key, State: formatState(e.State)}
		if e.Staged != "" {
			to := membersKey(b, e.Key)
			if e.State.Kind == counter.Unique {
				to = registersKey(b, e.Key)
			}
			keys[b] = append(keys[b], to, stagedKey(b, e.Staged))
			out.Set, out.Staged = len(keys[b])-1, len(keys[b])
		}
		by[b] = append(by[b], out)
	}
	var calls []*redisconn.Call
	for b, list := range by {
		text, err := json.Marshal(list)
		if err != nil {
			return err
		}
		calls = append(calls, &redisconn.Call{Script: scripts.CounterLoad, Keys: keys[b], Args: []any{tickets[b], string(text)}})
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		switch cl.Reply {
		case "ok":
		case lostReply:
			return ErrLost
		default:
			return ErrMoved
		}
	}
	return nil
}

// Stage stores members of key for Load. The first call gets an empty staged, and each further one what the call before
// returned.
func (s *Store) Stage(ctx context.Context, key, staged string, before int, members []string) (string, error) {
	hashes := make([]string, len(members))
	for i, m := range members {
		hashes[i] = counter.MemberHash(m)
	}
	return s.stage(ctx, key, staged, before, hashes)
}

// stage is Stage for hashes of members.
func (s *Store) stage(ctx context.Context, key, staged string, before int, hashes []string) (string, error) {
	if staged == "" {
		staged = rand.Text()
	}
	for some := range slices.Chunk(hashes, stagePage) {
		cl := &redisconn.Call{Script: scripts.CounterStage, Keys: []string{stagedKey(hashBucket(key), staged)}, Args: []any{stagedFor.Milliseconds(), before}}
		for _, m := range some {
			cl.Args = append(cl.Args, m)
		}
		if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
			return "", err
		}
		before += len(some)
	}
	return staged, nil
}

// StageRegisters stores the registers of key for Load.
func (s *Store) StageRegisters(ctx context.Context, key string, registers hyperloglog.Registers) (staged string, err error) {
	if registers.Empty() {
		return "", nil
	}
	staged = rand.Text()
	return staged, s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		return c.Set(ctx, stagedKey(hashBucket(key), staged), registers.Bytes(), stagedFor).Err()
	})
}

func formatState(st counter.State) string {
	if st.Version == (counter.Version{}) {
		return absentState
	}
	return fmt.Sprintf("%s %d %d %d %d %d%s", st.Kind, st.Value, st.Updated, st.Version.Incarnation, st.Version.Sequence, st.Entries, st.AppendRest(nil))
}
