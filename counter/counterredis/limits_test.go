package counterredis

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"headcount/counter/limit"
	"headcount/internal/redistest"
	"headcount/scripts"
)

// timed is counter_limit.lua with the time as its last argument, and with keys that do not end
// by themselves, since that time is not the server's.
func timed(t *testing.T) string {
	text := scripts.CounterLimit.Source()
	for from, to := range map[string]string{
		"redis.call('TIME')":                                      "{math.floor(ARGV[5] / 1000), ARGV[5] % 1000 * 1000}",
		", 'PX', string.format('%.0f', stop - now))":              ")",
		"redis.call('PEXPIRE', key, string.format('%.0f', ends))": "",
	} {
		if strings.Count(text, from) != 1 {
			t.Fatalf("the script has no %s any more, or several", from)
		}
		text = strings.Replace(text, from, to, 1)
	}
	return text
}

// loaded returns a client of a server that has the script of timed, and its digest.
func loaded(t *testing.T) (*redis.Client, string) {
	t.Helper()
	c := redistest.Single(t).Client()
	t.Cleanup(func() { _ = c.Close() })
	sha, err := c.ScriptLoad(t.Context(), timed(t)).Result()
	if err != nil {
		t.Fatal(err)
	}
	return c, sha
}

// at is a call at a time.
type at struct {
	limit.Call
	now int64
}

// judged has the script judge calls.
func judged(ctx context.Context, t rapid.TB, c *redis.Client, sha string, calls []at) (answers []limit.Answer) {
	t.Helper()
	pipe := c.Pipeline()
	var replies []*redis.Cmd
	for _, a := range calls {
		replies = append(replies, pipe.EvalSha(ctx, sha, []string{limitKey(a.Name)}, a.Algorithm.String(), a.Window, a.Limit, a.Cost, a.now))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	for _, r := range replies {
		answer, err := parseAnswer(r.Val())
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, answer)
	}
	return answers
}

// The script says what package limit says, whatever the clock does.
func TestServerTheScriptJudgesAsGo(t *testing.T) {
	c, sha := loaded(t)
	ctx, names := t.Context(), time.Now().UnixNano()
	rapid.Check(t, func(t *rapid.T) {
		names++
		name := limit.Name{
			Key:       "differential " + strconv.FormatInt(names, 10),
			Algorithm: rapid.SampledFrom([]limit.Algorithm{limit.Fixed, limit.Sliding, limit.Log}).Draw(t, "algorithm"),
			Window:    rapid.OneOf(rapid.Int64Range(1000, 100_000), rapid.Just(limit.MaxWindow.Milliseconds())).Draw(t, "window"),
		}
		most := rapid.SampledFrom([]int64{1, 3, 100, limit.MaxLog, limit.MaxLimit}).Draw(t, "most")
		if name.Algorithm == limit.Log {
			most = min(most, limit.MaxLog)
		}
		now := int64(1_700_000_000_000)
		var calls []at
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			now += rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, name.Window/10), rapid.Int64Range(-name.Window/20, 3*name.Window)).Draw(t, "later")
			one := limit.Call{Name: name, Limit: rapid.OneOf(rapid.Just(most), rapid.Int64Range(1, most)).Draw(t, "limit")}
			one.Cost = rapid.OneOf(rapid.Int64Range(1, one.Limit), rapid.Int64Range(1, max(1, one.Limit/10))).Draw(t, "cost")
			calls = append(calls, at{one, now})
		}
		var s limit.State
		for i, got := range judged(ctx, t, c, sha, calls) {
			if want := s.Take(calls[i].Call, calls[i].now); got != want {
				t.Fatalf("call %d, %+v: the script says %+v, Go %+v", i, calls[i], got, want)
			}
		}
	})
}

// A long log is judged alike, and what is too old leaves Redis.
func TestServerALongLog(t *testing.T) {
	c, sha := loaded(t)
	name := limit.Name{Key: fmt.Sprint("long ", time.Now().UnixNano()), Algorithm: limit.Log, Window: 5000}
	var s limit.State
	run := func(calls []at) {
		t.Helper()
		for i, got := range judged(t.Context(), t, c, sha, calls) {
			if want := s.Take(calls[i].Call, calls[i].now); got != want {
				t.Fatalf("%+v: the script says %+v, Go %+v", calls[i], got, want)
			}
		}
	}
	var calls []at
	for i := range int64(4000) {
		calls = append(calls, at{limit.Call{Name: name, Limit: limit.MaxLog, Cost: 1 + i%3}, 1_700_000_000_000 + 2*i})
	}
	for cost := int64(1); cost <= limit.MaxLog; cost *= 3 {
		calls = append(calls, at{limit.Call{Name: name, Limit: limit.MaxLog, Cost: cost}, 1_700_000_008_000})
	}
	run(calls)
	run([]at{{limit.Call{Name: name, Limit: limit.MaxLog, Cost: 1}, 1_700_000_012_998}})
	if n, err := c.LLen(t.Context(), limitKey(name)).Result(); err != nil || n > 10 { // Go has one entry for each millisecond
		t.Errorf("%d calls are remembered; %v", n, err)
	}
}

// A key ends when its state does.
func TestServerKeysOfLimitsEnd(t *testing.T) {
	server := redistest.Single(t)
	s := begin(t, server.URL())
	c := server.Client()
	defer c.Close()
	for _, a := range []limit.Algorithm{limit.Fixed, limit.Sliding, limit.Log} {
		call := limit.Call{Name: limit.Name{Key: fmt.Sprint("ends ", time.Now().UnixNano()), Algorithm: a, Window: time.Hour.Milliseconds()}, Limit: 1, Cost: 1}
		r := s.Limit(t.Context(), []limit.Call{call})[0]
		if r.Err != nil || !r.Allowed {
			t.Fatalf("%s: %+v", a, r)
		}
		left := c.PTTL(t.Context(), limitKey(call.Name)).Val()
		if reset := time.Duration(r.Reset) * time.Millisecond; left <= 0 || left > reset || reset-left > time.Minute {
			t.Errorf("%s: the key ends in %s, all is back in %s", a, left, reset)
		}
	}
}
