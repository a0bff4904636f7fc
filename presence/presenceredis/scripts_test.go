package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redistest"
	"headcount/presence"
	"headcount/scripts"
	"headcount/unread"
)

// TestServerEveryScriptMayRunTwice checks what the head of each script promises: a run that is repeated at once changes
// nothing in Redis, and publishes nothing. Values that follow the time (a lease, a greeting) are exempt.
//
// The invariants by script, and where else they are tested:
//
//	claim, members, resize, counts, fence, load
//	                                     single writer, and late runs: TestServerLateAndRepeatedRunsChangeNothing,
//	                                     TestServerALateClaimDoesNothing, TestServerAZombieWritesNoCount, presencetest
//	log, own, relog, peers, merge        regions converge, a pair never falls: TestServerMergeEqualsThePureType,
//	                                     TestServerRegionsShareCounts
//	read, values, detach                 an endpoint is published once, and gets changes after the read: presencetest
//	change, save                         once per key; no lost update: presencetest's unread contract
//	renew, leave, hello                  one owner of a name; facts agree: presencetest,
//	                                     TestServerDifferentSettingsAreRefused
func TestServerEveryScriptMayRunTwice(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "local", Secret: "k"}, FactsWait: time.Millisecond,
		Buckets: 4, LastSeen: time.Hour,
	})

	ctx := t.Context()
	process := presence.Process{Name: "a", Incarnation: 1, Roles: []string{"gateway"}}
	err := presence.ErrNoFacts
	for errors.Is(err, presence.ErrNoFacts) {
		_, _, err = s.Renew(ctx, process, time.Minute)
	}
	if err != nil {
		t.Fatal(err)
	}

	claims, err := s.Claim(ctx, "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}

	c := claims[0]
	gen := fmt.Sprint(c.Generation)
	b := presence.Bucket("p", s.cfg.Buckets)
	state := at(t, s).stateKey(b)
	pageKey := at(t, s).pagePrefix(b) + "p"
	bell := at(t, s).channel(b, 0)

	level := unread.LevelTopic("p").String()
	u := unread.User{1}
	ub := s.userBucket(u)

	change := presence.Change{
		Claim: c, Sequence: 1, Counts: []presence.PageUsers{{Page: "p", Users: 2}},
		Complete:   true,
		Members:    []presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}}},
		Departures: []presence.Departure{{User: 3, At: time.Now()}},
	}

	var calls []*scriptRun
	add := func(name scripts.Name, keys []string, args ...any) {
		calls = append(calls, &scriptRun{Script: name, Keys: keys, Args: args})
	}

	// A partition gets another owner, and its buckets are fenced.
	add(scripts.Claim, []string{at(t, s).ownerKey(2), at(t, s).dirtyKey(2)}, "n", gen, "other", 7, 0, 0)
	add(scripts.Fence, []string{
		state, at(t, s).fenceKey(b), at(t, s).readyKey(b), at(t, s).logKey(b),
	}, gen, 0, 0, "eu", "a stamp of 16 b.", 2, c.Epoch+1)
	add(scripts.Peers, []string{state, at(t, s).readyKey(b), at(t, s).logKey(b)}, bell, "PUBLISH", s.cfg.Partitions,
		"eu", 1)
	add(scripts.Relog, []string{state, at(t, s).logKey(b)}, 0, len(at(t, s).pagePrefix(b)), "")

	// A change writes members, then counts.
	calls = append(calls, s.memberRuns(change, pageList{text: []byte("\x00\x01p")}, 1, 0)...)
	for bucket, groups := range s.byBucket([]presence.Change{change}, make([]presence.Outcome, 1)) {
		for _, run := range s.countRuns(bucket, "PUBLISH", []presence.Change{change}, groups) {
			s.numberLocked(run, []presence.Change{change})
			calls = append(calls, &run.scriptRun)
		}
	}

	// The next owner loads the members and divides them among more hashes.
	add(scripts.Load, []string{
		at(t, s).ownerKey(1), at(t, s).dirtyKey(1), at(t, s).memberKey(1, 0),
	}, c.Epoch, gen, 1, 1)
	add(scripts.Resize, []string{
		at(t, s).ownerKey(1), at(t, s).memberKey(1, 0), at(t, s).memberKey(1, 1),
	}, c.Epoch, gen, 1, 2)

	// Other regions read the log and are merged.
	add(scripts.Log, []string{state, at(t, s).logKey(b), at(t, s).readyKey(b)}, s.cfg.Partitions, 0, 0, 10)
	add(scripts.Own, []string{state, at(t, s).logKey(b), pageKey}, len(at(t, s).pagePrefix(b)))
	add(scripts.Merge, []string{
		state, at(t, s).readyKey(b), at(t, s).emptiesKey(b), pageKey,
	}, bell, "PUBLISH", s.cfg.Partitions, 60, len(at(t, s).pagePrefix(b)),
		"eu", 5, 0, 1, 5, 1, 1, 5, 3, 1)
	add(scripts.Sweep, []string{state, at(t, s).emptiesKey(b), pageKey}, len(at(t, s).pagePrefix(b)), 60, 0, "1")

	// Follows and unread notifications.
	add(scripts.Change, []string{
		state, at(t, s).historyKey(b, "p"), at(t, s).onceKey(b, "k"),
	}, bell, "PUBLISH", level, u.String(), 10, 60)
	add(scripts.Save, []string{at(t, s).stateKey(ub), at(t, s).recordKey(ub, u.String())}, at(t, s).channel(ub, 0),
		"PUBLISH", unread.RecordTopic(u).String(), "0 0", 5, 60, 1, "p", "0 0 0")

	// Gateways read values.
	add(scripts.Read, []string{
		state, at(t, s).readyKey(b), at(t, s).endpointsKey(b), pageKey,
	}, bell, "PUBLISH", s.cfg.Partitions, len(at(t, s).pagePrefix(b)), presence.CountTopic("").String(), "gw", 1)
	add(scripts.Values, []string{
		state, at(t, s).endpointsKey(b), at(t, s).historyKey(b, "p"),
	}, bell, "PUBLISH", "gw", levelField, level)

	// Past minutes and days.
	add(scripts.Remember, []string{
		at(t, s).minutesKey(b, "p"), at(t, s).visitsKey(b, 0, "p"), at(t, s).daysKey(b, "p"), at(t, s).daysKey(b, "p"),
		at(t, s).registersKey(b, 0, "p"), at(t, s).spareKey(b),
	}, 60, 10*entryBytes, 1, 1, 400, make([]byte, endedBytes), "\x01234writer", "\x01")
	add(scripts.Days, []string{state, pageKey, at(t, s).daysKey(b, "p")})
	add(scripts.Minutes, []string{state, pageKey, at(t, s).minutesKey(b, "p"), at(t, s).visitsKey(b, 0, "p")})

	// A gateway, a region and a process come and go.
	add(scripts.Detach, []string{state, at(t, s).endpointsKey(b)}, bell, "PUBLISH", "gw", level)
	add(scripts.Hello, []string{factsKey, regionsKey}, "eu", "me", 3000)
	add(scripts.Renew, []string{factsKey, leasesKey},
		append([]any{"b", "1", "gateway", 60000, 1, 0, 0}, s.facts()...)...)
	add(scripts.Leave, []string{leasesKey}, "a", "1")

	ran := map[scripts.Name]bool{}
	// The values of these scripts follow the time. A minute that is stored twice counts once.
	moves := map[scripts.Name]bool{scripts.Hello: true, scripts.Renew: true, scripts.Remember: true}

	for _, cl := range calls {
		ran[cl.Script] = true
		var after [2]map[string]string
		for i := range after {
			again := *cl
			if err := s.conn.Run(ctx, []*scriptRun{&again}); err != nil {
				t.Fatalf("%s: %v", cl.Script, err)
			}
			after[i] = everything(t, s)
		}

		if !moves[cl.Script] && !maps.Equal(after[0], after[1]) {
			t.Errorf("%s changed data when it ran again:\n%v\n%v", cl.Script, after[0], after[1])
		}
		if moves[cl.Script] && !slices.Equal(slices.Sorted(maps.Keys(after[0])), slices.Sorted(maps.Keys(after[1]))) {
			t.Errorf("%s added or removed keys when it ran again:\n%v\n%v", cl.Script, after[0], after[1])
		}
	}

	for _, name := range scripts.Presence {
		if !ran[name] {
			t.Errorf("this test does not run %s", name)
		}
	}
}

// everything returns all data in Redis, by key or by key and field. It leaves out the marks of processes, which get a
// new number in each run.
func everything(t *testing.T, s *Store) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := s.conn.Do(t.Context(), func(ctx context.Context, c *client) error {
		keys, err := c.Keys(ctx, prefix+"*").Result()
		if err != nil {
			return err
		}

		for _, key := range keys {
			if strings.HasPrefix(key, "hc:{c}:mark:") {
				continue
			}
			switch kind := c.Type(ctx, key).Val(); kind {
			case "hash":
				for field, value := range c.HGetAll(ctx, key).Val() {
					all[key+" "+field] = value
				}
			case "set":
				for _, member := range c.SMembers(ctx, key).Val() {
					all[key+" "+member] = ""
				}
			case "zset":
				for _, z := range c.ZRangeWithScores(ctx, key, 0, -1).Val() {
					all[fmt.Sprint(key, " ", z.Member)] = fmt.Sprint(z.Score)
				}
			case "string":
				all[key] = c.Get(ctx, key).Val()
			default:
				return fmt.Errorf("%s is a %s: %w", key, kind, redis.Nil)
			}
		}

		return nil
	})

	if err != nil {
		t.Fatal(err)
	}

	return all
}
