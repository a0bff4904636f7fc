package rowsredis_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

// partition is used by most tests, and key is how its keys begin.
const partition = 7

var key = "hc:{" + redisconn.EvenTags("r", rows.Partitions)[partition] + "}:"

// owner has claimed a partition, and makes one commit after another.
type owner struct {
	t     testing.TB
	store rows.Store
	rows.Claim
}

func own(t testing.TB, store rows.Store, former uint64) *owner {
	t.Helper()
	claims, err := store.Claim(t.Context(), "a", []rows.Former{{Partition: partition, Epoch: former}})
	if err != nil {
		t.Fatal(err)
	}

	return &owner{t: t, store: store, Claim: claims[0]}
}

// next returns a commit that follows the newest one. Its rows are written as field=value.
func (o *owner) next(fields ...string) rows.Commit {
	c := rows.Commit{Partition: partition, Epoch: o.Epoch, After: o.Number, Number: o.Number + 1, At: time.Now()}
	for _, text := range fields {
		field, value, _ := strings.Cut(text, "=")
		c.Rows = append(c.Rows, rows.Row{Name: rows.Name{Collection: "c", Field: field}, Value: []byte(value)})
	}

	return c
}

// commit makes a commit.
func (o *owner) commit(c rows.Commit) error {
	err := o.store.Commit(o.t.Context(), []rows.Commit{c})[0]
	if err == nil {
		o.Number = c.Number
	}

	return err
}

func (o *owner) must(err error) {
	o.t.Helper()
	if err != nil {
		o.t.Fatal(err)
	}
}

// insist repeats a commit until its outcome is known. Any goroutine may call it.
func (o *owner) insist(c rows.Commit) (repeated int) {
	err := o.commit(c)
	for errors.Is(err, rows.ErrUnavailable) {
		repeated++
		time.Sleep(time.Millisecond)
		err = o.commit(c)
	}
	if err != nil {
		o.t.Error(err)
	}

	return repeated
}

// want requires that the partition has exactly these rows, written as field=value.
func want(t testing.TB, store rows.Store, fields ...string) {
	t.Helper()
	var got []string
	err := store.Scan(t.Context(), partition, "c", "", func(field string, value []byte) error {
		got = append(got, field+"="+string(value))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, fields) {
		t.Errorf("got rows %q, want %q", got, fields)
	}
}

// TestServerForgetsScripts: scripts that Redis has forgotten are loaded again.
func TestServerForgetsScripts(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, server.URL())

	o := own(t, s, 0)
	server.Do(t, "SCRIPT", "FLUSH")
	o.must(o.commit(o.next("x=1")))
	server.Do(t, "SCRIPT", "FLUSH")
	own(t, s, o.Epoch)

	want(t, s, "x=1")
}

// TestServerTakesLargeCommits: a commit may have more rows and IDs than Lua can pass to one command.
func TestServerTakesLargeCommits(t *testing.T) {
	const n = 4100
	s := open(t, redistest.Single(t).URL())
	o := own(t, s, 0)

	var puts []string
	var ids []rows.ID
	for i := range n {
		puts = append(puts, fmt.Sprintf("%04d=%d", i, i))
		ids = append(ids, rows.ID{Bytes: [16]byte{byte(i), byte(i >> 8)}, Until: time.Now().Add(time.Hour)})
	}

	c := o.next(puts...)
	c.IDs = ids
	o.must(o.commit(c))
	want(t, s, puts...)

	again := o.next()
	again.IDs = ids[:n/2]
	again.Asked = ids[n/2:]
	var known *rows.Known
	if err := o.commit(again); !errors.As(err, &known) || !slices.EqualFunc(known.IDs, ids, sameID) {
		t.Errorf("got %v, want that all %d IDs are known", err, n)
	}

	c = o.next(puts...)
	for i := range c.Rows {
		c.Rows[i].Value = nil
	}
	o.must(o.commit(c))
	want(t, s)
}

func sameID(a, b rows.ID) bool { return a.Bytes == b.Bytes }

// TestServerIsFull: a full Redis refuses commits with ErrFull, also more of them than the connection lets through to a
// server that refuses.
func TestServerIsFull(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, server.URL())
	o := own(t, s, 0)
	o.must(o.commit(o.next("x=1", "y=1")))

	server.Do(t, "CONFIG", "SET", "maxmemory", "1")
	full := o.next("x=2")
	full.IDs = []rows.ID{{Bytes: [16]byte{1}, Until: time.Now().Add(time.Hour)}}
	for range 8 {
		err := o.commit(full)
		if !errors.Is(err, rows.ErrFull) || errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("got %v, want that the store is full", err)
		}
	}

	server.Do(t, "CONFIG", "SET", "maxmemory", "0")
	want(t, open(t, server.URL()), "x=1", "y=1")
	testkit.Eventually(t, "the commit is made", func() bool { return o.commit(full) == nil })
	want(t, s, "x=2", "y=1")
}

// TestServerLosesCommits: a replica becomes the master without the newest commit, and then a server is empty. Both
// losses are noticed.
func TestServerLosesCommits(t *testing.T) {
	master := redistest.Start(t, "--repl-diskless-sync-delay", "0")
	host, port, _ := strings.Cut(master.Addr, ":")
	replica := redistest.Start(t, "--replicaof", host+" "+port)
	before := own(t, open(t, master.URL()), 0)
	before.must(before.commit(before.next("x=1")))

	after := *before
	after.store = open(t, replica.URL())
	x := []rows.Address{{Partition: partition, Name: rows.Name{Collection: "c", Field: "x"}}}
	testkit.Eventually(t, "the replica has the commit", func() bool {
		return string(after.store.Read(t.Context(), x)[0].Value) == "1"
	})
	if err := after.commit(after.next("x=0")); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("a commit at a replica returns %v, want ErrUnavailable", err)
	}

	// For a while the replica is not connected to the master, which goes on.
	replica.Do(t, "REPLICAOF", "NO", "ONE")
	before.must(before.commit(before.next("x=2")))
	after.Number = before.Number

	err := error(rows.ErrUnavailable)
	for errors.Is(err, rows.ErrUnavailable) { // for a moment the connection lets nothing through
		err = after.commit(after.next("x=3"))
	}
	var lost *rows.Lost
	if !errors.As(err, &lost) || lost.Number != 1 {
		t.Errorf("after the failover: got %v, want that 1 is the newest commit", err)
	}

	healed := own(t, after.store, after.Epoch)
	healed.must(healed.commit(healed.next("x=2")))

	replica.Flush(t)
	var fenced *rows.Fenced
	if err := healed.commit(healed.next("x=3")); !errors.As(err, &fenced) || fenced.Epoch != 0 {
		t.Errorf("an empty server: got %v, want fenced by epoch 0", err)
	}

	again := own(t, after.store, healed.Epoch)
	if again.Epoch <= healed.Epoch || again.Number != 0 {
		t.Errorf("claimed in an empty server: %+v after %+v", again.Claim, healed.Claim)
	}
}

// TestServerAnswersAreLost: connections are cut after the server got a commit. The repeated commit is made once, and
// its IDs expire.
func TestServerAnswersAreLost(t *testing.T) {
	const commits, lost = 30, 4
	server := redistest.Single(t)
	url, cuts := server.Cut(t, lost)
	o := own(t, open(t, url), 0)

	repeated := 0
	var all []string
	for i := range commits {
		text := fmt.Sprintf("%02d=1", i)
		c := o.next(text)
		c.IDs = []rows.ID{{Bytes: [16]byte{byte(i)}, Until: time.Now().Add(time.Hour)}}
		repeated += o.insist(c)
		all = append(all, text)
	}

	if cuts.Left() > 0 || repeated < lost {
		t.Errorf("%d commits were repeated, and %d connections were not cut", repeated, cuts.Left())
	}

	want(t, o.store, all...)
	for i := range commits {
		id := [16]byte{byte(i)}
		left := server.Do(t, "PTTL", key+"i:"+string(id[:])).(int64)
		if left <= 0 || left > time.Hour.Milliseconds() {
			t.Errorf("ID %d is forgotten in %d ms, want within the hour", i, left)
		}
	}
}

// TestServerHasForeignData: another program has written values in the place of rows. While they exist a commit is
// refused; afterwards it is made, with its IDs.
func TestServerHasForeignData(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, server.URL())
	other := rows.Row{Name: rows.Name{Collection: "d", Field: "x"}, Value: []byte("1")}
	id := rows.ID{Bytes: [16]byte{1}, Until: time.Now().Add(time.Hour)}
	idKey := key + "i:" + string(id.Bytes[:])

	for name, tc := range map[string]struct{ spoil, mend []any }{
		"a collection": {[]any{"SET", key + "r:d", "x"}, []any{"DEL", key + "r:d"}},
		"the epoch":    {[]any{"HSET", key + "o", "epoch", "x"}, nil},
		"the number":   {[]any{"HSET", key + "o", "number", "x"}, []any{"HSET", key + "o", "number", "0"}},
		"the owner":    {[]any{"SET", key + "o", "x"}, nil},
		"an ID":        {[]any{"SET", idKey, "x"}, []any{"DEL", idKey}},
	} {
		t.Log(name)
		server.Flush(t)
		o := own(t, s, 0)
		c := o.next("x=1")
		c.Rows = append(c.Rows, other)
		c.IDs = []rows.ID{id}

		server.Do(t, tc.spoil...)
		for range 2 {
			err := o.commit(c)
			if !errors.Is(err, rows.ErrUnavailable) || !errors.Is(err, rows.ErrMalformed) {
				t.Errorf("%s: got %v, want that something is malformed", name, err)
			}
		}

		// A claim needs the value of the owner key as well.
		if tc.mend == nil {
			_, err := s.Claim(t.Context(), "a", []rows.Former{{Partition: partition}})
			if !errors.Is(err, rows.ErrMalformed) {
				t.Errorf("%s: claim: got %v, want that something is malformed", name, err)
			}
			continue
		}

		server.Do(t, tc.mend...)
		o.must(o.commit(c))
		want(t, s, "x=1")
	}
}

// events are what a watch received.
type events struct {
	mu  sync.Mutex
	all []string
}

func watch(t testing.TB, store rows.Store) *events {
	e := &events{}
	var wg sync.WaitGroup
	wg.Go(func() {
		err := store.Watch(t.Context(), func(partition int, number uint64, publication []byte) {
			e.add(fmt.Sprint(partition, " ", number, " ", string(publication)))
		}, func() { e.add("missed") })
		if err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(wg.Wait)

	e.await(t, "missed")

	return e
}

func (e *events) add(one string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	e.all = append(e.all, one)
}

// await requires that exactly these events have come since the last call, in this order.
func (e *events) await(t testing.TB, want ...string) {
	t.Helper()
	if got := e.awaitAny(t, len(want)); !slices.Equal(got, want) {
		t.Errorf("a watch got %q, want %q", got, want)
	}
}

// awaitAny waits for n events since the last call, and returns them.
func (e *events) awaitAny(t testing.TB, n int) []string {
	t.Helper()
	testkit.Eventually(t, fmt.Sprint(n, " events"), func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.all) >= n
	})

	e.mu.Lock()
	defer e.mu.Unlock()
	got := e.all
	e.all = nil

	return got
}

// TestServerWatchesNoticeGaps: a watch that has missed publications reports that.
func TestServerWatchesNoticeGaps(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, server.URL())
	o := own(t, s, 0)
	heard := watch(t, s)
	publish := func(text string) {
		t.Helper()
		c := o.next()
		c.Publication = []byte(text)
		o.must(o.commit(c))
	}

	publish("one two")
	o.must(o.commit(o.next())) // a commit without a publication leaves no gap
	publish("")
	heard.await(t, "7 1 one two", "7 3 ")

	server.Do(t, "PUBLISH", key+"n/0", "9 8 x")
	heard.await(t, "missed", "7 9 x")
	server.Do(t, "PUBLISH", key+"n/0", "x")
	heard.await(t, "missed")

	server.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
	heard.await(t, "missed")
	publish("again")
	heard.await(t, "7 4 again")
}
