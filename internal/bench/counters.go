//go:build linux

package main

import (
	"bufio"
	"context"
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
	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
)

const (
	callers  = 64              // clients that change counters, each waiting for its answer
	callTime = 3 * time.Second // whole seconds, since persisted counts intervals of one second
	manyKeys = 1_000_000
	apiKey   = "the API key of the benchmark"
)

// serveCounters is serve with the API key that the clients send.
func (t *trial) serveCounters(flags ...string) server {
	return t.serve(append([]string{"--api-key", apiKey}, flags...)...)
}

// counted returns a measurement of a server with flags, whose counters clients change.
func counted(flags []string, client ...string) func(*trial) figures {
	return func(t *trial) figures { return t.calls(t.serveCounters(flags...), client...) }
}

// calls runs clients on a core of their own.
func (t *trial) calls(s server, client ...string) (f figures) {
	args := []string{"calls", "-url", s.url, "-pid", strconv.Itoa(s.PID())}
	t.output(benchenv.On(t.Context(), benchenv.ClientCore, t.self, append(args, client...)...), &f)
	return f
}

// inRounds makes all calls one after the other, in several rounds, because the speed of the machine varies. The figures
// are medians of the rounds. NAME_times is the CPU time of a call as a multiple of the floor, which is that of "gin".
func inRounds(rounds int, calls map[string]func() figures) figures {
	all := map[string][]float64{}
	for range rounds {
		took := map[string]figures{}
		for name, call := range calls {
			took[name] = call()
			took[name]["times"] = took[name]["cpu_us_per_call"]
		}

		for name, f := range took {
			f["times"] /= took["gin"]["cpu_us_per_call"]
			for figure, value := range f {
				all[name+"_"+figure] = append(all[name+"_"+figure], value)
			}
		}
	}

	// A median, because one round may meet the garbage collection of another process.
	medians := figures{}
	for name, values := range all {
		medians[name] = median(values)
	}

	return medians
}

// bareGin starts the server that is the floor of calls: its handlers read JSON or answer with it, and do nothing else.
func (t *trial) bareGin() server {
	s := t.helper(benchenv.ServerCore, "gin")

	listens := func(ctx context.Context) error { return servertest.Listens(ctx, s.addr) }
	if err := servertest.Await(s.Process, benchenv.EndTime, listens); err != nil {
		t.Fatal(err)
	}
	return s
}

// increments measures increments of one key, of many keys, and of the floor.
func increments(t *trial) figures {
	const each = "1s"
	// All three servers run, but only one of them is called at a time.
	gin := t.bareGin()
	one := t.serveCounters()
	many := t.serveCounters()

	return inRounds(3, map[string]func() figures{
		"gin":  func() figures { return t.calls(gin, "-for", each) },
		"one":  func() figures { return t.calls(one, "-for", each) },
		"many": func() figures { return t.calls(many, "-for", each, "-keys", "views:#") },
	})
}

// reads measures GETs of a page that others watch and of a counter, in memory and with Redis, and of the floor, which
// answers with 200 bytes of JSON.
func reads(t *trial) figures {
	const each = "700ms"

	get := func(s server, path string) func() figures {
		return func() figures { return t.calls(s, "-for", each, "-path", path) }
	}
	calls := map[string]func() figures{"gin": get(t.bareGin(), "/read")}
	servers := map[string]server{
		"memory": t.serveCounters(),
		"redis":  t.serveCounters("--redis", redistest.Start(t).URL()),
	}
	for where, s := range servers {
		// A page that nobody watches would be read from the store each time.
		ctx, leave := context.WithCancel(t.Context())
		watcher := client.New(client.Config{URL: s.url})
		watcher.Join("p")
		var watching sync.WaitGroup
		watching.Go(func() { _ = watcher.Run(ctx) }) // it ends with ctx
		defer watching.Wait()
		defer leave()

		// Until the watcher has its count, reads would still go to the store.
		for {
			if _, known := watcher.Count("p"); known {
				break
			}
			if _, err := watcher.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
		}

		t.calls(s, "-for", "100ms") // creates the counter
		calls[where+"_page"] = get(s, "/p/counter")
		calls[where+"_counter"] = get(s, "/api/v1/counters/views:1")
	}

	return inRounds(3, calls)
}

// serveGin is the process of bareGin.
func serveGin(args []string) error {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	var value atomic.Int64

	e.POST("/api/v1/counters/:key/increment", func(c *gin.Context) {
		// It parses and answers like a real increment, because the floor is what HTTP and JSON cost.
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
		}{
			c.Param("key"), "sum", value.Add(body.Delta), time.Now().UTC().Truncate(time.Second),
			"1700000000000-42", true,
		})
	})

	// As long as a real answer.
	answer := []byte(`{"page":"p","count":12,"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-42"` +
		strings.Repeat(" ", 113) + "}\n")
	e.GET("/read", func(c *gin.Context) { c.Data(http.StatusOK, "application/json", answer) })

	return http.ListenAndServe(args[0], e)
}

// topOfMany increments a million keys, and then measures queries for those that have grown most.
func topOfMany(t *trial, flags ...string) figures {
	s := t.serveCounters(flags...)
	// In batches, because these increments are not measured.
	t.calls(s, "-keys", "views:#", "-batch", "1000", "-callers", "4")
	return t.calls(s, "-path", "/api/v1/top?match=views:*&last=1h&n=10", "-callers", "1")
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

	return t.calls(t.serveCounters("--counters", rules), "-many", "200",
		"-path", "/api/v1/counters/sales:1/increment", "-body", `{"delta":1,"dimensions":{"country":"c#"}}`)
}

// inFile returns a measurement of changes of counters in a data directory, and of what one fsync costs there.
func inFile(client ...string) func(*trial) figures {
	return func(t *trial) figures {
		dir := t.Folder(".") // /tmp may be memory
		floor, err := syncs(filepath.Join(dir, "floor"))
		if err != nil {
			t.Fatal(err)
		}

		f := t.calls(t.serveCounters("--data-dir", filepath.Join(dir, "data")), client...)
		f["fsyncs_per_s"] = floor
		f["times"] = f["changes_per_s"] / floor
		return f
	}
}

// syncs returns how many times a second a page of a file can be written and then synced.
func syncs(name string) (float64, error) {
	f, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()

	// bbolt writes pages of 4 KiB, and each of its transactions syncs the file.
	page := make([]byte, 4096)
	began := time.Now()
	n := 0
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

// inPostgres measures changes of one exact counter in PostgreSQL and, as its floor, plain updates of one row. Both have
// the same number of clients.
func inPostgres(t *trial) figures {
	postgres := pgtest.Start(t, "fsync=on", "shared_buffers=256MB")
	floor, err := updates(t.Context(), postgres.Database(t))
	if err != nil {
		t.Fatal(err)
	}

	f := t.calls(t.serveCounters("--postgres", postgres.Database(t)), "-keys", "stock:1")
	f["updates_per_s"] = floor
	f["times"] = f["changes_per_s"] / floor

	return f
}

// updates returns how many times a second callers can update one row of a new table.
func updates(ctx context.Context, url string) (float64, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return 0, err
	}

	// One connection for each caller, so that no caller waits for another one's.
	cfg.MaxConns = callers
	cfg.MinConns = callers
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return 0, err
	}

	defer pool.Close()
	_, err = pool.Exec(ctx, "create table plain (key text primary key, value bigint not null) with (fillfactor = 50); "+
		"insert into plain values ('k', 0)")
	if err != nil {
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

	// If nobody has failed, the receive from the closed channel returns nil.
	close(errs)
	return float64(n.Load()) / time.Since(began).Seconds(), <-errs
}

// inRedis measures changes of one counter at several steady rates, of which the highest is more than a core can do, and
// how many scripts Redis runs for them.
func inRedis(t *trial) figures {
	redis := redistest.Start(t)
	s := t.serveCounters("--redis", redis.URL())
	time.Sleep(4 * time.Second) // until the new server owns its partitions

	// Scripts that the server runs without calls, such as the renewal of its lease, do not count.
	atStart := scripts(t, redis)
	began := time.Now()
	time.Sleep(callTime / 2)
	idlePerSecond := (scripts(t, redis) - atStart) / time.Since(began).Seconds()

	f := figures{}
	for _, load := range []struct {
		prefix string
		client []string
	}{
		// The lightest first, because a queue that one leaves behind would slow the next.
		{"5000_", []string{"-rate", "5000"}},
		{"10000_", []string{"-rate", "10000"}},
		{"batches_", []string{"-rate", "200", "-batch", "100"}},
		{"", []string{"-rate", "20000"}},
	} {
		before := scripts(t, redis)
		began := time.Now()

		got := t.calls(s, append(load.client, "-callers", "500")...)
		got["scripts_per_s"] = (scripts(t, redis)-before)/time.Since(began).Seconds() - idlePerSecond
		got["core_percent"] = got["calls_per_s"] * got["cpu_us_per_call"] / 1e4

		for name, v := range got {
			f[load.prefix+name] = v
		}
	}

	return f
}

// persisted measures how many rows the PostgreSQL behind a Redis writes for changes of some counters at a steady rate.
func persisted(t *trial) figures {
	const keys, rate = 200, 4000
	database := pgtest.Start(t).Database(t)

	// Count UPDATEs only: the INSERT that creates a row happens once.
	const updates = "select coalesce(sum(n_tup_upd), 0)::bigint from pg_stat_user_tables " +
		"where relname = 'headcount_counters'"
	rows := func() float64 {
		time.Sleep(2 * time.Second) // for the last drain, and because PostgreSQL's statistics are a second late
		return float64(pgtest.Query[int64](t, database, updates))
	}

	s := t.serveCounters("--redis", redistest.Start(t).URL(), "--postgres", database)
	client := []string{
		"-keys", "votes:#", "-many", strconv.Itoa(keys), "-rate", strconv.Itoa(rate), "-callers", "100",
	}
	t.calls(s, client...) // creates the counters

	before := rows()
	f := t.calls(s, client...)

	f["rows"] = rows() - before
	f["changes"] = f["changes_per_s"] * callTime.Seconds()
	f["each"] = f["rows"] / keys / callTime.Seconds() // --persist-interval is 1s

	return f
}

// membersInRedis measures what a member of a set takes in Redis.
func membersInRedis(t *trial) figures {
	redis := redistest.Start(t)
	s := t.serveCounters("--redis", redis.URL())

	before := memory(t, redis)
	t.calls(s, "-members", strconv.Itoa(manyKeys))
	return figures{"bytes_each": (memory(t, redis) - before) / manyKeys}
}

// scripts returns how many scripts Redis has run. Every change is one script.
func scripts(t *trial, s *redistest.Server) float64 {
	return info(t, s, "commandstats", "cmdstat_evalsha", "calls=%g")
}

func memory(t *trial, s *redistest.Server) float64 { return info(t, s, "memory", "used_memory", "%g") }

func info(t *trial, s *redistest.Server, section, field, format string) (n float64) {
	text, _ := s.Do(t, "INFO", section).(string)
	if _, err := fmt.Sscanf(redisconn.InfoField(text, field), format, &n); err != nil {
		t.Fatal(err)
	}

	return n
}

// A caller has clients, each of which makes one call after the other and waits for the answers.
type caller struct {
	url  string // of the server
	pid  int    // its process
	keys string // the key; a # in keys, path and body is replaced by a random number
	many int    // that number is less than this

	// At most one of these is set. Without them a call increments one counter.
	batch   int    // how many changes a call makes
	members int    // how many members to add to one set, by 1,000 in each call, until all are in it
	path    string // what to GET or, if there is a body, where to POST it
	body    string

	rate    float64 // calls a second of all clients; 0: as many as possible
	clients int
	lasts   time.Duration

	began time.Time
	begun atomic.Int64 // calls, if they have a rate
	left  atomic.Int64 // members that are not in the set yet
}

// calls is the process of the clients.
func calls(args []string) error {
	r := &caller{}
	f := flag.NewFlagSet("calls", flag.ContinueOnError)
	f.StringVar(&r.url, "url", "", "")
	f.IntVar(&r.pid, "pid", 0, "")
	f.StringVar(&r.keys, "keys", "views:1", "")
	f.IntVar(&r.many, "many", manyKeys, "")
	f.IntVar(&r.batch, "batch", 0, "")
	f.IntVar(&r.members, "members", 0, "")
	f.StringVar(&r.path, "path", "", "")
	f.StringVar(&r.body, "body", "", "")
	f.Float64Var(&r.rate, "rate", 0, "")
	f.IntVar(&r.clients, "callers", callers, "")
	f.DurationVar(&r.lasts, "for", callTime, "")

	if err := f.Parse(args); err != nil {
		return err
	}
	return r.run()
}

func (r *caller) run() error {
	u, err := url.Parse(r.url)
	if err != nil {
		return err
	}

	conns := make([]net.Conn, r.clients)
	for i := range conns { // before the calls, because connecting is not measured
		conns[i], err = dial(u.Host)
		if err != nil {
			return err
		}
		defer conns[i].Close()
	}

	took := make([][]time.Duration, r.clients)
	errs := make([]error, r.clients)
	r.left.Store(int64(r.members))
	cpu := cpuTime(r.pid)
	r.began = time.Now()

	var group sync.WaitGroup
	for i, c := range conns {
		group.Go(func() { took[i], errs[i] = r.client(c) })
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}

	seconds := time.Since(r.began).Seconds()
	// /proc counts in ticks, so a shorter time may be 0 there.
	used := max(cpuTime(r.pid)-cpu, tick)
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	n := float64(len(all))
	changes := n * float64(max(r.batch, 1))

	return report(figures{
		"calls":             n,
		"calls_per_s":       n / seconds,
		"changes_per_s":     changes / seconds,
		"cpu_us_per_call":   used / n * 1e6,
		"changes_per_cpu_s": changes / used,
		"p50_ms":            all[len(all)/2].Seconds() * 1e3,
		"p99_ms":            all[len(all)*99/100].Seconds() * 1e3,
	})
}

// client calls over one connection until the time is over, or all members are in the set.
func (r *caller) client(c net.Conn) (took []time.Duration, err error) {
	in := bufio.NewReaderSize(c, 64<<10)

	for {
		due := time.Now()
		if r.rate > 0 { // a late call is measured from when it was due
			due = r.began.Add(time.Duration(float64(r.begun.Add(1)) / r.rate * float64(time.Second)))
			time.Sleep(time.Until(due))
		}

		// Each client takes the next thousand, so that no member is sent twice.
		from := r.left.Add(-1000)
		allAdded := r.members > 0 && from < 0
		timeOver := r.members == 0 && time.Since(r.began) > r.lasts
		if allAdded || timeOver {
			return took, nil
		}

		method, path, body := r.call(from)
		if err := send(c, in, method, path, body); err != nil {
			return nil, err
		}

		took = append(took, time.Since(due))
	}
}

// one replaces the # of a pattern by a random number.
func (r *caller) one(pattern string) string {
	return strings.Replace(pattern, "#", strconv.Itoa(rand.IntN(r.many)), 1)
}

// call returns the next call. from is the number of the first member to add.
func (r *caller) call(from int64) (method, path string, body []byte) {
	const counters = "/api/v1/counters"

	switch {
	case r.path != "":
		if r.body == "" {
			return http.MethodGet, r.one(r.path), nil
		}
		return http.MethodPost, r.one(r.path), []byte(r.one(r.body))
	case r.members > 0:
		add := make([]string, 1000)
		for i := range add {
			add[i] = fmt.Sprintf(`"user%d"`, from+int64(i))
		}
		return http.MethodPost, counters + "/likes:1/members", fmt.Appendf(nil, `{"add":[%s]}`, strings.Join(add, ","))
	case r.batch > 0:
		changes := make([]string, r.batch)
		for i := range changes {
			changes[i] = fmt.Sprintf(`{"key":%q,"delta":1}`, r.one(r.keys))
		}
		return http.MethodPost, counters, fmt.Appendf(nil, `{"changes":[%s]}`, strings.Join(changes, ","))
	default:
		return http.MethodPost, counters + "/" + r.one(r.keys) + "/increment", []byte(`{"delta":1}`)
	}
}

// send makes a call and reads its answer. It does not use net/http's client, which costs more, because all clients
// share a core.
func send(c net.Conn, in *bufio.Reader, method, path string, body []byte) error {
	request := fmt.Appendf(nil, "%s %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"+
		"X-API-Key: %s\r\nContent-Length: %d\r\n\r\n%s", method, path, c.RemoteAddr(), apiKey, len(body), body)
	if _, err := c.Write(request); err != nil {
		return err
	}

	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		return err
	}

	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, text)
	}

	return err
}
