package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// collector receives traces.
type collector struct {
	mu    sync.Mutex
	text  strings.Builder
	spans []collected
}

type collected struct {
	TraceID, SpanID, ParentSpanID, Name string
	StartTimeUnixNano, EndTimeUnixNano  string
	Status                              *struct{ Code int }
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var all struct {
		ResourceSpans []struct{ ScopeSpans []struct{ Spans []collected } }
	}
	if r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/json" ||
		json.Unmarshal(body, &all) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	c.text.Write(body)
	for _, resource := range all.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			c.spans = append(c.spans, scope.Spans...)
		}
	}
}

// await waits for a span that fits, and returns it.
func (c *collector) await(t *testing.T, what string, fits func(collected) bool) (found collected) {
	t.Helper()
	testkit.Eventually(t, "a span of "+what, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.IndexFunc(c.spans, fits)
		if i >= 0 {
			found = c.spans[i]
		}
		return i >= 0
	})

	return found
}

// The trace of a request contains its calls of Redis. Traces do not reveal who was on which page.
func TestServerTraces(t *testing.T) {
	t.Parallel()
	c := &collector{}
	sink := httptest.NewServer(c)
	defer sink.Close()

	redis := redistest.Start(t)
	const key = "a key that is long enough"
	r := run(t, "--redis", redis.URL(), "--cluster-listen", servertest.FreeAddr(), "--otlp", sink.URL, "--trace-every",
		"1", "--api-key", key)

	named := func(name string) func(collected) bool { return func(s collected) bool { return s.Name == name } }

	below := func(above collected, name string) func(collected) bool {
		return func(s collected) bool {
			return s.Name == name && s.ParentSpanID == above.SpanID && s.TraceID == above.TraceID && s.Status == nil
		}
	}

	resp, err := http.Get("http://" + r.public + "/private-page/counter")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	get := c.await(t, "the request", named("GET /:page/counter"))
	if id := resp.Header.Get("X-Request-Id"); id != get.TraceID {
		t.Errorf("the request id is %q, its trace %q", id, get.TraceID)
	}
	c.await(t, "Redis below it", below(get, "redis"))

	// A change of a counter is written in a batch, which is a span below the request.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		"http://"+r.public+"/api/v1/counters/views:private-key/increment", nil)
	if err != nil {
		t.Fatal(err)
	}

	req.Header.Set("X-API-Key", key)
	resp, err = http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	change := c.await(t, "the change", named("POST /api/v1/counters/:key/increment"))
	c.await(t, "the write below it", below(change, "change of counters"))

	// Nothing private is in any span.
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, private := range []string{"private-page", "private-key", key, "127.0.0.1"} {
		if strings.Contains(c.text.String(), private) {
			t.Errorf("the traces contain the private %q", private)
		}
	}

	for _, s := range c.spans {
		if len(s.TraceID) != 32 || len(s.SpanID) != 16 || s.StartTimeUnixNano > s.EndTimeUnixNano {
			t.Errorf("the span is %+v", s)
		}
	}
}
