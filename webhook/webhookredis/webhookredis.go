// Package webhookredis is the webhook.Store that the processes of a region share, in Redis. Every step
// is a script, hook_*.lua of package scripts. All keys of a hook are in one slot:
//
//	hc:{w:HOOK}:t  hash: the reported state of each subject
//	hc:{w:HOOK}:q  list: the outbox, oldest first
//	hc:{w:HOOK}:s  string: how many of the oldest events are the frozen batch
//
// They expire webhook.KeptFor after the last process that served the hook.
package webhookredis

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/internal/redisconn"
	"headcount/scripts"
	"headcount/webhook"
)

// Format is the number of the format of the webhooks' data in Redis: keys, values, and their use by
// scripts. It is one of the cluster facts (field webhooks of hc:{c}:facts), which a process with
// webhooks compares before it gets its lease. Data without a number is of format 1. A change that
// another version could misread takes the next number.
const Format = 1

// Store is a webhook.Store in Redis. Its methods may be called from any goroutine.
type Store struct{ conn *redisconn.Runner }

var _ webhook.Store = (*Store)(nil)

// New returns a Store in a Redis, with metrics for registerer unless that is nil. Close ends it, before the connection.
func New(conn *redisconn.Conn, registerer prometheus.Registerer) *Store {
	return &Store{conn.Runner(redisconn.RunnerConfig{
		Scripts:     scripts.Webhooks,
		Unavailable: webhook.ErrUnavailable,
		Registerer:  registerer,
		Metrics:     "headcount_webhook_redis",
	})}
}

// Close has later calls fail.
func (s *Store) Close() error {
	s.conn.Close()
	return nil
}

func key(hook, what string) string { return "hc:{w:" + hook + "}:" + what }

func retention() int64 { return int64(webhook.KeptFor / time.Second) }

var errAnswer = fmt.Errorf("%w: an answer that cannot be read", webhook.ErrUnavailable)

// Report implements webhook.Store, by one script for each hook. With an error it returns nothing,
// although the changes of some hooks may have been made.
func (s *Store) Report(ctx context.Context, changes []webhook.Change) (reported []string, dropped int, err error) {
	of := map[string]*redisconn.ScriptRun{}
	at := map[string][]int{} // indexes of changes, in their order
	var runs []*redisconn.ScriptRun
	for i, c := range changes {
		// The keys of a hook are in one slot, those of two hooks are not.
		run := of[c.Hook]
		if run == nil {
			run = &redisconn.ScriptRun{
				Script: scripts.HookReport,
				Keys:   []string{key(c.Hook, "t"), key(c.Hook, "q"), key(c.Hook, "s")},
				Args:   []any{webhook.MaxQueue, retention()},
			}
			of[c.Hook] = run
			runs = append(runs, run)
		}

		run.Args = append(run.Args, c.Subject, c.Was, c.Is, c.Event)
		at[c.Hook] = append(at[c.Hook], i)
	}

	if err := s.conn.Run(ctx, runs); err != nil {
		return nil, 0, err
	}

	// The answers come by hook, and are put in the order of the changes.
	reported = make([]string, len(changes))
	for hook, run := range of {
		n, list, err := answer(run.Reply)
		if err != nil || len(list) != len(at[hook]) {
			return nil, 0, errAnswer
		}

		dropped += n
		for i, last := range list {
			reported[at[hook][i]] = last
		}
	}

	return reported, dropped, nil
}

// answer parses a number and a list.
func answer(reply any) (n int, list []string, err error) {
	// A reply of another form must not end the process: another program may use these keys.
	both, _ := reply.([]any)
	if len(both) != 2 {
		return 0, nil, errAnswer
	}

	number, isNumber := both[0].(int64)
	list, isList := texts(both[1])
	if !isNumber || !isList {
		return 0, nil, errAnswer
	}

	return int(number), list, nil
}

// texts returns a list of texts. ok is false if the reply is anything else.
func texts(reply any) (list []string, ok bool) {
	all, ok := reply.([]any)
	list = make([]string, len(all))
	for i, one := range all {
		text, is := one.(string)
		list[i] = text
		ok = ok && is
	}

	return list, ok
}

// Reported implements webhook.Store.
func (s *Store) Reported(ctx context.Context, hook string) (map[string]string, error) {
	reported := map[string]string{}
	// In parts, so that no call holds up Redis or its own time limit.
	cursor := "0"
	for {
		pairs, next, err := s.someReported(ctx, hook, cursor)
		if err != nil {
			return nil, err
		}

		for i := 0; i < len(pairs); i += 2 {
			// HSCAN may return a subject twice.
			reported[pairs[i]] = pairs[i+1]
		}
		if next == "0" {
			return reported, nil
		}
		cursor = next
	}
}

// someReported returns subjects from a cursor on, each followed by its state, and the next cursor.
func (s *Store) someReported(ctx context.Context, hook, cursor string) (pairs []string, next string, err error) {
	run := &redisconn.ScriptRun{Script: scripts.HookReported, Keys: []string{key(hook, "t")}, Args: []any{cursor}}
	if err := s.conn.Run(ctx, []*redisconn.ScriptRun{run}); err != nil {
		return nil, "", err
	}

	both, _ := run.Reply.([]any)
	if len(both) != 2 {
		return nil, "", errAnswer
	}

	next, isCursor := both[0].(string)
	pairs, isList := texts(both[1])
	if !isCursor || !isList || len(pairs)%2 != 0 {
		return nil, "", errAnswer
	}

	return pairs, next, nil
}

// Take implements webhook.Store.
func (s *Store) Take(ctx context.Context, hook string) (events []string, waiting int, err error) {
	// The states are among the keys because they expire together with the outbox.
	run := &redisconn.ScriptRun{
		Script: scripts.HookTake,
		Keys:   []string{key(hook, "q"), key(hook, "s"), key(hook, "t")},
		Args:   []any{webhook.MaxBatch, retention()},
	}
	if err := s.conn.Run(ctx, []*redisconn.ScriptRun{run}); err != nil {
		return nil, 0, err
	}

	waiting, events, err = answer(run.Reply)

	return events, waiting, err
}

// Acknowledge implements webhook.Store.
func (s *Store) Acknowledge(ctx context.Context, hook, first string, n int) error {
	// The first event tells a repetition from the next batch.
	run := &redisconn.ScriptRun{
		Script: scripts.HookAcknowledge,
		Keys:   []string{key(hook, "q"), key(hook, "s")},
		Args:   []any{first, n},
	}

	return s.conn.Run(ctx, []*redisconn.ScriptRun{run})
}
