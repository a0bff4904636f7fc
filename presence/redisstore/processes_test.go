package redisstore_test

import (
	"context"
	"errors"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/redisstore"
	"headcount/presence/redistest"
)

func quick(c *redisstore.Config) { c.FactsWait = 50 * time.Millisecond }

func TestProcessesKnowEachOther(t *testing.T) {
	url := redistest.Single(t).URL()
	a, b := open(t, url, quick), open(t, url, quick)
	pa := presence.Process{Name: "a:1", Roles: []string{"gateway", "presence"}, Incarnation: 1 << 60}
	pb := presence.Process{Name: "b:1", Incarnation: 2}
	if _, err := b.Renew(t.Context(), pb, time.Minute); err != nil {
		t.Fatal(err)
	}
	got, err := a.Renew(t.Context(), pa, time.Minute)
	if want := []presence.Process{pa, pb}; err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("Renew = %+v, %v; want %+v", got, err, want)
	}
	twin := pa
	twin.Incarnation++
	if _, err := b.Renew(t.Context(), twin, time.Minute); !errors.Is(err, presence.ErrNameTaken) {
		t.Fatalf("another run of a's name: %v, want ErrNameTaken", err)
	}
	if err := b.Leave(t.Context(), twin); err != nil { // not its lease
		t.Fatal(err)
	}
	if got, err := b.Renew(t.Context(), pb, time.Millisecond); err != nil || len(got) != 2 {
		t.Fatalf("Renew = %+v, %v", got, err)
	}
	time.Sleep(10 * time.Millisecond)
	if got, err := a.Renew(t.Context(), pa, time.Minute); err != nil || len(got) != 1 {
		t.Fatalf("after b's lease is over: %+v, %v", got, err)
	}
	if err := a.Leave(t.Context(), pa); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Renew(t.Context(), twin, time.Minute); err != nil || !reflect.DeepEqual(got, []presence.Process{twin}) {
		t.Fatalf("the name after Leave: %+v, %v", got, err)
	}
}

func TestDifferentSettingsAreRefused(t *testing.T) {
	url := redistest.Single(t).URL()
	p := presence.Process{Name: "a", Incarnation: 1}
	if _, err := open(t, url, quick).Renew(t.Context(), p, time.Minute); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change func(*redisstore.Config)
		want   string // in the text; empty: no error
	}{
		"same":       {func(*redisstore.Config) {}, ""},
		"partitions": {func(c *redisstore.Config) { c.Partitions = 300 }, `partitions is "300" here and "271" in Redis`},
		"buckets":    {func(c *redisstore.Config) { c.Buckets = 32 }, `buckets is "32" here and "64" in Redis`},
		"region":     {func(c *redisstore.Config) { c.Facts.Region = "eu" }, `region is "eu" here and "local" in Redis`},
		"secret":     {func(c *redisstore.Config) { c.Facts.Secret = "x" }, `secret is "x" here and "k" in Redis`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(t, url, quick, tc.change).Renew(t.Context(), p, time.Minute)
			if tc.want == "" && err != nil || tc.want != "" && (!errors.Is(err, presence.ErrFacts) || !strings.Contains(err.Error(), tc.want)) {
				t.Fatalf("Renew = %v, want %q", err, tc.want)
			}
		})
	}
}

// A secret rotates: who knows both may start, and the first one it names is
// what the next have to know.
func TestSecretsRotate(t *testing.T) {
	url := redistest.Single(t).URL()
	for i, tc := range []struct {
		secret string
		want   error
	}{{"k", nil}, {"k,x", nil}, {"x,k", nil}, {"k", presence.ErrFacts}, {"x", nil}} {
		p := presence.Process{Name: "a" + strconv.Itoa(i), Incarnation: 1}
		s := open(t, url, quick, func(c *redisstore.Config) { c.Facts.Secret = tc.secret })
		for range 2 {
			if _, err := s.Renew(t.Context(), p, time.Minute); !errors.Is(err, tc.want) {
				t.Fatalf("secret %q: Renew = %v, want %v", tc.secret, err, tc.want)
			}
		}
	}
}

// In a Redis that was emptied the facts of the running win, even when the
// starting one asks first.
func TestRunningProcessesWriteTheFactsAgain(t *testing.T) {
	server := redistest.Single(t)
	wait := func(c *redisstore.Config) { c.FactsWait = 2 * time.Second }
	old := open(t, server.URL(), quick)
	p, q := presence.Process{Name: "old"}, presence.Process{Name: "starting"}
	if _, err := old.Renew(t.Context(), p, time.Minute); err != nil {
		t.Fatal(err)
	}
	server.Flush(t)
	starting := open(t, server.URL(), wait, func(c *redisstore.Config) { c.Facts.Region = "other" })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := starting.Renew(ctx, q, time.Minute); !errors.Is(err, presence.ErrUnavailable) {
		t.Fatalf("Renew with no facts: %v, want ErrUnavailable", err)
	}
	got, err := old.Renew(t.Context(), p, time.Minute)
	if err != nil || len(got) != 1 {
		t.Fatalf("Renew = %+v, %v; want old alone, without the one that waits", got, err)
	}
	if _, err := starting.Renew(t.Context(), q, time.Minute); !errors.Is(err, presence.ErrFacts) {
		t.Fatalf("Renew = %v, want ErrFacts", err)
	}
}
