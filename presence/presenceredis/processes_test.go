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

func TestServerDifferentSettingsAreRefused(t *testing.T) {
	url := redistest.Single(t).URL()
	p := presence.Process{Name: "a", Incarnation: 1}
	if _, err := renew(t, open(t, url, quick), p); err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		change func(*presenceredis.Config)
		want   string // in the text; empty: no error
	}{
		"same": {func(*presenceredis.Config) {}, ""},
		"partitions": {
			func(c *presenceredis.Config) { c.Partitions = 300 }, `partitions is "300" here and "271" in Redis`,
		},
		"buckets": {func(c *presenceredis.Config) { c.Buckets = 32 }, `buckets is "32" here and "64" in Redis`},
		"region": {
			func(c *presenceredis.Config) { c.Facts.Region = "eu" },
			`this Redis belongs to the region "local", and not to "eu"`,
		},
		"secret": {func(c *presenceredis.Config) { c.Facts.Secret = "x" }, `--cluster-secret differs`},
	} {
		_, err := renew(t, open(t, url, quick, tc.change), p)
		if !saysOrNot(err, tc.want) {
			t.Errorf("%s: Renew = %v, want %q", name, err, tc.want)
		}
	}
}

// saysOrNot reports whether err is ErrFacts with a text, or nil if the text is empty.
func saysOrNot(err error, text string) bool {
	if text == "" {
		return err == nil
	}

	return errors.Is(err, presence.ErrFacts) && strings.Contains(err.Error(), text)
}

// TestServerAnotherFormatIsRefused: a Redis may be of a format without a number, or of an older or newer number.
func TestServerAnotherFormatIsRefused(t *testing.T) {
	for is, says := range map[string]string{"": `is of format "1"`, "4": `is of format "4"`, "7": `is of format "7"`} {
		server := redistest.Single(t)
		p := presence.Process{Name: "a", Incarnation: 1}
		if _, err := renew(t, open(t, server.URL(), quick), p); err != nil {
			t.Fatal(err)
		}

		if is == "" {
			server.Do(t, "HDEL", "hc:{c}:facts", "format")
		} else {
			server.Do(t, "HSET", "hc:{c}:facts", "format", is)
		}
		p.Name = "b"
		_, err := renew(t, open(t, server.URL(), quick), p)
		if !saysOrNot(err, says+", this version knows 5 and 6; run the version that wrote it") {
			t.Errorf("%q: %v", is, err)
		}
	}
}

// A Redis that a process of the previous release has initialized keeps its hash tags, because that process may still
// run. A new Redis gets evenly distributed tags.
func TestServerARedisKeepsItsHashTags(t *testing.T) {
	b := presence.Bucket("p", presence.DefaultBuckets)
	for format, begins := range map[string]string{
		"5": fmt.Sprintf("hc:{b%d}:", b),
		"6": presenceredis.BucketKey(b, ""),
	} {
		t.Run("format "+format, func(t *testing.T) {
			server := redistest.Single(t)
			if format == "5" {
				// An older process has written only the format so far.
				server.Do(t, "HSET", "hc:{c}:facts", "format", format)
			}
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
				t.Errorf("the format became %v", is)
			}
			if is := server.Do(t, "EXISTS", begins+"c:p"); is != int64(1) {
				t.Errorf("%sc:p does not exist, but %v", begins, server.Do(t, "KEYS", "hc:{b*}:c:*"))
			}

			listed := []string{}
			if err := s.Pages(t.Context(), func(pages []string) { listed = append(listed, pages...) }); err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(listed, "p") {
				t.Errorf("the pages are %q", listed)
			}
		})
	}
}

// A process that does not know the format number of webhooks ignores it. The first process that knows the number writes
// it.
func TestServerAnotherFormatOfWebhooksIsRefused(t *testing.T) {
	server := redistest.Single(t)
	const refused = `the webhooks' data in Redis is of format "1", this version knows 2; run the version that wrote ` +
		`it, or delete the keys`

	for i, tc := range []struct {
		knows    int
		is, want string
	}{
		{0, "", ""},
		{1, "1", ""},
		{0, "1", ""},
		{2, "1", refused},
	} {
		s := open(t, server.URL(), quick, func(c *presenceredis.Config) { c.Facts.Webhooks = tc.knows })

		_, err := renew(t, s, presence.Process{Name: "a" + strconv.Itoa(i), Incarnation: 1})
		if !saysOrNot(err, tc.want) {
			t.Errorf("%d: Renew = %v, want %q", i, err, tc.want)
		}

		if is, _ := server.Do(t, "HMGET", "hc:{c}:facts", "webhooks").([]any)[0].(string); is != tc.is {
			t.Errorf("%d: the facts have %q, want %q", i, is, tc.is)
		}
	}
}

// The first process writes the format number of counters. Processes with another counter format still serve presence.
// They neither change the number nor add one to a Redis that has none.
func TestServerCountersOfAnotherFormatDoNotKeepAProcessOut(t *testing.T) {
	for _, first := range []int{2, 0} {
		server := redistest.Single(t)
		for i, knows := range []int{first, 3, 2, 3} {
			s := open(t, server.URL(), quick, func(c *presenceredis.Config) { c.Facts.Counters = knows })
			for range 2 {
				if _, err := renew(t, s, presence.Process{Name: "a" + strconv.Itoa(i), Incarnation: 1}); err != nil {
					t.Fatalf("after %d, format %d: %v", first, knows, err)
				}
			}

			is, _ := server.Do(t, "HMGET", "hc:{c}:facts", "counters").([]any)[0].(string)
			if want := strings.Trim(strconv.Itoa(first), "0"); is != want {
				t.Errorf("after %d, format %d: the facts have %q, want %q", first, knows, is, want)
			}
		}
	}
}

// During a rotation, a process that knows both secrets may start. From then on other processes must know the first
// secret that it names.
func TestServerSecretsRotate(t *testing.T) {
	url := redistest.Single(t).URL()
	for i, tc := range []struct {
		secret string
		want   error
	}{{"k", nil}, {"k,x", nil}, {"x,k", nil}, {"k", presence.ErrFacts}, {"x", nil}} {
		p := presence.Process{Name: "a" + strconv.Itoa(i), Incarnation: 1}
		s := open(t, url, quick, func(c *presenceredis.Config) { c.Facts.Secret = tc.secret })
		for range 2 {
			if _, err := renew(t, s, p); !errors.Is(err, tc.want) {
				t.Fatalf("secret %q: Renew = %v, want %v", tc.secret, err, tc.want)
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
		t.Fatalf("Renew = %+v, %v; want old alone, without the one that waits", got, err)
	}

	if _, _, err := starting.Renew(t.Context(), q, time.Minute); !errors.Is(err, presence.ErrFacts) {
		t.Fatalf("Renew = %v, want ErrFacts", err)
	}
}

// The clock of Redis goes back, as after a failover to a server whose clock is behind. A dead process does not keep its
// lease any longer.
func TestClockAClockThatGoesBack(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, server.URL(), quick)
	if _, err := renew(t, s, presence.Process{Name: "a"}); err != nil {
		t.Fatal(err)
	}

	// The dead process has a lease by the former clock.
	until := time.Now().Add(time.Hour).UnixMilli()
	server.Do(t, "HSET", "hc:{c}:leases", "died:1", fmt.Sprint(until, " 7 presence"))

	const ttl = 300 * time.Millisecond
	all, _, err := s.Renew(t.Context(), presence.Process{Name: "a"}, ttl)
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v; want both: it may run", all, err)
	}

	testkit.Within(t, ttl+time.Second, "the lease is over", func() bool {
		all, _, err := s.Renew(t.Context(), presence.Process{Name: "a"}, ttl)
		return err == nil && len(all) == 1
	})
}

// Only the facts are lost, by a delete of their key or a failover. The running processes write them again although
// their leases exist, and no process with other settings can start.
func TestServerFactsThatAreMissingAreWrittenAgain(t *testing.T) {
	server := redistest.Single(t)
	old := open(t, server.URL(), quick)
	p := presence.Process{Name: "old"}
	if _, err := renew(t, old, p); err != nil {
		t.Fatal(err)
	}

	// Each of these losses must be repaired before a stranger can begin with other facts.
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

// A later version may add a fact. Its first process finds a Redis without that fact, and this version finds one fact
// too many.
func TestServerFactsOfLaterVersions(t *testing.T) {
	server := redistest.Single(t)
	if _, err := renew(t, open(t, server.URL(), quick), presence.Process{Name: "a"}); err != nil {
		t.Fatal(err)
	}

	// A fact of a later version is there, and one of this version is missing.
	server.Do(t, "HSET", "hc:{c}:facts", "later", "v")
	server.Do(t, "HDEL", "hc:{c}:facts", "seed") // as if a were of a version that does not have this fact

	if _, err := renew(t, open(t, server.URL(), quick), presence.Process{Name: "b"}); err != nil {
		t.Fatalf("a fact that is not known here, and one that is not there yet: %v", err)
	}

	for _, fact := range []string{"later", "seed"} {
		if v, _ := server.Do(t, "HGET", "hc:{c}:facts", fact).(string); v == "" {
			t.Errorf("%s is not there", fact)
		}
	}

	other := open(t, server.URL(), quick, func(c *presenceredis.Config) { c.Facts.Region = "other" })
	if _, err := renew(t, other, presence.Process{Name: "c"}); !errors.Is(err, presence.ErrFacts) {
		t.Errorf("another region: %v", err)
	}
}

// hashKeys records the keys that processes received, in order.
type hashKeys []string

func (k *hashKeys) SetHashKey(key []byte) { *k = append(*k, string(key)) }

// The key of user hashes is made once. A process that knows one of the secrets can open it, through every step of a
// rotation and after a loss. Other processes are refused.
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

		if _, err := renew(t, g, presence.Process{Name: "g" + strconv.Itoa(i)}); err != nil { // adds its seal
			t.Fatal(err)
		}
	}

	if _, err := gateway("stranger", "c"); !errors.Is(err, presence.ErrFacts) {
		t.Fatalf("a secret that opens nothing: %v, want ErrFacts", err)
	}

	if _, err := renew(t, node, presence.Process{Name: "node"}); err != nil {
		t.Fatal(err)
	}

	// No gateway runs any more: the node keeps the seals, which it cannot open itself.
	server.Flush(t)
	if _, err := renew(t, node, presence.Process{Name: "node"}); err != nil {
		t.Fatal(err)
	}

	for _, secret := range []string{"a", "b"} {
		if _, err := gateway("after "+secret, secret); err != nil {
			t.Fatal(err)
		}
	}

	// Every gateway that could start was given the same key.
	for _, key := range keys {
		if key != keys[0] {
			t.Fatalf("%d keys were received, not all the same", len(keys))
		}
	}
}
