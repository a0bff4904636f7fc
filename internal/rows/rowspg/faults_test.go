package rowspg

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"headcount/internal/pgtest"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

// writer is the owner of a partition.
type writer struct {
	t     testing.TB
	store *Store
	claim rows.Claim
}

const partition = 7

func newWriter(t testing.TB, store *Store, name string) *writer {
	t.Helper()
	claims, err := store.Claim(t.Context(), name, []rows.Former{{Partition: partition}})
	if err != nil {
		t.Fatal(err)
	}

	return &writer{t: t, store: store, claim: claims[0]}
}

// next returns a commit that follows the newest one, writes a row and publishes its value.
func (w *writer) next(value string) rows.Commit {
	return rows.Commit{
		Partition: partition, Epoch: w.claim.Epoch, After: w.claim.Number, Number: w.claim.Number + 1, At: time.Now(),
		Rows:        []rows.Row{{Name: rows.Name{Collection: "c", Field: "x"}, Value: []byte(value)}},
		Publication: []byte(value),
	}
}

func (w *writer) commit(c rows.Commit) error {
	err := w.store.Commit(w.t.Context(), []rows.Commit{c})[0]
	if err == nil {
		w.claim.Number = c.Number
	}

	return err
}

func (w *writer) must(c rows.Commit) {
	w.t.Helper()
	if err := w.commit(c); err != nil {
		w.t.Fatal(err)
	}
}

// want requires that the row has the value.
func (w *writer) want(value string) {
	w.t.Helper()
	at := rows.Address{Partition: partition, Name: rows.Name{Collection: "c", Field: "x"}}
	found := w.store.Read(w.t.Context(), []rows.Address{at})[0]
	if found.Err != nil || string(found.Value) != value {
		w.t.Errorf("the row is %q, %v; want %q", found.Value, found.Err, value)
	}
}

// listen returns a function that returns what a watch has received so far: publications, and a "-" each time that some
// were missed.
func listen(t testing.TB, s *Store) (heard func() string) {
	var mu sync.Mutex
	var all strings.Builder
	note := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		all.WriteString(what)
	}

	ctx, stop := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		_ = s.Watch(ctx, func(_ int, _ uint64, p []byte) { note(string(p)) }, func() { note("-") })
	})
	t.Cleanup(func() {
		stop()
		watching.Wait()
	})

	heard = func() string {
		mu.Lock()
		defer mu.Unlock()
		return all.String()
	}
	testkit.Eventually(t, "the watch begins", func() bool { return heard() != "" })

	return heard
}

// hangUp ends all connections to the database, whatever they are doing.
func hangUp(t testing.TB, server *pgtest.Server, url string) {
	t.Helper()
	name := pgtest.Query[string](t, url, "select current_database()")
	const end = "select pg_terminate_backend(pid) from pg_stat_activity where datname = '%s'"
	server.Exec(t, server.URL("postgres"), fmt.Sprintf(end, name))
}

const readNumber = "select number from headcount_partitions where partition = 7"

// TestServerConnectionIsLostDuringCommit: a commit or its answer is lost, so its outcome is unknown. A repetition makes
// it exactly once.
func TestServerConnectionIsLostDuringCommit(t *testing.T) {
	server := pgtest.Single(t)
	for name, loseCommit := range map[string]bool{"the answer": false, "the commit": true} {
		t.Run(name, func(t *testing.T) {
			url := server.Database(t)
			proxy := newProxy(t, server.Addr)

			var armed atomic.Bool
			s := open(t, strings.Replace(url, server.Addr, proxy.addr(), 1), func(c *Config) {
				// This function is called between the two round trips of a commit.
				c.Readable = func(*rows.Commit, func(string, ...any)) {
					if armed.Swap(false) {
						proxy.silence(loseCommit)
					}
				}
			})

			heard := listen(t, s)
			w := newWriter(t, s, "a")
			w.must(w.next("1")) // this also prepares the statements

			armed.Store(true)
			c := w.next("2")
			gone := func() bool { return pgtest.Query[int](t, url, readNumber) == 2 }
			if loseCommit {
				gone = func() bool { return proxy.lost.Load() > 0 }
			}
			loseAnswer(t, w, c, proxy, gone)

			w.must(c)
			w.must(w.next("3"))
			w.want("3")
			if got := heard(); !strings.HasSuffix(got, "123") {
				t.Errorf("the watch received %q, want each publication once", got)
			}
		})
	}
}

// loseAnswer makes a commit and ends its connection as soon as gone returns true, so that there is no answer.
func loseAnswer(t *testing.T, w *writer, c rows.Commit, proxy *proxy, gone func() bool) {
	t.Helper()
	var lost sync.WaitGroup
	lost.Go(func() {
		if err := w.store.Commit(t.Context(), []rows.Commit{c})[0]; !errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("without an answer the commit returns %v, want ErrUnavailable", err)
		}
	})

	testkit.Eventually(t, "the commit is sent", gone)
	proxy.hangUp()
	lost.Wait()
}

// TestServerConnectionIsLostDuringScan: after a lost connection no row comes twice, and none is missing without an
// error.
func TestServerConnectionIsLostDuringScan(t *testing.T) {
	server := pgtest.Single(t)
	proxy := newProxy(t, server.Addr)
	s := open(t, strings.Replace(server.Database(t), server.Addr, proxy.addr(), 1))

	w := newWriter(t, s, "a")
	const n = 500
	c := w.next("")
	c.Rows = nil
	for i := range n {
		name := rows.Name{Collection: "c", Field: fmt.Sprintf("%04d", i)}
		c.Rows = append(c.Rows, rows.Row{Name: name, Value: make([]byte, 1000)})
	}

	w.must(c)

	var fields []string
	scan := func() error {
		fields = nil
		return s.Scan(t.Context(), partition, "c", "", func(field string, _ []byte) error {
			fields = append(fields, field)
			return nil
		})
	}

	if err := scan(); err != nil || len(fields) != n { // this also prepares the statement
		t.Fatalf("%d rows, %v", len(fields), err)
	}

	proxy.hangUpAfter(n * 1000 / 2)
	if err := scan(); err == nil && len(fields) != n {
		t.Errorf("a scan without an error had %d rows of %d", len(fields), n)
	}

	testkit.Eventually(t, "rows can be read again", func() bool { return scan() == nil })
	if len(fields) != n {
		t.Errorf("the scan had %d rows, want %d", len(fields), n)
	}
}

// TestServerBackendIsTerminated: a connection that ended before a commit is replaced, and the commit is made. A
// connection that ends in the middle of a commit leaves nothing of it.
func TestServerBackendIsTerminated(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)

	var armed atomic.Bool
	s := open(t, url, func(c *Config) {
		c.Readable = func(*rows.Commit, func(string, ...any)) {
			if armed.Swap(false) {
				hangUp(t, server, url)
			}
		}
	})
	w := newWriter(t, s, "a")
	w.must(w.next("1"))

	hangUp(t, server, url)
	w.must(w.next("2"))

	armed.Store(true)
	c := w.next("3")
	if err := w.commit(c); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("a commit whose backend ended returns %v, want ErrUnavailable", err)
	}
	w.want("2")
	w.must(c)
	w.want("3")
}

// TestServerRefusesChanges: PostgreSQL answers, and accepts no changes. Commits get the right error, and succeed after
// the repair.
func TestServerRefusesChanges(t *testing.T) {
	const full = `create function full_disk() returns trigger language plpgsql as $$
		begin raise exception 'no space left on device' using errcode = '53100'; end $$;
		create trigger full_disk before insert on headcount_rows for each statement execute function full_disk()`
	const readOnly = "alter database %s set default_transaction_read_only = "

	for name, tc := range map[string]refusal{
		"it is read-only":  {readOnly + "on", readOnly + "off", rows.ErrUnavailable},
		"its disk is full": {full, "drop trigger full_disk on headcount_rows", rows.ErrFull},
	} {
		t.Run(name, tc.run)
	}
}

type refusal struct {
	cut, mend string // statements with %s for the database
	want      error
}

func (r refusal) run(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	database := pgtest.Query[string](t, url, "select current_database()")
	exec := func(sql string) {
		t.Helper()
		server.Exec(t, url, "set default_transaction_read_only = off")
		server.Exec(t, url, strings.ReplaceAll(sql, "%s", database))
		hangUp(t, server, url)
	}

	var up atomic.Bool
	s := open(t, url, func(c *Config) { c.OnState = up.Store })
	w := newWriter(t, s, "a")
	w.must(w.next("1"))
	testkit.Eventually(t, "it is up", up.Load)

	// Rows can be read meanwhile, so the failures are not consecutive.
	exec(r.cut)
	c := w.next("2")
	read := func() { _ = s.Scan(t.Context(), partition, "c", "", func(string, []byte) error { return nil }) }
	read()
	if err := w.commit(c); !errors.Is(err, r.want) {
		t.Errorf("got %v, want %v", err, r.want)
	}
	read()

	testkit.Eventually(t, "it is away", func() bool {
		if w.commit(c) == nil {
			t.Fatal("a commit succeeded, though PostgreSQL refuses changes")
		}
		read()
		return !up.Load()
	})

	exec(r.mend)
	testkit.Eventually(t, "it takes commits", func() bool { return w.commit(c) == nil })
	w.want("2")
	testkit.Eventually(t, "it is up again", func() bool {
		w.want("2")
		return up.Load()
	})
}

// TestServerSecondProcess: a process claims the partition of another one. That one is fenced, and misses publications.
func TestServerSecondProcess(t *testing.T) {
	url := pgtest.Single(t).Database(t)

	soon := func(c *Config) { c.PollEvery = 10 * time.Millisecond }
	first, second := open(t, url, soon), open(t, url, soon)
	heardByFirst, heardBySecond := listen(t, first), listen(t, second)

	a := newWriter(t, first, "a")
	a.must(a.next("1"))
	b := newWriter(t, second, "b")

	var fenced *rows.Fenced
	if err := a.commit(a.next("2")); !errors.As(err, &fenced) || fenced.Epoch != b.claim.Epoch {
		t.Errorf("got %v, want fenced by epoch %d", err, b.claim.Epoch)
	}
	former := []rows.Former{{Partition: partition, Epoch: a.claim.Epoch}}
	if claims, err := first.Claim(t.Context(), "a", former); err != nil || claims[0].Epoch != 0 {
		t.Errorf("the fenced process claims again: %+v, %v; want no claim", claims, err)
	}

	for _, value := range []string{"3", "4"} {
		missed := strings.Count(heardByFirst(), "-")
		b.must(b.next(value))
		testkit.Eventually(t, "the first one misses "+value, func() bool {
			return strings.Count(heardByFirst(), "-") > missed
		})
	}
	a.want("4")
	if got := strings.ReplaceAll(heardByFirst(), "-", ""); got != "1" {
		t.Errorf("the first process received %q, want only its own publication", got)
	}
	if got := heardBySecond(); !strings.HasSuffix(got, "34") {
		t.Errorf("the second process received %q, want 34 at the end", got)
	}
}

// TestServerReadableTables: readable tables are written with the commits that are made, and not with others.
func TestServerReadableTables(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, func(c *Config) {
		c.Readable = func(c *rows.Commit, queue func(string, ...any)) {
			queue("insert into readable values ($1, $2)", int64(c.Number), string(c.Rows[0].Value))
		}
	})

	w := newWriter(t, s, "a")
	if err := w.commit(w.next("1")); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("a commit without its table returns %v, want ErrUnavailable", err)
	}
	w.want("")

	server.Exec(t, url, "create table readable (number bigint primary key, value text)")
	c := w.next("1")
	testkit.Eventually(t, "commits are made", func() bool { return w.commit(c) == nil })

	// One call has a repetition, a late commit, and a commit that is made.
	late := rows.Commit{Partition: partition + 1, Epoch: 1, Number: 9, Rows: c.Rows}
	claims, err := s.Claim(t.Context(), "a", []rows.Former{{Partition: partition + 2}})
	if err != nil {
		t.Fatal(err)
	}
	other := rows.Commit{Partition: partition + 2, Epoch: claims[0].Epoch, Number: 2, Rows: c.Rows}
	errs := s.Commit(t.Context(), []rows.Commit{c, late, other})
	if errs[0] != nil || !errors.As(errs[1], new(*rows.Fenced)) || errs[2] != nil {
		t.Errorf("got %v, want the late commit alone fenced", errs)
	}

	const all = "select string_agg(number || '=' || value, ' ' order by number) from readable"
	if got := pgtest.Query[string](t, url, all); got != "1=1 2=1" {
		t.Errorf("the table has %q, want 1=1 2=1", got)
	}
}

// TestServerIDsAreForgotten: more IDs than one transaction takes are forgotten. Those that a process with a slow clock
// may still ask for are kept.
func TestServerIDsAreForgotten(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	open(t, url).Close()

	const insert = `insert into headcount_row_ids (partition, id, until)
		select 7, gen_random_uuid(), now() - interval '%d minutes' from generate_series(1, %d)`
	server.Exec(t, url, fmt.Sprintf(insert, 90, 2*sweepAtOnce+10))
	server.Exec(t, url, fmt.Sprintf(insert, 30, 5))

	open(t, url, func(c *Config) { c.SweepEvery = 10 * time.Millisecond })
	testkit.Eventually(t, "all old ones are forgotten", func() bool {
		return pgtest.Query[int](t, url, "select count(*) from headcount_row_ids") == 5
	})
}

// proxy passes connections on to a server until it is silenced.
type proxy struct {
	listener net.Listener
	to       string
	lost     atomic.Int64 // bytes that did not reach the server
	room     atomic.Int64 // how many more bytes pass; 0: any number

	mu         sync.Mutex // guards the fields below
	toServer   bool
	fromServer bool
	open       []net.Conn
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	p := &proxy{listener: listener, to: to, toServer: true, fromServer: true}
	var all sync.WaitGroup
	all.Go(func() { p.serve(&all) })
	t.Cleanup(func() {
		_ = listener.Close()
		p.hangUp()
		all.Wait()
	})

	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) serve(all *sync.WaitGroup) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}

		server, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = client.Close()
			continue
		}

		p.mu.Lock()
		p.open = append(p.open, client, server)
		p.mu.Unlock()
		all.Go(func() { p.pass(server, client, &p.toServer) })
		all.Go(func() { p.pass(client, server, &p.fromServer) })
	}
}

// pass copies until one side ends, and drops the bytes that come while passes is false.
func (p *proxy) pass(to, from net.Conn, passes *bool) {
	defer to.Close()
	defer from.Close()

	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}

		p.mu.Lock()
		pass := *passes
		p.mu.Unlock()
		if !pass {
			p.lost.Add(int64(n))
			continue
		}
		if p.room.Load() > 0 && p.room.Add(-int64(n)) <= 0 {
			p.room.Store(0)
			return
		}
		if _, err := to.Write(buf[:n]); err != nil && !errors.Is(err, io.EOF) {
			return
		}
	}
}

// silence drops what the server answers from now on and, if both is set, also what it is asked.
func (p *proxy) silence(both bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.fromServer = false
	p.toServer = !both
}

// hangUpAfter ends the connection that carries the nth byte from now on.
func (p *proxy) hangUpAfter(n int64) { p.room.Store(n) }

// hangUp ends all connections. New ones pass everything on.
func (p *proxy) hangUp() {
	p.mu.Lock()
	defer p.mu.Unlock()

	for _, c := range p.open {
		_ = c.Close()
	}
	p.open = nil
	p.fromServer = true
	p.toServer = true
}

// TestServerChangesAreFoundInParts: however many rows have not changed, each call examines a few of them. Otherwise a
// claim could not find the changes in its time, and no later one would.
func TestServerChangesAreFoundInParts(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, func(c *Config) { c.DurableTier = true })
	server.Exec(t, url, `insert into headcount_rows (partition, collection, field, value, number)
		select 7, 'c', to_char(n, 'FM0000')::bytea, '', 1 from generate_series(1, 2500) n`)
	server.Exec(t, url, `insert into headcount_row_deletions (partition, collection, field, number, at)
		select partition, collection, field, number, now() from headcount_rows`)
	server.Exec(t, url, "update headcount_rows set number = 2 where field in ('1000', '1001', '2500')")

	var found []string
	calls := 0
	for place := (rows.Place{}); !place.End; calls++ {
		some, next, err := s.Changed(t.Context(), partition, 1, place)
		if err != nil {
			t.Fatal(err)
		}

		for _, row := range some {
			found = append(found, row.Field)
		}
		place = next
	}

	if want := []string{"1000", "1001", "2500"}; calls != 6 || !slices.Equal(found, want) {
		t.Errorf("in %d calls %v were found, want %v in 6", calls, found, want)
	}
}

// TestServerChanges: Changed returns what a store in front may have lost, in more than one part.
func TestServerChanges(t *testing.T) {
	server := pgtest.Single(t)
	s := open(t, server.Database(t), func(c *Config) { c.DurableTier = true })
	w := newWriter(t, s, "a")
	row := func(field, value string) rows.Row {
		is := rows.Row{Name: rows.Name{Collection: "c", Field: field}}
		if value != "" {
			is.Value = []byte(value)
		}

		return is
	}

	first := w.next("1")
	first.Rows = []rows.Row{row("stays", "1"), row("changes", "1"), row("goes", "1"), row("comes back", "1")}
	w.must(first)
	second := w.next("1")
	second.Rows = []rows.Row{row("changes", "2"), row("goes", ""), row("comes back", "")}
	for n := range 2 * scanAtOnce {
		second.Rows = append(second.Rows, row(fmt.Sprint("many ", n), "1"))
	}

	w.must(second)
	third := w.next("1")
	third.Rows = []rows.Row{row("comes back", "3")}
	w.must(third)

	changed := func(after uint64) map[string]string {
		t.Helper()
		got := map[string]string{}
		for place := (rows.Place{}); !place.End; {
			some, next, err := s.Changed(t.Context(), partition, after, place)
			if err != nil {
				t.Fatal(err)
			}

			for _, row := range some {
				got[row.Field] = string(row.Value)
			}
			place = next
		}

		return got
	}

	if got := changed(second.Number); !maps.Equal(got, map[string]string{"comes back": "3"}) {
		t.Errorf("since the second commit these rows have changed: %v", got)
	}

	got := changed(first.Number)
	goes, isThere := got["goes"]
	if len(got) != 3+2*scanAtOnce || got["changes"] != "2" || got["comes back"] != "3" || !isThere || goes != "" {
		t.Errorf("since the first commit %d rows have changed, with %v and %v",
			len(got), got["changes"], got["comes back"])
	}

	soon := time.Now().Add(time.Minute)
	used := w.next("2")
	used.IDs = []rows.ID{{Bytes: [16]byte{1}, Until: soon}, {Bytes: [16]byte{2}, Until: time.Now().Add(-time.Minute)}}
	w.must(used)
	asked := []rows.ID{{Bytes: [16]byte{1}}, {Bytes: [16]byte{2}}, {Bytes: [16]byte{3}}}
	known, err := s.Remembered(t.Context(), partition, asked)
	if err != nil || len(known) != 1 || known[0].Bytes != asked[0].Bytes ||
		known[0].Until.Sub(soon).Abs() > time.Second {
		t.Errorf("the store remembers %v, %v", known, err)
	}
}

// many returns a commit that follows the newest one, and writes or deletes so many rows.
func (w *writer) many(n int, value []byte) rows.Commit {
	c := w.next("")
	c.Rows = nil
	for i := range n {
		c.Rows = append(c.Rows, rows.Row{Name: rows.Name{Collection: "c", Field: fmt.Sprint(i)}, Value: value})
	}

	return c
}

// TestServerALargeCommitTakesLonger: a commit of many rows, as after an outage, may take longer than other calls. The
// server is slow here.
func TestServerALargeCommitTakesLonger(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	w := newWriter(t, open(t, url), "a")
	server.Exec(t, url, `create function slowly() returns trigger language plpgsql as
			'begin perform pg_sleep(5.2); return null; end';
		create trigger slowly after insert on headcount_rows for each statement execute function slowly()`)

	w.must(w.many(writtenAtOnce, []byte{1}))
}

// TestManyRowsAreWrittenInParts: each statement of a large commit ends before the timeout of a statement.
func TestManyRowsAreWrittenInParts(t *testing.T) {
	const n = 2*writtenAtOnce + 1
	w := &writer{}
	for name, c := range map[string]rows.Commit{"put": w.many(n, []byte{1}), "deleted": w.many(n, nil)} {
		for i := range n {
			c.IDs = append(c.IDs, rows.ID{Bytes: [16]byte{byte(i), byte(i >> 8), byte(i >> 16)}})
		}
		tx := newTransaction([]rows.Commit{c})
		tx.made = []*rows.Commit{&c}

		b := &pgx.Batch{}
		tx.queueWrites(b, true)
		written := map[string]int{}
		for _, one := range b.QueuedQueries {
			partitions := one.Arguments[0].([]int16)
			written[one.SQL] += len(partitions)
			if len(partitions) > writtenAtOnce {
				t.Errorf("%s: a statement has %d rows, want at most %d", name, len(partitions), writtenAtOnce)
			}
		}
		want := map[string]int{writeNumbers: 1, writeIDs: n, writeRows: n}
		if name == "deleted" {
			want = map[string]int{writeNumbers: 1, writeIDs: n, deleteRows: n, writeDeletions: n}
		}
		if !maps.Equal(written, want) {
			t.Errorf("%s: the statements write %v, want %v", name, written, want)
		}
	}
}
