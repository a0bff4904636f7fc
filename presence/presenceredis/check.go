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
)

// Checked is what Check found.
type Checked struct {
	Problems  []string           // a sentence each, with the mend
	Processes []presence.Process // those with a lease that lasts
	Region    string             // whose Redis it is; empty: nobody's yet
}

// ClockTolerance is how far the clock of a server may be from this machine's. Ends of holds and
// leases are times of day.
const ClockTolerance = 2 * time.Second

// checkKey is the key with which Check tries commands. Nobody else uses it.
const checkKey = prefix + "{check}:0"

// tried are the commands that the program sends, in scripts too, with arguments that do nothing
// to a string of one byte but show whether Redis permits the command.
var tried = [][]any{
	{"set", checkKey, "1"}, {"expire", checkKey, "60"},
	{"eval", "return 1", "1", checkKey}, {"evalsha", strings.Repeat("0", 40), "1", checkKey}, {"script", "load", "return 1"},
	{"time"}, {"scan", "0", "count", "1"}, {"exists", checkKey}, {"persist", checkKey}, {"pexpire", checkKey, "60000"}, {"ttl", checkKey},
	{"get", checkKey}, {"mget", checkKey}, {"mset", checkKey, "1"}, {"setnx", checkKey, "1"}, {"setrange", checkKey, "0", "1"},
	{"getrange", checkKey, "0", "0"}, {"append", checkKey, ""}, {"strlen", checkKey},
	{"hdel", checkKey, "f"}, {"hexists", checkKey, "f"}, {"hget", checkKey, "f"}, {"hgetall", checkKey}, {"hincrby", checkKey, "f", "1"},
	{"hkeys", checkKey}, {"hlen", checkKey}, {"hmget", checkKey, "f"}, {"hscan", checkKey, "0"}, {"hset", checkKey, "f", "1"},
	{"hsetnx", checkKey, "f", "1"}, {"hvals", checkKey},
	{"llen", checkKey}, {"lrange", checkKey, "0", "0"}, {"ltrim", checkKey, "0", "0"}, {"rpush", checkKey, "1"},
	{"sadd", checkKey, "m"}, {"scard", checkKey}, {"smismember", checkKey, "m"}, {"srem", checkKey, "m"}, {"sscan", checkKey, "0"},
	{"zadd", checkKey, "1", "m"}, {"zcard", checkKey}, {"zrange", checkKey, "0", "0"}, {"zrangebyscore", checkKey, "0", "0"},
	{"zrem", checkKey, "m"}, {"zscore", checkKey, "m"},
	{"pfadd", checkKey, "m"}, {"pfcount", checkKey}, {"pfmerge", checkKey, checkKey},
	{"xadd", checkKey, "*", "f", "1"}, {"xlen", checkKey}, {"xrange", checkKey, "-", "+"}, {"xtrim", checkKey, "maxlen", "0"},
	{"copy", checkKey, checkKey}, {"rename", checkKey, checkKey}, {"publish", checkKey, ""}, {"unlink", checkKey},
}

// Check tries the Redis of cfg as a process would use it, and changes nothing that lasts. Of cfg it
// takes URL and Facts: the secret is compared when there is one. It returns when ctx ends, too.
func Check(ctx context.Context, cfg Config) (found Checked) {
	say := func(format string, args ...any) {
		found.Problems = append(found.Problems, fmt.Sprintf(format, args...))
	}
	conn, err := redisconn.Open(redisconn.Config{
		URL: cfg.URL, Dial: cfg.Dial, Log: cfg.Log, Unavailable: presence.ErrUnavailable,
		Classify:   func(err error) error { return err },
		ProbeWrite: func(context.Context, *redisconn.Client) (int, error) { return 0, nil },
	})
	if err != nil {
		say("the URL cannot be used: %v.", err)
		return found
	}
	defer conn.Close()
	err = conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		info, err := c.Info(ctx, "server").Result()
		if err != nil {
			return err
		}
		if v := redisconn.InfoField(info, "redis_version"); olderThan(v, 6, 2) {
			say("Redis is of version %s; it must be 6.2 or later.", v)
		}
		if info, err = c.Info(ctx, "memory").Result(); err != nil {
			return err
		}
		if p := redisconn.InfoField(info, "maxmemory_policy"); p != "" && p != "noeviction" && redisconn.InfoField(info, "maxmemory") != "0" {
			say("Redis drops keys when its memory is full (maxmemory-policy is %s), and counts are wrong then; set maxmemory-policy noeviction.", p)
		}
		before := time.Now()
		now, err := c.Time(ctx).Result()
		if err != nil && !notPermitted(err) {
			return err
		}
		if off := now.Sub(before.Add(time.Since(before) / 2)).Abs(); err == nil && off > ClockTolerance {
			say("The clocks of Redis and of this machine differ by %s; let both keep time by NTP.", off.Round(time.Second))
		}
		denied, err := deniedCommands(ctx, c)
		if err != nil {
			return err
		}
		switch {
		case slices.Contains(denied, keysDenied):
			say("The user of the URL may not use keys that begin with %s; give it ~%s* (deploy/redis.acl has a user that may).", prefix, prefix)
		case slices.Contains(denied, channelsDenied):
			say("The user of the URL may not use channels that begin with %s; give it &%s* (deploy/redis.acl has a user that may).", prefix, prefix)
		case len(denied) > 0:
			say("The user of the URL may not send %s; give it +%s (deploy/redis.acl has a user that may).", strings.Join(denied, ", "), strings.Join(denied, " +"))
		}
		facts, err := c.HGetAll(ctx, factsKey).Result()
		if err != nil {
			return err
		}
		found.Region = facts["region"]
		if r := facts["region"]; r != "" && r != cfg.Facts.Region {
			say("This Redis belongs to the region %q, and not to %q; mend the URL or the name.", r, cfg.Facts.Region)
		}
		if theirs := facts["secret"]; theirs != "" && cfg.Facts.Secret != "" && !shareOne(theirs, cfg.Facts.Secret) {
			say("The processes of this Redis have another --cluster-secret; give every process the same.")
		}
		if f := facts["format"]; f != "" && f != strconv.Itoa(format) {
			say("The data in this Redis is of format %s, and this version knows %d; run the version that wrote it, or empty this Redis while nothing of it runs.", f, format)
		}
		if f, ours := facts["counters"], cfg.Facts.Counters; f != "" && ours != 0 && f != strconv.Itoa(ours) {
			say("The counters in this Redis are of format %s, and this version knows %d; run the version that wrote them, or move them by its export.", f, ours)
		}
		if f, ours := facts["postgres"], cfg.Facts.Postgres; f != "" && ours != "" && f != ours && (f != "none" || ours != "behind") {
			say("%s.", postgresMend(f, ours))
		}
		if f, ours := facts["webhooks"], cfg.Facts.Webhooks; f != "" && ours != 0 && f != strconv.Itoa(ours) {
			say("What this Redis keeps of webhooks is of format %s, and this version knows %d; %s.", f, ours, webhooksMend)
		}
		leases, err := c.HGetAll(ctx, leasesKey).Result()
		if err != nil {
			return err
		}
		for name, lease := range leases {
			end, _, _ := strings.Cut(lease, " ")
			ms, err := strconv.ParseInt(end, 10, 64)
			p, bad := parseLease(name, lease)
			if err == nil && bad == nil && (now.IsZero() || ms > now.UnixMilli()) {
				found.Processes = append(found.Processes, p)
			}
		}
		slices.SortFunc(found.Processes, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })
		return nil
	})
	switch {
	case err == nil:
	case redis.HasErrorPrefix(err, "WRONGPASS"), redis.HasErrorPrefix(err, "NOAUTH"):
		say("Redis refuses the user or the password of the URL.")
	case notPermitted(err):
		if len(found.Problems) == 0 {
			say("Redis refuses what the program needs: %v (deploy/redis.acl has a user that may).", err)
		}
	default:
		say("Redis does not answer: %v; start it, or mend the URL.", err)
	}
	return found
}

// What deniedCommands returns, alone, when it is not about commands.
const (
	keysDenied     = "keys"
	channelsDenied = "channels"
)

// notPermitted reports whether Redis said that the user may not.
func notPermitted(err error) bool { return redis.HasErrorPrefix(err, "NOPERM") }

// deniedCommands tries all commands, and returns those that the user may not send.
func deniedCommands(ctx context.Context, c *redisconn.Client) (denied []string, err error) {
	pipe := c.Pipeline()
	cmds := make([]*redis.Cmd, len(tried))
	for i, args := range tried {
		cmds[i] = pipe.Do(ctx, args...)
	}
	_, _ = pipe.Exec(ctx) // each command has its own
	for i, cmd := range cmds {
		err := cmd.Err()
		name := fmt.Sprint(tried[i][0])
		switch {
		case err == nil:
		case notPermitted(err) && (strings.Contains(err.Error(), "a key") || strings.Contains(err.Error(), "of the keys")):
			return []string{keysDenied}, nil
		case notPermitted(err) && (strings.Contains(err.Error(), "a channel") || strings.Contains(err.Error(), "of the channels")):
			return []string{channelsDenied}, nil
		case notPermitted(err):
			if name == "script" {
				name = "script|load"
			}
			denied = append(denied, name)
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
			return nil, err
		case redis.HasErrorPrefix(err, "READONLY"), redis.HasErrorPrefix(err, "MISCONF"), redis.HasErrorPrefix(err, "OOM"):
			return nil, err
		}
	}
	return denied, nil
}

// olderThan reports whether a version is one before major.minor.
func olderThan(version string, major, minor int) bool {
	parts := strings.SplitN(version+".0", ".", 3)
	is, err := strconv.Atoi(parts[0])
	if err != nil {
		return false // nobody knows
	}
	then, _ := strconv.Atoi(parts[1])
	return is < major || is == major && then < minor
}

// shareOne reports whether two lists, separated by commas, have a value in common.
func shareOne(a, b string) bool {
	theirs := strings.Split(b, ",")
	return slices.ContainsFunc(strings.Split(a, ","), func(one string) bool { return slices.Contains(theirs, one) })
}
