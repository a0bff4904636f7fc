//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/client"
	"headcount/internal/benchenv"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
)

const (
	callers  = 64 // clients that change counters, each waiting for its answer
	callTime = 4 * time.Second
	manyKeys = 1_000_000
	apiKey   = "the API key of the benchmark"
)

// serveCounters is serve with the key that clients have.
func (t *trial) serveCounters(flags ...string) server {
	return t.serve(append([]string{"--api-key", apiKey}, flags...)...)
}

// counted runs a server with flags, and clients who change its counters.
func counted(flags []string, client ...string) func(*trial) figures {
	return func(t *trial) figures { return t.calls(t.serveCounters(flags...), client...) }
}

// calls runs clients on a core of their own.
func (t *trial) calls(s server, client ...string) (f figures) {
	t.output(benchenv.On(t.Context(), benchenv.ClientCore, t.self, append([]string{"calls", "-url", s.url, "-pid", strconv.Itoa(s.PID())}, client...)...), &f)
	return f
}

// increments measures increments of one key and of many keys beside the floor of a call: a handler that
// reads the body as JSON and answers with a counter, and does nothing else. The three take turns, since the machine
// is not as fast in every second, and the figures are medians of their turns.
func increments(t *trial) figures {
	const turns, turn = 5, "1500ms"
	bare := t.helper(benchenv.ServerCore, "gin")
	c, err := dial(bare.addr) // waits until the server listens
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	one, many := t.serveCounters(), t.serveCounters()
	all := map[string][]float64{}
	for range turns {
		now := figures{}
		for name, took := range map[string]figures{
			"gin": t.calls(bare, "-for", turn), "one": t.calls(one, "-for", turn), "many": t.calls(many, "-for", turn, "-keys", "views:*"),
		} {
			for figure, value := range took {
				now[name+"_"+figure] = value
			}
		}
		for _, name := range []string{"one", "many"} {
			now[name+"_times"] = now[name+"_cpu_us_per_call"] / now["gin_cpu_us_per_call"]
		}
		for name, value := range now {
			all[name] = append(all[name], value)
		}
	}
	medians := figures{}
	for name, values := range all {
		medians[name] = median(values)
	}
	return medians
}

// reads measures GETs of a page that others watch and of a counter, in memory and with Redis, beside the floor: a handler that
// answers 200 bytes of JSON. All take turns.
func reads(t *trial) figures {
	const turns, turn = 3, "1s"
	bare := t.helper(benchenv.ServerCore, "gin")
	c, err := dial(bare.addr) // waits until the server listens
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	all := map[string][]float64{}
	servers := map[string]server{"memory": t.serveCounters(), "redis": t.serveCounters("--redis", redistest.Start(t).URL())}
	for _, s := range servers {
		ctx, leave := context.WithCancel(t.Context())
		watcher := client.New(client.Config{URL: s.url})
		watcher.Join("p")
		var watching sync.WaitGroup
		watching.Go(func() { _ = watcher.Run(ctx) }) // it ends with ctx
		defer watching.Wait()
		defer leave()
		for _, known := watcher.Count("p"); !known; _, known = watcher.Count("p") {
			if _, err := watcher.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		t.calls(s, "-for", "100ms") // the counter exists
	}
	for range turns {
		all["gin"] = append(all["gin"], t.calls(bare, "-for", turn, "-get", "/read")["cpu_us_per_call"])
		for where, s := range servers {
			for what, path := range map[string]string{"page": "/p/counter", "counter": "/api/v1/counters/views:1"} {
				name := where + "_" + what
				all[name] = append(all[name], t.calls(s, "-for", turn, "-get", path)["cpu_us_per_call"])
			}
		}
	}
	medians := figures{}
	for name, values := range all {
		medians[name+"_cpu_us"] = median(values)
		medians[name+"_times"] = median(values) / median(all["gin"])
	}
	return medians
}

// bare is the server that is the floor of increments and reads.
func bare(args []string) error {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	var value atomic.Int64
	e.POST("/api/v1/counters/:key/increment", func(c *gin.Context) {
		var body struct{ Delta int64 }
		if err := c.ShouldBindJSON(&body); err != nil {
			c.Status(http.StatusBadRequest)
			return
		}
		c.JSON(http.StatusOK, struct {
			Key       string    `json:"key"`
			Kind      string    `json:"kind"`
			Value     int64     `json:"value"`
			UpdatedAt time.Time `json:"updated_at"`
			Version   string    `json:"version"`
			Exact     bool      `json:"exact"`
		}{c.Param("key"), "sum", value.Add(body.Delta), time.Now().UTC().Truncate(time.Second), "1700000000000-42", true})
	})
	answer := []byte(`{"page":"p","count":12,"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-42"` + strings.Repeat(" ", 113) + "}\n")
	e.GET("/read", func(c *gin.Context) { c.Data(http.StatusOK, "application/json", answer) })
	return http.ListenAndServe(args[0], e)
}

// topOfMany has a million keys gain, and then asks what gained most.
func topOfMany(t *trial, flags ...string) figures {
	s := t.serveCounters(flags...)
	t.calls(s, "-keys", "views:*", "-batch", "1000", "-callers", "4")
	return t.calls(s, "-top", "-callers", "1")
}

func topInRedis(t *trial) figures { return topOfMany(t, "--redis", redistest.Start(t).URL()) }

func topInPostgres(t *trial) figures {
	return topOfMany(t, "--postgres", pgtest.Start(t, "shared_buffers=256MB").Database(t))
}

// divided is a rule with a dimension.
const divided = `{"rules":[{"match":"sales:*","kind":"sum","buckets":["1m:24h"],"dimensions":["country"]}]}`

// underDimensions measures changes of one sum that are counted under 200 values of a dimension.
func underDimensions(t *trial) figures {
	rules := filepath.Join(t.TempDir(), "rules.json")
	if err := os.WriteFile(rules, []byte(divided), 0o600); err != nil {
		t.Fatal(err)
	}
	return t.calls(t.serveCounters("--counters", rules), "-keys", "sales:1", "-values", "200")
}

// inFile measures changes of counters in a data directory, and beside them what one
// fsync costs there.
func inFile(client ...string) func(*trial) figures {
	return func(t *trial) figures {
		dir := t.Folder(".") // /tmp may be memory
		floor, err := syncs(filepath.Join(dir, "floor"))
		if err != nil {
			t.Fatal(err)
		}
		f := t.calls(t.serveCounters("--data-dir", filepath.Join(dir, "data")), client...)
		f["fsyncs_per_s"], f["times"] = floor, f["changes_per_s"]/floor
		return f
	}
}

// syncs returns how many times a second a page of a file can be written and synced,
// one after the other.
func syncs(name string) (float64, error) {
	f, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	page, n, began := make([]byte, 4096), 0, time.Now()
	for ; time.Since(began) < callTime/4; n++ {
		if _, err := f.WriteAt(page, int64(n%64)*4096); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(began).Seconds(), nil
}

// inPostgres measures changes of one exact counter in PostgreSQL, and beside them
// plain updates of one row, each from as many connections as there are clients.
func inPostgres(t *trial) figures {
	postgres := pgtest.Start(t, "fsync=on", "shared_buffers=256MB")
	floor, err := updates(t.Context(), postgres.Database(t))
	if err != nil {
		t.Fatal(err)
	}
	f := t.calls(t.serveCounters("--postgres", postgres.Database(t)), "-keys", "stock:1")
	f["updates_per_s"], f["times"] = floor, f["changes_per_s"]/floor
	return f
}

func updates(ctx context.Context, url string) (float64, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return 0, err
	}
	cfg.MaxConns, cfg.MinConns = callers, callers
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "create table plain (key text primary key, value bigint not null) with (fillfactor = 50); insert into plain values ('k', 0)"); err != nil {
		return 0, err
	}
	var n atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, callers)
	began := time.Now()
	for range callers {
		group.Go(func() {
			for time.Since(began) < callTime {
				if _, err := pool.Exec(ctx, "update plain set value = value + 1 where key = 'k'"); err != nil {
					errs <- err
					return
				}
				n.Add(1)
			}
		})
	}
	group.Wait()
	close(errs)
	return float64(n.Load()) / time.Since(began).Seconds(), <-errs
}

// inRedis measures changes of one counter at steady rates, of as much as a core carries and of more, and how many scripts
// Redis runs for them.
func inRedis(t *trial) figures {
	redis := redistest.Start(t)
	s := t.serveCounters("--redis", redis.URL())
	time.Sleep(callTime) // until a process that has just begun has its partitions
	idle, began := scripts(t, redis), time.Now()
	time.Sleep(callTime / 2)
	rest := (scripts(t, redis) - idle) / time.Since(began).Seconds()
	f := figures{}
	for _, load := range []struct {
		prefix string
		client []string
	}{
		{"5000_", []string{"-rate", "5000"}},
		{"10000_", []string{"-rate", "10000"}},
		{"batches_", []string{"-rate", "200", "-batch", "100"}},
		{"", []string{"-rate", "20000"}},
	} {
		before, began := scripts(t, redis), time.Now()
		got := t.calls(s, append(load.client, "-callers", "500")...)
		got["scripts_per_s"] = (scripts(t, redis)-before)/time.Since(began).Seconds() - rest
		got["core_percent"] = got["calls_per_s"] * got["cpu_us_per_call"] / 1e4
		for name, v := range got {
			f[load.prefix+name] = v
		}
	}
	return f
}

// persisted measures how many rows are written in PostgreSQL, behind Redis, for changes of some
// counters at a steady rate.
func persisted(t *trial) figures {
	const keys, rate = 200, 4000
	database := pgtest.Start(t).Database(t)
	// Each row of a counter is written by an update; what makes it is written once.
	rows := func() float64 {
		time.Sleep(2 * time.Second) // the last checkpoint, and what PostgreSQL counts a second late
		return float64(pgtest.Query[int64](t, database, "select coalesce(sum(n_tup_upd), 0)::bigint from pg_stat_user_tables where relname = 'headcount_counters'"))
	}
	s := t.serveCounters("--redis", redistest.Start(t).URL(), "--postgres", database)
	client := []string{"-keys", "votes:*", "-many", strconv.Itoa(keys), "-rate", strconv.Itoa(rate), "-callers", "100"}
	t.calls(s, client...) // all counters exist
	before := rows()
	f := t.calls(s, client...)
	f["rows"] = rows() - before
	f["changes"] = f["changes_per_s"] * callTime.Seconds()
	f["each"] = f["rows"] / keys / callTime.Seconds() // --persist-interval is 1s
	return f
}

// hotInCluster measures a sum that is sharded over three masters: where its scripts run, and what an
// exact read takes beside one of a sum that is not sharded.
func hotInCluster(t *trial) figures {
	cluster := redistest.StartCluster(t, 3, 0)
	s := t.serveCounters("--redis", cluster.URL(), "--hot-rate", "20")
	change := []string{"-rate", "2000", "-keys", "votes:hot"}
	t.calls(s, change...) // until it is split
	var before, ran [3]float64
	for i, m := range cluster.Masters {
		before[i] = scripts(t, m)
	}
	began := time.Now()
	f := t.calls(s, change...)
	sum := 0.0
	for i, m := range cluster.Masters {
		ran[i] = scripts(t, m) - before[i]
		sum += ran[i]
	}
	f["scripts_per_s"] = sum / time.Since(began).Seconds()
	f["busiest_percent"] = 100 * slices.Max(ran[:]) / sum
	f["one_p50_ms"], f["exact_p50_ms"] = t.exactReads(s, "votes:other"), t.exactReads(s, "votes:hot")
	return f
}

// exactReads returns the median of exact reads of a counter, one after the other, in ms.
func (t *trial) exactReads(s server, key string) float64 {
	api := client.NewAPI(client.Config{URL: s.url, APIKey: apiKey})
	var took []time.Duration
	for range 500 {
		began := time.Now()
		if _, err := api.Exact(t.Context(), key); err != nil {
			t.Fatalf("an exact read: %w", err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2].Seconds() * 1e3
}

// membersInRedis measures what a member of a set takes in Redis.
func membersInRedis(t *trial) figures {
	redis := redistest.Start(t)
	s := t.serveCounters("--redis", redis.URL())
	before := memory(t, redis)
	t.calls(s, "-members", strconv.Itoa(manyKeys))
	return figures{"bytes_each": (memory(t, redis) - before) / manyKeys}
}

// scripts is how many scripts Redis has run. Every change is made by one.
func scripts(t *trial, s *redistest.Server) float64 {
	return info(t, s, "commandstats", "cmdstat_evalsha:calls=")
}

func memory(t *trial, s *redistest.Server) float64 { return info(t, s, "memory", "used_memory:") }

func info(t *trial, s *redistest.Server, section, field string) float64 {
	text, _ := s.Do(t, "INFO", section).(string)
	_, rest, _ := strings.Cut(text, "\n"+field)
	line := rest[:max(0, strings.IndexAny(rest, ",\r"))]
	n, err := strconv.ParseFloat(line, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// calls is the clients: each sends a change and waits for the answer before the next.
func calls(args []string) error {
	f := flag.NewFlagSet("calls", flag.ContinueOnError)
	target := f.String("url", "", "the server")
	pid := f.Int("pid", 0, "its process")
	keys := f.String("keys", "views:1", "the key, or a prefix and * for many keys")
	many := f.Int("many", manyKeys, "how many keys the * of -keys stands for")
	batch := f.Int("batch", 0, "changes of a call; 0: one, by the call for one")
	members := f.Int("members", 0, "add so many members to one set, instead of changes")
	limit := f.Bool("limit", false, "ask for a limit, instead of changes")
	values := f.Int("values", 0, "count changes under so many values of the dimension country")
	unique := f.Int("unique", 0, "add one of so many members to a unique, instead of changes")
	top := f.Bool("top", false, "ask for what gained most, instead of changes")
	get := f.String("get", "", "read this path, instead of changes")
	rate := f.Float64("rate", 0, "calls a second, together; 0: as many as go")
	clients := f.Int("callers", callers, "clients")
	lasts := f.Duration("for", callTime, "how long")
	if err := f.Parse(args); err != nil {
		return err
	}
	u, err := url.Parse(*target)
	if err != nil {
		return err
	}
	r := &caller{host: u.Host, keys: *keys, many: *many, batch: *batch, values: *values, unique: *unique, limit: *limit, top: *top, get: *get}
	var group sync.WaitGroup
	var turn, left atomic.Int64
	left.Store(int64(*members))
	took, errs := make([][]time.Duration, *clients), make([]error, *clients)
	conns := make([]net.Conn, *clients)
	for i := range conns { // connecting is not a part of the first calls
		if conns[i], err = dial(u.Host); err != nil {
			return err
		}
		defer conns[i].Close()
	}
	cpu, began := cpuTime(*pid), time.Now()
	for i, c := range conns {
		group.Go(func() {
			in := bufio.NewReaderSize(c, 64<<10)
			for {
				due := time.Now()
				if *rate > 0 { // late calls are measured from when they were due
					due = began.Add(time.Duration(float64(turn.Add(1)) / *rate * float64(time.Second)))
					time.Sleep(time.Until(due))
				}
				from := -1
				if *members > 0 {
					if from = int(left.Add(-1000)); from < 0 {
						return
					}
				} else if time.Since(began) > *lasts {
					return
				}
				if errs[i] = r.call(c, in, from); errs[i] != nil {
					return
				}
				took[i] = append(took[i], time.Since(due))
			}
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	seconds, used := time.Since(began).Seconds(), cpuTime(*pid)-cpu
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	n := float64(len(all))
	changes := n * float64(max(*batch, 1))
	return tell(figures{
		"calls_per_s": n / seconds, "changes_per_s": changes / seconds, "cpu_us_per_call": used / n * 1e6, "changes_per_cpu_s": changes / used,
		"p50_ms": all[len(all)/2].Seconds() * 1e3, "p99_ms": all[len(all)*99/100].Seconds() * 1e3,
	})
}

// caller makes the calls of all clients.
type caller struct {
	host, keys     string
	many, batch    int
	values, unique int
	limit, top     bool
	get            string
}

// key is one that fits keys.
func (r *caller) key() string {
	if prefix, many := strings.CutSuffix(r.keys, "*"); many {
		return prefix + strconv.Itoa(rand.IntN(r.many))
	}
	return r.keys
}

// call makes one call and reads its answer. from is the first of the members to add.
func (r *caller) call(c net.Conn, in *bufio.Reader, from int) error {
	path, body := "/api/v1/counters/"+r.key()+"/increment", []byte(`{"delta":1}`)
	switch {
	case r.limit:
		path, body = "/api/v1/limits/"+r.key(), []byte(`{"limit":1000000000,"window":"1m"}`)
	case r.values > 0:
		body = fmt.Appendf(nil, `{"delta":1,"dimensions":{"country":"c%d"}}`, rand.IntN(r.values))
	case r.unique > 0:
		path = "/api/v1/counters/" + r.key() + "/members"
		body = fmt.Appendf(nil, `{"add":["user%d"]}`, rand.IntN(r.unique))
	case from >= 0:
		add := make([]string, 1000)
		for i := range add {
			add[i] = "user" + strconv.Itoa(from+i)
		}
		path = "/api/v1/counters/likes:1/members"
		body, _ = json.Marshal(map[string]any{"add": add}) // strings
	case r.batch > 0:
		b := append(make([]byte, 0, 64*r.batch), `{"changes":[`...)
		for i := range r.batch {
			if i > 0 {
				b = append(b, ',')
			}
			b = fmt.Appendf(b, `{"key":%q,"delta":1}`, r.key())
		}
		path, body = "/api/v1/counters", append(b, `]}`...)
	}
	method := "POST"
	switch {
	case r.top:
		method, path, body = "GET", "/api/v1/top?match=views:*&last=1h&n=10", nil
	case r.get != "":
		method, path, body = "GET", r.get, nil
	}
	request := fmt.Appendf(nil, method+" %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nX-API-Key: %s\r\nContent-Length: %d\r\n\r\n%s", path, r.host, apiKey, len(body), body)
	if _, err := c.Write(request); err != nil {
		return err
	}
	status, err := in.ReadSlice('\n')
	if err != nil {
		return err
	}
	ok := bytes.Contains(status, []byte(" 200 "))
	said, length := string(status), 0
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
			break
		}
		if name, value, _ := bytes.Cut(line, []byte(": ")); bytes.EqualFold(name, []byte("Content-Length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return err
			}
		}
	}
	if !ok {
		text, _ := io.ReadAll(io.LimitReader(in, int64(length)))
		return fmt.Errorf("%s: %s%s", path, said, text)
	}
	_, err = in.Discard(length)
	return err
}
