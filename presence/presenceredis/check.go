package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/presence/hashkey"
)

// Checked is what Check found.
type Checked struct {
	Problems  []error            // with a remedy each
	Processes []presence.Process // the processes that have a lease
	Region    string             // the region of this Redis; empty: no region has used it yet
}

// clockTolerance is how much the clocks of a server and of this machine may differ. The ends of holds and leases are
// wall clock times, so a greater difference ends them too early or too late.
const clockTolerance = 2 * time.Second

// checkKey is the key on which Check tries commands. Nothing else uses it.
const checkKey = prefix + "{check}:0"

// tried are the commands that the program sends, also in scripts, with arguments that
// change only checkKey.
var tried = [][]any{
	{"set", checkKey, "1"}, {"expire", checkKey, "60"},
	{"eval", "return 1", "1", checkKey}, {"evalsha", strings.Repeat("0", 40), "1", checkKey},
	{"script", "load", "return 1"},
	{"time"}, {"scan", "0", "count", "1"}, {"exists", checkKey},
	{"persist", checkKey}, {"pexpire", checkKey, "60000"}, {"ttl", checkKey},
	{"get", checkKey}, {"mget", checkKey}, {"mset", checkKey, "1"}, {"setnx", checkKey, "1"},
	{"setrange", checkKey, "0", "1"}, {"getrange", checkKey, "0", "0"}, {"append", checkKey, ""}, {"strlen", checkKey},
	{"hdel", checkKey, "f"}, {"hexists", checkKey, "f"}, {"hget", checkKey, "f"}, {"hgetall", checkKey},
	{"hincrby", checkKey, "f", "1"},
	{"hkeys", checkKey}, {"hlen", checkKey}, {"hmget", checkKey, "f"}, {"hscan", checkKey, "0"},
	{"hset", checkKey, "f", "1"},
	{"hsetnx", checkKey, "f", "1"}, {"hvals", checkKey},
	{"llen", checkKey}, {"lrange", checkKey, "0", "0"}, {"ltrim", checkKey, "0", "0"}, {"rpush", checkKey, "1"},
	{"sadd", checkKey, "m"}, {"scard", checkKey}, {"smismember", checkKey, "m"}, {"srem", checkKey, "m"},
	{"sscan", checkKey, "0"},
	{"zadd", checkKey, "1", "m"}, {"zcard", checkKey}, {"zrange", checkKey, "0", "0"},
	{"zrangebyscore", checkKey, "0", "0"},
	{"zrem", checkKey, "m"}, {"zscore", checkKey, "m"},
	{"pfadd", checkKey, "m"}, {"pfcount", checkKey}, {"pfmerge", checkKey, checkKey},
	{"xadd", checkKey, "*", "f", "1"}, {"xlen", checkKey}, {"xrange", checkKey, "-", "+"},
	{"xtrim", checkKey, "maxlen", "0"},
	{"copy", checkKey, checkKey}, {"rename", checkKey, checkKey}, {"publish", checkKey, ""}, {"unlink", checkKey},
}

// Check tries the Redis of cfg as a process with those facts would use it, and leaves no lasting
// change. It compares the secret only if there is one, and tries idSecrets on the key of user hashes
// unless there are none. It returns when ctx ends.
func Check(ctx context.Context, cfg redisconn.Config, facts Facts, idSecrets [][]byte) Checked {
	k := &checker{ours: facts, idSecrets: idSecrets}
	conn, err := redisconn.Open(cfg)
	if err != nil {
		k.problem("the URL cannot be used: %v", err)
		return k.found
	}
	defer conn.Close()

	// Check distinguishes the errors of Redis itself, so the caller must not wrap them.
	runner := conn.Runner(redisconn.RunnerConfig{
		Unavailable: presence.ErrUnavailable,
		Classify:    func(err error) error { return err },
	})
	defer runner.Close()

	// Permissions before facts and leases: a user who may not read them learns which commands are missing.
	err = runner.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		if err := k.server(ctx, c); err != nil {
			return err
		}

		if err := k.permissions(ctx, c); err != nil {
			return err
		}

		if err := k.facts(ctx, c); err != nil {
			return err
		}

		return k.leases(ctx, c)
	})

	switch {
	case err == nil:
	case redis.HasErrorPrefix(err, "WRONGPASS"), redis.HasErrorPrefix(err, "NOAUTH"):
		k.problem("Redis refuses the user or the password of the URL")
	case notPermitted(err):
		// permissions has named the missing permissions. Report the error itself only if it has named none.
		if len(k.found.Problems) == 0 {
			k.problem("Redis refuses what the program needs: %v (deploy/redis.acl has a user that may)", err)
		}
	default:
		k.problem("Redis does not answer: %v; start it, or mend the URL", err)
	}

	return k.found
}

// checker collects what Check finds.
type checker struct {
	ours      Facts
	idSecrets [][]byte
	replaces  string // value of the fact postgres that a process would replace by PostgresTiered; empty: none
	found     Checked
	now       time.Time // of the server; zero: the user may not ask for it
}

func (k *checker) problem(format string, args ...any) {
	k.found.Problems = append(k.found.Problems, fmt.Errorf(format, args...))
}

// server checks the version, the eviction policy and the clock.
func (k *checker) server(ctx context.Context, c *redisconn.Client) error {
	info, err := c.Info(ctx, "server").Result()
	if err != nil {
		return err
	}

	v := redisconn.InfoField(info, "redis_version")
	var major, minor int
	parsed, _ := fmt.Sscanf(v, "%d.%d", &major, &minor)
	tooOld := major < 6 || major == 6 && minor < 2
	if parsed == 2 && tooOld {
		k.problem("Redis is of version %s; it must be 6.2 or later", v)
	}

	info, err = c.Info(ctx, "memory").Result()
	if err != nil {
		return err
	}
	if p := redisconn.DropsKeys(info); p != "" {
		k.problem("Redis drops keys when its memory is full (maxmemory-policy is %s), and counts are wrong then; "+
			"set maxmemory-policy noeviction", p)
	}

	before := time.Now()
	k.now, err = c.Time(ctx).Result()
	if notPermitted(err) {
		return nil // permissions says so; without the time of Redis there is nothing to compare
	}
	if err != nil {
		return err
	}

	// Redis read its clock at some time between the request and the reply: the middle is the best guess.
	middle := before.Add(time.Since(before) / 2)
	if off := k.now.Sub(middle).Abs(); off > clockTolerance {
		k.problem("The clocks of Redis and of this machine differ by %s; let both keep time by NTP",
			off.Round(time.Second))
	}

	return nil
}

// permissions tries all commands, and checks whether the user of the URL may send them.
func (k *checker) permissions(ctx context.Context, c *redisconn.Client) error {
	pipe := c.Pipeline()
	cmds := make([]*redis.Cmd, len(tried))
	for i, args := range tried {
		cmds[i] = pipe.Do(ctx, args...)
	}
	_, _ = pipe.Exec(ctx) // each command has its own error

	var denied []string
	for i, cmd := range cmds {
		err := cmd.Err()
		name := fmt.Sprint(tried[i][0])

		// Any other error, such as one about the type of checkKey, comes from a command that was permitted.
		switch {
		case err == nil:
		case deniesKeys(err):
			k.problem("The user of the URL may not use keys that begin with %s; give it ~%s* "+
				"(deploy/redis.acl has a user that may)", prefix, prefix)
			return nil
		case deniesChannels(err):
			k.problem("The user of the URL may not use channels that begin with %s; give it &%s* "+
				"(deploy/redis.acl has a user that may)", prefix, prefix)
			return nil
		case notPermitted(err):
			if name == "script" {
				name = "script|load"
			}
			denied = append(denied, name)
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
			return err
		case redis.HasErrorPrefix(err, "READONLY"), redis.HasErrorPrefix(err, "MISCONF"),
			redis.HasErrorPrefix(err, "OOM"):
			return err
		}
	}

	if len(denied) > 0 {
		k.problem("The user of the URL may not send %s; give it +%s (deploy/redis.acl has a user that may)",
			strings.Join(denied, ", "), strings.Join(denied, " +"))
	}

	return nil
}

// facts compares the cluster facts with those of the settings.
func (k *checker) facts(ctx context.Context, c *redisconn.Client) error {
	facts, err := c.HGetAll(ctx, factsKey).Result()
	if err != nil {
		return err
	}

	ours := k.ours
	k.found.Region = facts["region"]

	// A fact that is missing is added by the first process that has it.
	compare := func(fact string, differs bool) {
		if facts[fact] != "" && differs {
			k.problem("%s", ours.problem(fact, facts[fact]))
		}
	}

	compare("region", facts["region"] != ours.Region)

	otherSecret := ours.Secret != "" && !slices.Contains(strings.Split(ours.Secret, ","), facts["secret"])
	compare("secret", otherSecret)

	format := facts[formatFact]
	compare(formatFact, format != formatNumbered && format != formatEven)

	compare("counters", ours.Counters != 0 && facts["counters"] != strconv.Itoa(ours.Counters))

	// A starting process itself replaces "none" and the older "behind", unless gateways still run whose counters
	// PostgreSQL would lack.
	is := facts["postgres"]
	if ours.Postgres == PostgresTiered && (is == PostgresNone || is == "behind") {
		k.replaces = is
	}

	compare("postgres", ours.Postgres != "" && is != ours.Postgres && k.replaces == "")
	compare("webhooks", ours.Webhooks != 0 && facts["webhooks"] != strconv.Itoa(ours.Webhooks))

	seals := map[string]string{}
	for name, seal := range facts {
		if id, is := strings.CutPrefix(name, "seal:"); is {
			seals[id] = seal
		}
	}
	// Without --id-secret the cluster secrets also serve as id secrets: if these differ, the problem has been reported
	// already.
	if len(k.idSecrets) > 0 && len(seals) > 0 && !otherSecret {
		if _, err := hashkey.Open(k.idSecrets, seals); errors.Is(err, hashkey.ErrSealed) {
			k.problem("%s; %s", hashkey.ErrSealed, sealedMend)
		}
	}

	return nil
}

// leases lists the processes that have a lease.
func (k *checker) leases(ctx context.Context, c *redisconn.Client) (err error) {
	k.found.Processes, err = liveProcesses(ctx, c, k.now)
	if err != nil {
		return err
	}

	// Counters of a running gateway would go on without PostgreSQL, so no process may switch them over.
	usesCounters := func(p presence.Process) bool { return slices.Contains(p.Roles, presence.RoleGateway) }
	if k.replaces != "" && slices.ContainsFunc(k.found.Processes, usesCounters) {
		k.problem("%s", postgresMend(k.replaces, PostgresTiered))
	}

	return nil
}

// notPermitted reports whether the user lacks a permission.
func notPermitted(err error) bool { return redis.HasErrorPrefix(err, "NOPERM") }

// deniesKeys reports whether the user may send the command, but not with our keys. Only the text says so, which differs
// between the versions of Redis.
func deniesKeys(err error) bool { return notPermitted(err) && mentions(err, "a key", "of the keys") }

// deniesChannels reports the same of channels.
func deniesChannels(err error) bool {
	return notPermitted(err) && mentions(err, "a channel", "of the channels")
}

func mentions(err error, texts ...string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
}
