//go:build upgrade

package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// previous returns the program of the previous release, which these tests run next to this one.
func previous(t *testing.T) string {
	t.Helper()
	path := os.Getenv("HEADCOUNT_PREVIOUS")
	if path == "" {
		t.Fatal("HEADCOUNT_PREVIOUS names no program: run make upgrade, which builds the previous release")
	}

	return path
}

// twice is how much longer a ghost may stay while processes of the previous release run. They keep users who have left
// again after each change of owners, and a replaced process is two changes.
const twice = 4 * time.Second

// replace ends a process as an operator does, and starts the other program in its place.
func replace(t *testing.T, m *member, with string) {
	t.Helper()
	if err := m.leave(); err != nil {
		t.Error(err)
	}

	m.program = with
	again(t, m)
}

// books are changes of counters and of a followed page, and the values that must result. One goroutine at a time uses
// them.
type books struct {
	gateways []*member

	// While processes of two releases run, one of them does not serve counters: only unread counts are changed and
	// checked.
	mixed bool

	changes int

	// The values of the counters: views with corrections and without, entries of their ledger, …
	sum, gained, entries, stock, likes, visitors, unread int64
}

const (
	booksPage   = "followed"
	booksFollow = "/-/users/reader/follows/" + booksPage
	booksUnread = "/-/users/reader/unread"
	booksRoot   = "/api/v1/counters/"
)

// booksFlags are the flags that books need.
var booksFlags = []string{"--api-key=" + counterKey, "--id-secret=" + strings.Repeat("of the upgrade ", 3)}

func newBooks(t *testing.T, gateways ...*member) *books {
	t.Helper()
	b := &books{gateways: gateways}
	b.follow(t)
	return b
}

// follow makes the reader follow the page, with nothing unread.
func (b *books) follow(t *testing.T) {
	t.Helper()
	if err := b.change(http.MethodPut, booksFollow, "{}"); err != nil {
		t.Fatal(err)
	}
	b.unread = 0
}

// call makes one call at a gateway with the API key. The answer is read into out unless that is nil.
func call(at *member, method, path, body, once string, out any) error {
	var in any
	if body != "" {
		in = json.RawMessage(body)
	}

	_, err := at.keyed().Once(once).Do(context.Background(), method, path, in, out)
	return err
}

// change makes a change through any gateway that is up, and repeats it until it is acknowledged. It counts once.
func (b *books) change(method, path, body string) error {
	b.changes++
	once := ""
	if method == http.MethodPost {
		once = fmt.Sprint("change ", b.changes)
	}

	said := "no gateway is up"
	for start := time.Now(); time.Since(start) < testkit.Timeout; time.Sleep(20 * time.Millisecond) {
		at := b.gateways[rand.IntN(len(b.gateways))]
		if !at.up() {
			continue
		}

		err := call(at, method, path, body, once, nil)
		if err == nil {
			return nil
		}

		said = fmt.Sprintf("%s: %v", at.name, err)
		no := (*client.Error)(nil)
		if errors.As(err, &no) && no.Status/100 == 4 {
			break
		}
	}

	return fmt.Errorf("%s %s: %s", method, path, said)
}

// write makes a change of each kind.
func (b *books) write() error {
	if err := b.change(http.MethodPost, "/"+booksPage+"/changes", ""); err != nil {
		return err
	}
	b.unread++
	if b.mixed {
		return nil
	}

	if err := b.change(http.MethodPost, booksRoot+"views:1/increment", `{"delta":3}`); err != nil {
		return err
	}
	b.sum += 3
	b.gained += 3

	if err := b.change(http.MethodPost, booksRoot+"stock:1/increment", `{"delta":2}`); err != nil {
		return err
	}
	b.stock += 2

	who := fmt.Sprint("visitor-", b.changes)
	if err := b.change(http.MethodPut, booksRoot+"visitors:1/members/"+who, ""); err != nil {
		return err
	}
	b.visitors++

	if err := b.change(http.MethodPut, booksRoot+"likes:1/members/"+who, ""); err != nil {
		return err
	}
	b.likes++
	if b.visitors%3 == 0 {
		if err := b.change(http.MethodDelete, booksRoot+"likes:1/members/"+who, ""); err != nil {
			return err
		}
		b.likes--
	}

	if b.visitors%5 == 0 && b.entries < 90 { // a page of a ledger has 100
		const correction = `{"delta":-1,"reason":"bots","by":"ops"}`
		if err := b.change(http.MethodPost, booksRoot+"views:1/adjust", correction); err != nil {
			return err
		}
		b.sum--
		b.entries++
	}

	return nil
}

// some makes a few changes of each kind.
func (b *books) some(t *testing.T) {
	t.Helper()
	for range 10 {
		if err := b.write(); err != nil {
			t.Fatal(err)
		}
	}
}

// during makes changes until the work is done.
func (b *books) during(t *testing.T, work func()) {
	t.Helper()
	stop := make(chan struct{})
	wrote := make(chan error, 1)
	go func() { // ends with stop
		for {
			if err := b.write(); err != nil {
				wrote <- err
				return
			}

			select {
			case <-stop:
				wrote <- nil
				return
			default:
			}
		}
	}()

	defer func() {
		close(stop)
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	}()

	work()
}

// check requires that every gateway answers what was written. Reads that lag may take a moment.
func (b *books) check(t *testing.T) {
	t.Helper()
	for _, at := range b.gateways {
		said := ""
		number := func(path, member string, want, off int64) bool {
			var all map[string]any
			err := call(at, http.MethodGet, path, "", "", &all)
			said = fmt.Sprintf("GET %s: %v %v, want %s %d", path, all, err, member, want)
			n, known := all[member].(float64)
			return known && int64(n) >= want-off && int64(n) <= want+off
		}

		right := func() bool {
			if !number(booksUnread, "count", b.unread, 0) {
				return false
			}
			if b.mixed {
				return true
			}

			return number(booksRoot+"views:1/exact", "value", b.sum, 0) &&
				number(booksRoot+"views:1", "value", b.sum, 0) &&
				number(booksRoot+"views:1/window?last=24h", "value", b.gained, 0) &&
				number(booksRoot+"stock:1/exact", "value", b.stock, 0) &&
				number(booksRoot+"likes:1/exact", "value", b.likes, 0) &&
				number(booksRoot+"visitors:1/exact", "value", b.visitors, 1+b.visitors/30) // an estimate
		}

		for watch := testkit.NewStopwatch(t); !right(); time.Sleep(20 * time.Millisecond) {
			if watch.Elapsed() > exactWithin {
				t.Errorf("%s does not show what the books say within %s: %s", at.name, exactWithin, said)
				break
			}
		}

		var follows json.RawMessage
		err := call(at, http.MethodGet, "/-/users/reader/follows", "", "", &follows)
		if err != nil || !strings.Contains(string(follows), strconv.Quote(booksPage)) {
			t.Errorf("%s: the reader follows %s, error %v; want %s", at.name, follows, err, booksPage)
		}

		if b.mixed {
			continue
		}

		var ledger struct{ Entries []json.RawMessage }
		err = call(at, http.MethodGet, booksRoot+"views:1/ledger?limit=100", "", "", &ledger)
		if err != nil || int64(len(ledger.Entries)) != b.entries {
			t.Errorf("%s: a ledger of %d entries, want %d: %s %v",
				at.name, len(ledger.Entries), b.entries, ledger.Entries, err)
		}
	}
}

// way is the program that every process becomes, one after the other.
type way struct {
	name, to string
	lingers  time.Duration
}

// ways returns an upgrade and the rollback.
func ways(t *testing.T) []way {
	return []way{{"upgrade", program, twice}, {"rollback", previous(t), twice}}
}

// TestClockUpgradeOneByOne: three processes with all roles run the previous release. Each in turn becomes this one, and
// goes back, while users come and go. In every mixture all counts are exact, nobody who stays was ever missing, and
// processes of this release say how the counters are carried over. Then that is done.
func TestClockUpgradeOneByOne(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	top := &topology{members: three(t, redis.URL())}
	top.gateways = top.members
	top.begin(t)
	b := newBooks(t, top.gateways...)
	b.some(t)

	for _, way := range ways(t) {
		b.mixed = true
		for _, m := range top.members {
			top.suffer(t, fault{name: way.name + " of " + m.name, since: "it was ready", lingers: way.lingers,
				damage: func(t *testing.T) time.Time {
					b.during(t, func() { replace(t, m, way.to) })
					return time.Now()
				}})

			b.check(t)
			if way.to == program {
				servesNoCounters(t, m)
			}
		}

		b.mixed = way.to == program
		b.check(t)
	}
	b.some(t)

	// When no process of the previous release runs any more, the counters move.
	for _, m := range top.members {
		if err := m.leave(); err != nil {
			t.Error(err)
		}
	}

	carryOver(t, redis.URL())
	early := newMember("one that goes back", allRoles, redis.URL(), nil, booksFlags...)
	early.program = previous(t)
	refusal(t, early, "run the version that wrote them")

	for _, m := range top.members {
		m.program = program
		again(t, m)
	}

	b.check(t)
	b.some(t)
	b.check(t)
}

// servesNoCounters checks that a process which runs next to the previous release serves no counters and says why.
func servesNoCounters(t *testing.T, m *member) {
	t.Helper()
	for method, path := range map[string]string{
		http.MethodGet: booksRoot + "views:1", http.MethodPost: booksRoot + "views:1/increment",
	} {
		no := (*client.Error)(nil)
		err := call(m, method, path, "", "", nil)
		if !errors.As(err, &no) || no.Status != http.StatusServiceUnavailable ||
			!strings.Contains(err.Error(), "headcount import --redis") {
			t.Errorf("%s: %s %s: %v", m.name, method, path, err)
		}
	}
}

// carryOver carries the counters of a Redis over from the previous release to this one. Their old keys stay.
func carryOver(t *testing.T, url string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "export")
	for _, args := range [][]string{{previous(t), "export"}, {program, "import"}} {
		args = append(args, "--redis", url, "--file", file)
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v, %s", args, err, out)
		}
	}
}

// three returns processes with all roles, of the previous release.
func three(t *testing.T, redis string, flags ...string) (members []*member) {
	t.Helper()
	for i := range 3 {
		m := newMember(fmt.Sprint("process ", i), allRoles, redis, nil, append(flags, booksFlags...)...)
		m.program = previous(t)
		members = append(members, m)
	}

	return members
}

// TestClockUpgradeAtOnce: in the previous release, counters of Redis in front of PostgreSQL have other keys and tables.
// Its export carries them over, within the same Redis and database.
func TestClockUpgradeAtOnce(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	postgres := pgtest.Start(t)
	database := postgres.Database(t)
	export := filepath.Join(t.TempDir(), "export")

	members := three(t, redis.URL(), "--postgres="+database)
	for _, m := range members {
		m.program = previous(t)
		startAll(t, m)
		awaitReady(t, m)
	}

	b := newBooks(t, members...)
	b.some(t)
	b.check(t)

	for _, m := range members {
		if err := m.leave(); err != nil {
			t.Error(err)
		}
	}

	run := func(program string, args ...string) {
		t.Helper()
		args = append(args, "--redis", redis.URL(), "--postgres", database, "--file", export)

		// The lease of a process that has ended may last for some more seconds.
		testkit.Eventually(t, args[0], func() bool {
			out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
			isLeased := bytes.Contains(out, []byte("in use by other processes"))
			if err != nil && !isLeased {
				t.Fatalf("%v: %v, %s", args, err, out)
			}
			return err == nil
		})
	}
	run(previous(t), "export")
	postgres.Exec(t, database, moveTables)
	run(program, "import")

	for _, m := range members {
		m.program = program
		again(t, m)
	}

	b.check(t)
	b.some(t)
	b.check(t)
}

// TestClockUpgradeByRole upgrades and goes back with processes that have one role each, in the order of the guide. In
// between, each role is restarted with this release, and ghosts may stay no longer than promised. After the way back
// the counters are as they were.
func TestClockUpgradeByRole(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	top := layout(redis.URL(), nil, booksFlags...)
	for _, m := range top.members {
		m.program = previous(t)
	}
	top.begin(t)

	b := newBooks(t, top.gateways...)
	b.some(t)

	b.mixed = true
	for _, way := range slices.Insert(ways(t), 1, way{"restart", program, 0}) {
		for _, role := range [][]*member{top.dispatchers, top.nodes, top.gateways} {
			top.suffer(t, fault{name: way.name + " of every " + role[0].role, since: "the last one was ready",
				lingers: way.lingers, damage: func(t *testing.T) time.Time {
					b.during(t, func() {
						for _, m := range role {
							replace(t, m, way.to)
						}
					})
					return time.Now()
				}})
			b.check(t)
		}
	}

	b.mixed = false
	b.check(t)
}

// TestClockUpgradeOfRegions: one region after the other goes to this release and back, and both show one total. (The
// previous release shares no counters.) Users move to the other region meanwhile, and count in both until they have
// left the first one.
func TestClockUpgradeOfRegions(t *testing.T) {
	t.Parallel()
	eu, us := redistest.Start(t), redistest.Start(t)
	top := &topology{members: []*member{
		newMember("eu", allRoles, eu.URL(), nil,
			append([]string{"--region=eu", "--peer=us=" + us.URL()}, booksFlags...)...),
		newMember("us", allRoles, us.URL(), nil,
			append([]string{"--region=us", "--peer=eu=" + eu.URL()}, booksFlags...)...),
	}}

	top.gateways = top.members

	for _, m := range top.members {
		m.program = previous(t)
	}

	top.begin(t)

	for _, way := range ways(t) {
		for _, m := range top.members {
			replace(t, m, way.to)
			if _, err := top.crowd.Exact(t.Context(), time.Now(), nil); err != nil {
				t.Errorf("%s of the region %s: %v", way.name, m.name, err)
			}

			for _, w := range top.crowd.Wrongs() {
				t.Error(w)
			}
		}
	}
}

// moveTables moves the tables of an earlier release into a schema of their own, as the guide does.
const moveTables = `CREATE SCHEMA headcount_before;
DO $$ DECLARE t text; BEGIN
	FOR t IN SELECT oid::regclass FROM pg_class WHERE relkind = 'r' AND relname LIKE 'headcount\_%' AND relnamespace =
		(SELECT relnamespace FROM pg_class WHERE oid = 'headcount_migrations'::regclass)
	LOOP EXECUTE 'ALTER TABLE ' || t || ' SET SCHEMA headcount_before'; END LOOP;
END $$`

// TestClockUpgradeOfPostgres: this release refuses the tables of the previous one, and says how their counters are
// carried over. They stay, in another schema, and applications continue to use headcount.change.
func TestClockUpgradeOfPostgres(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Start(t)
	database := postgres.Database(t)
	export := filepath.Join(t.TempDir(), "export")
	m := alone("--postgres=" + database)
	m.program = previous(t)
	startAll(t, m)
	awaitReady(t, m)

	b := newBooks(t, m)
	b.some(t)
	if err := m.leave(); err != nil {
		t.Error(err)
	}

	out, err := exec.CommandContext(t.Context(), program, m.flags...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "headcount export --postgres URL --file FILE") {
		t.Errorf("the start does not point to the export: error %v, %s", err, out)
	}

	run := func(program string, args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v, %s", args, err, out)
		}
	}

	run(m.program, "export", "--postgres", database, "--file", export)
	postgres.Exec(t, database, moveTables)
	run(program, "import", "--postgres", database, "--file", export)

	m.program = program
	again(t, m)
	b.follow(t) // follows are in memory
	b.check(t)
	b.some(t)
	b.check(t)

	if n := pgtest.Query[int](t, database, "select count(*)::int from headcount_before.headcount_counters"); n == 0 {
		t.Error("nothing is left of the former tables")
	}

	testkit.Eventually(t, "headcount.change is of this release", func() bool {
		const is = "select prosrc like '%headcount_row_ids%' from pg_proc where oid = 'headcount.change'::regproc"
		return pgtest.Query[bool](t, database, is)
	})
}

// TestClockUpgradeOfADataDirectory: this release refuses the counters of the previous one, and says how they are
// carried over. The previous one refuses what this one has written.
func TestClockUpgradeOfADataDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	export := filepath.Join(dir, "export")
	counters := filepath.Join(dir, "counters.db")
	m := alone("--data-dir=" + dir)
	m.program = previous(t)
	startAll(t, m)
	awaitReady(t, m)

	b := newBooks(t, m)
	b.some(t)
	if err := m.leave(); err != nil {
		t.Error(err)
	}

	refused := func(program, says string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), program, m.flags...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), says) {
			t.Errorf("%s: %v, %s", program, err, out)
		}
	}

	run := func(program string, args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v, %s", args, err, out)
		}
	}

	// Each release refuses the files of the other, and says what to do.
	refused(program, "headcount export --data-dir "+dir)
	run(m.program, "export", "--data-dir", dir, "--file", export)
	if err := os.Rename(counters, counters+".before"); err != nil {
		t.Fatal(err)
	}

	run(program, "import", "--data-dir", dir, "--file", export)
	refused(m.program, "use the version that wrote it")

	m.program = program
	again(t, m)
	b.check(t)
	b.some(t)
	b.check(t)
}

// alone returns a process without a cluster.
func alone(flags ...string) *member {
	m := &member{name: "the process", addr: servertest.FreeAddr(), admin: servertest.FreeAddr()}
	m.flags = append([]string{
		"serve", "--listen=" + m.addr, "--admin-listen=" + m.admin, "--log-format=json", "--shutdown-timeout=15s",
	}, booksFlags...)
	m.flags = append(m.flags, flags...)
	return m
}
