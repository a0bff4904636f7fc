package presenceredis_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

func quick(c *presenceredis.Config) { c.FactsWait = 50 * time.Millisecond }

// renew renews a lease for a minute, and repeats the call until there are facts.
func renew(t testing.TB, s *presenceredis.Store, p presence.Process) ([]presence.Process, error) {
	t.Helper()
	for {
		all, _, err := s.Renew(t.Context(), p, time.Minute)
		if !errors.Is(err, presence.ErrNoFacts) {
			return all, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A process is refused if its settings differ from those of running processes, or if its Redis has data of another
// format. A later release may add a fact: its first process finds a Redis without that fact, and this release finds one
// fact too many.
func TestServerDifferentSettingsAreRefused(t *testing.T) {
	const facts, knows = "hc:{c}:facts", `, this version knows 5 and 6; run the version that wrote it`
	server := redistest.Single(t)
	p := presence.Process{Name: "a", Incarnation: 1}
	if _, err := renew(t, open(t, server.URL(), quick), p); err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		is     []any // a command that changes the facts
		change func(*presenceredis.Config)
		want   string // in the error; empty: no error
	}{
		"same": {},
		"partitions": {
			change: func(c *presenceredis.Config) { c.Partitions = 300 },
			want:   `partitions is "300" here and "271" in Redis`,
		},
		"buckets": {
			change: func(c *presenceredis.Config) { c.Buckets = 32 }, want: `buckets is "32" here and "64" in Redis`,
		},
		"region": {
			change: func(c *presenceredis.Config) { c.Facts.Region = "eu" },
			want:   `this Redis belongs to the region "local", and not to "eu"`,
		},
		"secret": {
			change: func(c *presenceredis.Config) { c.Facts.Secret = "x" }, want: `--cluster-secret differs`,
		},
		"a format without a number": {is: []any{"HDEL", facts, "format"}, want: `is of format "1"` + knows},
		"an older format":           {is: []any{"HSET", facts, "format", "4"}, want: `is of format "4"` + knows},
		"a newer format":            {is: []any{"HSET", facts, "format", "7"}, want: `is of format "7"` + knows},
		"a fact of a later version": {is: []any{"HSET", facts, "later", "v"}},
		"a fact that a later version has added, and another region": {
			is: []any{"HDEL", facts, "seed"}, change: func(c *presenceredis.Config) { c.Facts.Region = "eu" },
			want: "belongs to the region",
		},
		"a fact that a later version has added": {is: []any{"HDEL", facts, "seed"}},
	} {
		before := server.Do(t, "DUMP", facts)
		if tc.is != nil {
			server.Do(t, tc.is...)
		}

		change := tc.change
		if change == nil {
			change = func(*presenceredis.Config) {}
		}
		p.Name = name
		if _, err := renew(t, open(t, server.URL(), quick, change), p); !saysOrNot(err, tc.want) {
			t.Errorf("%s: Renew = %v, want %q", name, err, tc.want)
		}

		known := server.Do(t, "HMGET", facts, "later", "seed").([]any)
		if isLater := tc.is != nil && tc.is[2] == "later"; isLater != (known[0] != nil) {
			t.Errorf("%s: the fact of a later version is %v", name, known[0])
		}
		if tc.want == "" && known[1] == nil {
			t.Errorf("%s: a fact of this release is missing", name)
		}

		server.Do(t, "RESTORE", facts, "0", before, "REPLACE")
	}
}

// saysOrNot reports whether err is ErrFacts with the text; an empty text stands for no error.
func saysOrNot(err error, text string) bool {
	if text == "" {
		return err == nil
	}

	return errors.Is(err, presence.ErrFacts) && strings.Contains(err.Error(), text)
}

// If a process of the previous release has initialized a Redis, it keeps its hash tags, because that process may still
// run. A new Redis gets evenly distributed tags; all other tests use those.
func TestServerARedisKeepsItsHashTags(t *testing.T) {
	const format = "5"
	server := redistest.Single(t)
	server.Do(t, "HSET", "hc:{c}:facts", "format", format) // all that an older process has written so far
	s := open(t, server.URL(), quick)
	if _, err := renew(t, s, presence.Process{Name: "a", Incarnation: 1}); err != nil {
		t.Fatal(err)
	}

	c := start(t, s)
	// Publications must go to the channel of the same bucket.
	users := c.follow("p")
	c.set(0, "p", 3)
	testkit.Eventually(t, "the watcher has the count", func() bool { return users("p") == 3 })

	if is := server.Do(t, "HGET", "hc:{c}:facts", "format"); is != format {
		t.Errorf("the format became %v, want %v", is, format)
	}

	key := fmt.Sprintf("hc:{b%d}:c:p", presence.Bucket("p", presence.DefaultBuckets))
	if is := server.Do(t, "EXISTS", key); is != int64(1) {
		t.Errorf("the key %s does not exist; the keys are %v", key, server.Do(t, "KEYS", "hc:{b*}:c:*"))
	}

	listed := []string{}
	if err := s.Pages(t.Context(), func(pages []string) { listed = append(listed, pages...) }); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(listed, "p") {
		t.Errorf("the pages are %q, want p among them", listed)
	}
}

// life is a process that joins, with the settings that change gives it.
type life struct {
	change func(*presenceredis.Facts)
	want   string // in the error; empty: no error
	is     string // the fact afterwards; empty: none
}

// Processes start one after another, and what one of them knows of a fact decides whether the next may join.
func TestServerFactsOfProcessesThatCome(t *testing.T) {
	const refused = `the webhooks' data in Redis is of format "1", this version knows 2; run the version that wrote ` +
		`it, or delete the keys`
	webhooks := func(n int) func(*presenceredis.Facts) { return func(f *presenceredis.Facts) { f.Webhooks = n } }
	counters := func(n int) func(*presenceredis.Facts) { return func(f *presenceredis.Facts) { f.Counters = n } }
	secret := func(s string) func(*presenceredis.Facts) { return func(f *presenceredis.Facts) { f.Secret = s } }

	for name, tc := range map[string]struct {
		fact  string // empty: not checked
		lives []life
	}{
		// A process that does not know the format number of webhooks ignores it. The first one that knows it writes it.
		"webhooks": {"webhooks", []life{
			{webhooks(0), "", ""}, {webhooks(1), "", "1"}, {webhooks(0), "", "1"}, {webhooks(2), refused, "1"},
		}},
		// The first process writes the format number of counters. Processes with another counter format still serve
		// presence. They neither change the number nor add one to a Redis that has none.
		"counters": {"counters", []life{
			{counters(2), "", "2"}, {counters(3), "", "2"}, {counters(2), "", "2"}, {counters(3), "", "2"},
		}},
		"no counters": {"counters", []life{
			{counters(0), "", ""}, {counters(3), "", ""}, {counters(2), "", ""}, {counters(3), "", ""},
		}},
		// During a rotation, a process that knows both secrets may start. From then on other processes must know the
		// first secret that it names.
		"secrets": {"", []life{
			{secret("k"), "", ""}, {secret("k,x"), "", ""}, {secret("x,k"), "", ""},
			{secret("k"), "--cluster-secret differs", ""}, {secret("x"), "", ""},
		}},
	} {
		server := redistest.Single(t)
		for i, of := range tc.lives {
			s := open(t, server.URL(), quick, func(c *presenceredis.Config) { of.change(&c.Facts) })
			for range 2 {
				_, err := renew(t, s, presence.Process{Name: "a" + strconv.Itoa(i), Incarnation: 1})
				if !saysOrNot(err, of.want) {
					t.Errorf("%s, %d: Renew = %v, want %q", name, i, err, of.want)
				}
			}

			if tc.fact == "" {
				continue
			}

			is, _ := server.Do(t, "HMGET", "hc:{c}:facts", tc.fact).([]any)[0].(string)
			if is != of.is {
				t.Errorf("%s, %d: the fact is %q, want %q", name, i, is, of.is)
			}
		}
	}
}

// After Redis was emptied, the facts of the running processes win, even if a starting process asks first.
func TestServerRunningProcessesWriteTheFactsAgain(t *testing.T) {
	server := redistest.Single(t)
	wait := func(c *presenceredis.Config) { c.FactsWait = 2 * time.Second }

	old := open(t, server.URL(), quick)
	p, q := presence.Process{Name: "old"}, presence.Process{Name: "starting"}
	if _, err := renew(t, old, p); err != nil {
		t.Fatal(err)
	}
	server.Flush(t)

	starting := open(t, server.URL(), wait, func(c *presenceredis.Config) { c.Facts.Region = "other" })
	if _, _, err := starting.Renew(t.Context(), q, time.Minute); !errors.Is(err, presence.ErrNoFacts) {
		t.Fatalf("Renew with no facts: %v, want ErrNoFacts", err)
	}

	got, _, err := old.Renew(t.Context(), p, time.Minute)
	if err != nil || len(got) != 1 {
		t.Fatalf("Renew = %+v, %v; want the running process alone, without the waiting one", got, err)
	}

	if _, _, err := starting.Renew(t.Context(), q, time.Minute); !errors.Is(err, presence.ErrFacts) {
		t.Fatalf("Renew = %v, want ErrFacts", err)
	}
}

// The clock of Redis goes back, as after a failover to a server whose clock is behind. A dead process does not keep its
// lease longer because of that.
func TestClockAClockThatGoesBack(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, server.URL(), quick)
	if _, err := renew(t, s, presence.Process{Name: "a"}); err != nil {
		t.Fatal(err)
	}

	// The dead process has a lease that ends an hour later by the new clock.
	until := time.Now().Add(time.Hour).UnixMilli()
	server.Do(t, "HSET", "hc:{c}:leases", "died:1", fmt.Sprint(until, " 7 presence"))

	const ttl = 300 * time.Millisecond
	all, _, err := s.Renew(t.Context(), presence.Process{Name: "a"}, ttl)
	if err != nil || len(all) != 2 {
		t.Fatalf("the processes are %+v, %v; want both, since the other one may still run", all, err)
	}

	testkit.Within(t, ttl+time.Second, "the lease is over", func() bool {
		all, _, err := s.Renew(t.Context(), presence.Process{Name: "a"}, ttl)
		return err == nil && len(all) == 1
	})
}

// Only the facts are lost, by a delete of their key or a failover. The running processes write them again, even though
// their leases exist, and no process with other settings can start.
func TestServerFactsThatAreMissingAreWrittenAgain(t *testing.T) {
	server := redistest.Single(t)
	old := open(t, server.URL(), quick)
	p := presence.Process{Name: "old"}
	if _, err := renew(t, old, p); err != nil {
		t.Fatal(err)
	}

	// The running process must repair each of these losses before a process with other settings can write its facts.
	facts := server.Do(t, "HGETALL", "hc:{c}:facts")
	for _, lose := range [][]any{
		{"DEL", "hc:{c}:facts"}, {"HDEL", "hc:{c}:facts", "format", "secret"}, {"HDEL", "hc:{c}:facts", "region"},
	} {
		server.Do(t, lose...)
		if _, _, err := old.Renew(t.Context(), p, time.Minute); err != nil {
			t.Fatal(err)
		}

		if got := server.Do(t, "HGETALL", "hc:{c}:facts"); len(got.([]any)) != len(facts.([]any)) {
			t.Errorf("after %v: %v, want %v", lose, got, facts)
		}

		stranger := open(t, server.URL(), quick, func(c *presenceredis.Config) {
			c.Facts.Region = "other"
			c.Facts.Secret = "x"
		})
		if _, err := renew(t, stranger, presence.Process{Name: "stranger"}); !errors.Is(err, presence.ErrFacts) {
			t.Errorf("after %v another region and secret: %v, want ErrFacts", lose, err)
		}
	}
}

// hashKeys records the keys of user hashes that processes received, in order.
type hashKeys []string

func (k *hashKeys) SetHashKey(key []byte) { *k = append(*k, string(key)) }

// The key of user hashes is made once. A process that knows one of the secrets can open it, at every step of a rotation
// and after a loss. Other processes are refused.
func TestServerTheHashKeyOutlivesItsSecrets(t *testing.T) {
	server := redistest.Single(t)
	var keys hashKeys

	gateway := func(name string, secrets ...string) (*presenceredis.Store, error) {
		s := open(t, server.URL(), quick, func(c *presenceredis.Config) {
			for _, secret := range secrets {
				c.IDSecrets = append(c.IDSecrets, []byte(secret))
			}
			c.HashKeys = &keys
		})
		_, err := renew(t, s, presence.Process{Name: name})
		return s, err
	}

	node := open(t, server.URL(), quick)
	if _, err := renew(t, node, presence.Process{Name: "node"}); err != nil {
		t.Fatal(err)
	}

	// A rotation from a to b. The key of users stays.
	for i, secrets := range [][]string{{"a"}, {"a"}, {"a", "b"}, {"b", "a"}, {"b"}} {
		g, err := gateway("g"+strconv.Itoa(i), secrets...)
		if err != nil {
			t.Fatalf("%q: %v", secrets, err)
		}

		// This process adds its seal.
		if _, err := renew(t, g, presence.Process{Name: "g" + strconv.Itoa(i)}); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := gateway("stranger", "c"); !errors.Is(err, presence.ErrFacts) {
		t.Fatalf("a process with a foreign secret: %v, want ErrFacts", err)
	}

	if _, err := renew(t, node, presence.Process{Name: "node"}); err != nil {
		t.Fatal(err)
	}

	// Without a running gateway the node keeps the seals, though it cannot open them.
	server.Flush(t)
	if _, err := renew(t, node, presence.Process{Name: "node"}); err != nil {
		t.Fatal(err)
	}

	for _, secret := range []string{"a", "b"} {
		if _, err := gateway("after "+secret, secret); err != nil {
			t.Fatal(err)
		}
	}

	// Every gateway that could start received the same key.
	for _, key := range keys {
		if key != keys[0] {
			t.Fatalf("of %d keys that were received not all are the same", len(keys))
		}
	}
}
