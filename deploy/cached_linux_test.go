package deploy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// With nginx set up as README.md says, many readers of a page cost the gateway at most two requests a second, and soon
// see a change. Sites with hosts of their own do not get each other's counts.
func TestServerReadsBehindACache(t *testing.T) {
	dir := t.TempDir()
	proxy, listen, admin := servertest.FreeAddr(), servertest.FreeAddr(), servertest.FreeAddr()
	background(t, testkit.Timeout, binary, "serve", "--listen="+listen, "--admin-listen="+admin, "--cache-reads=1s",
		"--trusted-proxies=127.0.0.1",
		"--site=default=http://a.test", "--site=b=http://b.test")
	testkit.Eventually(t, "a gateway that is ready", func() bool { return servertest.Ready(t.Context(), admin) == nil })

	// Between nginx and the gateway, a proxy counts the reads that nginx has not answered itself.
	var arrived atomic.Int64
	var visitors sync.WaitGroup // who ask for something of their own at the same time
	const together = 5
	visitors.Add(together)
	gateway := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: listen})
	counted := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrived.Add(1)
		if strings.HasSuffix(r.URL.Path, "/members/me") {
			visitors.Done()
			visitors.Wait()
		}
		gateway.ServeHTTP(w, r)
	}))
	defer counted.Close()

	cache, location, ok := strings.Cut(
		regexp.MustCompile("(?s)```nginx\n(.*?)```").FindStringSubmatch(string(file(t, "README.md")))[1], "\n\n")
	if !ok {
		t.Fatal("README.md does not say how nginx caches reads")
	}
	cache = strings.Replace(cache, "/var/cache/nginx/headcount", filepath.Join(dir, "cache"), 1)

	conf := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf("user root; pid %s/nginx.pid; error_log stderr crit; events { worker_connections 500; "+
		"}\nhttp { access_log off; proxy_temp_path temp;\n%s\nupstream gateways { server %s; keepalive 8; }\nserver "+
		"{ listen %s;\nlocation / { proxy_pass http://gateways; }\n%s\n}\n}",
		dir, cache, counted.Listener.Addr(), proxy, location)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	background(t, 0, "nginx", "-p", dir, "-c", conf, "-g", "daemon off;")

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}, Timeout: testkit.Timeout}
	do := func(method, path, body string, host ...string) (string, error) {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://"+proxy+path, strings.NewReader(body))
		if err != nil {
			return "", err
		}
		for _, own := range host { // as a page of that host calls its own origin
			r.Host = own
			r.Header.Set("Sec-Fetch-Site", "same-origin")
		}

		resp, err := client.Do(r)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()

		answer, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, answer)
		}

		return string(answer), err
	}

	testkit.Eventually(t, "an answer", func() bool {
		_, err := do("GET", "/hot%2Fpage/counter", "")
		return err == nil
	})

	// Fifty readers ask without a pause.
	var asked atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	began := time.Now()
	before := arrived.Load()

	var readers sync.WaitGroup
	for range 50 {
		readers.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				if _, err := do("GET", "/hot%2Fpage/counter", ""); err != nil {
					t.Error(err)
					return
				}
				asked.Add(1)
			}
		})
	}
	testkit.Eventually(t, "4,000 reads", func() bool { return asked.Load() >= 4000 || t.Failed() })

	took := time.Since(began)
	n := arrived.Load() - before
	t.Logf("of %d reads in %s %d arrived", asked.Load(), took.Round(time.Millisecond), n)
	if float64(n) > 2*took.Seconds()+2 {
		t.Error("the gateway got more than two requests a second")
	}

	// A change must arrive although the old answer is cached.
	if _, err := do("PUT", "/hot%2Fpage/counter", `{"action":"increment"}`); err != nil {
		t.Error(err)
	}
	testkit.Eventually(t, "the change", func() bool {
		body, err := do("GET", "/hot%2Fpage/counter", "")
		return err == nil && strings.Contains(body, `"count":1,`)
	})

	stop()
	readers.Wait()

	// What each visitor has of their own is not cached, so nobody waits for the answer to another one.
	var asking sync.WaitGroup
	began = time.Now()
	for range together {
		asking.Go(func() {
			if _, err := do("GET", "/api/v1/counters/likes:42/members/me", ""); err != nil {
				t.Error(err)
			}
		})
	}
	asking.Wait()
	// The gateway answers when all have arrived, which the proxy would allow only after it has waited for 5 s.
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("%d visitors who ask whether they like something had all answers after %s", together, took)
	}

	// The same path on two sites.
	for host, want := range map[string]string{"a.test": `"count":1,`, "b.test": `"count":0,`} {
		if body, err := do("GET", "/hot%2Fpage/counter", "", host); err != nil || !strings.Contains(body, want) {
			t.Errorf("a page of the site %s is answered %s, %v", host, body, err)
		}
	}
}
