// Package rowstest is the contract of rows.Store, as a test that every store passes.
package rowstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// Open returns an empty store, which ends with the test.
type Open func(t *testing.T) rows.Store

// Run tests the contract in real time. Its parts take milliseconds, so they are one test, whose log names each part.
func Run(t *testing.T, open Open) {
	for _, name := range slices.Sorted(maps.Keys(contract)) {
		t.Log(name)
		contract[name](&bench{T: t, store: open(t)})
	}
}

// RunInBubble tests the contract of a store within the process, with the clock of synctest and a test for each part.
func RunInBubble(t *testing.T, open Open) {
	for name, test := range contract {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(&bench{T: t, store: open(t)}) })
		})
	}
}

var contract = map[string]func(*bench){
	"a claim counts up":                         claimsCountUp,
	"a claim fences former owners":              claimFences,
	"a claim after a loss":                      claimAfterLoss,
	"a commit writes and deletes rows":          commitWrites,
	"a repeated commit changes nothing":         commitRepeats,
	"a commit that follows another one is lost": commitIsLost,
	"an ID is used once":                        idsAreUsedOnce,
	"an ID is used again":                       idsAreUsedAgain,
	"an ID is asked for":                        idsAreAsked,
	"a refused commit writes nothing":           refusedWritesNothing,
	"commits of partitions are separate":        partitionsAreSeparate,
	"IDs of partitions are separate":            idsAreSeparate,
	"collections are separate":                  collectionsAreSeparate,
	"a scan goes on after a field":              scanGoesOn,
	"any bytes are a row":                       anyBytes,
	"publications come in order":                publicationsInOrder,
	"one of many claims holds":                  oneClaimHolds,
}

// bench has a store, and helpers to test it.
type bench struct {
	*testing.T
	store rows.Store
}

// partition is the partition that most tests use.
const partition = 7

func (b *bench) claim(owner string, partition int, former uint64) rows.Claim {
	b.Helper()
	claims, err := b.store.Claim(b.Context(), owner, []rows.Former{{Partition: partition, Epoch: former}})
	if err != nil {
		b.Fatal(err)
	}

	return claims[0]
}

// commit makes one commit that follows the commit after. changes are rows, IDs and a publication: see newCommit.
func (b *bench) commit(epoch, after uint64, changes ...any) error {
	b.Helper()

	return b.store.Commit(b.Context(), []rows.Commit{newCommit(partition, epoch, after, changes...)})[0]
}

func newCommit(partition int, epoch, after uint64, changes ...any) rows.Commit {
	c := rows.Commit{Partition: partition, Epoch: epoch, After: after, Number: after + 1, At: time.Now()}
	for _, change := range changes {
		switch change := change.(type) {
		case rows.Row:
			c.Rows = append(c.Rows, change)
		case rows.ID:
			c.IDs = append(c.IDs, change)
		case string:
			c.Publication = []byte(change)
		}
	}

	return c
}

func put(field, value string) rows.Row {
	return rows.Row{Name: rows.Name{Collection: "c", Field: field}, Value: []byte(value)}
}

func remove(field string) rows.Row { return rows.Row{Name: rows.Name{Collection: "c", Field: field}} }

// id returns an ID that is remembered for d.
func id(n byte, d time.Duration) rows.ID {
	return rows.ID{Bytes: [16]byte{n}, Until: time.Now().Add(d)}
}

// want fails unless the partition has exactly these rows, each written field=value.
func (b *bench) want(partition int, fields ...string) {
	b.Helper()
	var got []string
	err := b.store.Scan(b.Context(), partition, "c", "", func(field string, value []byte) error {
		got = append(got, field+"="+string(value))
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	if !slices.Equal(got, fields) {
		b.Errorf("partition %d has %q, want %q", partition, got, fields)
	}
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bench) wantFenced(err error, epoch uint64) {
	b.Helper()
	var fenced *rows.Fenced
	if !errors.As(err, &fenced) || fenced.Epoch != epoch {
		b.Errorf("got %v, want fenced by epoch %d", err, epoch)
	}
}

func (b *bench) wantLost(err error, number uint64) {
	b.Helper()
	var lost *rows.Lost
	if !errors.As(err, &lost) || lost.Number != number {
		b.Errorf("got %v, want nothing after %d", err, number)
	}
}

func claimsCountUp(b *bench) {
	// A minute of tolerance, because a store has a clock of its own.
	before := uint64(time.Now().Add(-time.Minute).UnixMilli())
	first := b.claim("a", partition, 0)
	if first.Epoch < before || first.Number != 0 {
		b.Errorf("the first claim is %+v, want an epoch of now and no commit", first)
	}
	// The answer to the next owner's claim must have the number of this commit.
	b.must(b.commit(first.Epoch, 0))

	second := b.claim("b", partition, 0)
	if second.Epoch <= first.Epoch || second.Number != 1 {
		b.Errorf("the second claim is %+v after %+v and a commit", second, first)
	}
}

func claimFences(b *bench) {
	first := b.claim("a", partition, 0)
	b.must(b.commit(first.Epoch, 0, put("x", "1")))
	second := b.claim("b", partition, 0)

	b.wantFenced(b.commit(first.Epoch, 1, put("x", "2")), second.Epoch)
	b.want(partition, "x=1")

	b.must(b.commit(second.Epoch, 1, put("x", "3")))
	b.want(partition, "x=3")
}

// claimAfterLoss tests the claims of an owner whose store has lost data.
func claimAfterLoss(b *bench) {
	first := b.claim("a", partition, 0)

	again := b.claim("a", partition, first.Epoch)
	if again.Epoch <= first.Epoch {
		b.Errorf("claimed again: %+v, want more than %+v", again, first)
	}
	if repeated := b.claim("a", partition, first.Epoch); repeated.Epoch <= again.Epoch {
		b.Errorf("a claim whose answer was lost, repeated: %+v, want more than %+v", repeated, again)
	}

	future := first.Epoch + 1<<40
	if ahead := b.claim("a", partition, future); ahead.Epoch <= future {
		b.Errorf("claimed with a greater epoch, which the store has lost: %+v", ahead)
	}

	other := b.claim("b", partition, 0)
	if refused := b.claim("a", partition, first.Epoch); refused.Epoch != 0 {
		b.Errorf("claimed again while another owns it: %+v", refused)
	}
	b.must(b.commit(other.Epoch, 0))
}

func commitWrites(b *bench) {
	claim := b.claim("a", partition, 0)
	b.must(b.commit(claim.Epoch, 0, put("x", "1"), put("y", "2")))
	b.want(partition, "x=1", "y=2")

	// Deleting a row that does not exist is no error, because an owner does not know what a store has lost.
	b.must(b.commit(claim.Epoch, 1, put("y", "3"), remove("x"), remove("none")))
	b.want(partition, "y=3")

	found := b.store.Read(b.Context(), []rows.Address{
		{Partition: partition, Name: rows.Name{Collection: "c", Field: "x"}},
		{Partition: partition, Name: rows.Name{Collection: "c", Field: "y"}},
		{Partition: partition, Name: rows.Name{Collection: "d", Field: "y"}},
	})
	want := [][]byte{nil, []byte("3"), nil}
	for i := range want {
		if found[i].Err != nil || !bytes.Equal(found[i].Value, want[i]) || (found[i].Value == nil) != (want[i] == nil) {
			b.Errorf("row %d is %q, %v; want %q", i, found[i].Value, found[i].Err, want[i])
		}
	}
}

func commitRepeats(b *bench) {
	claim := b.claim("a", partition, 0)
	first := newCommit(partition, claim.Epoch, 0, put("x", "1"), id(1, time.Hour))
	// A caller whose answer was lost repeats its commit unchanged.
	for range 2 {
		b.must(b.store.Commit(b.Context(), []rows.Commit{first})[0])
	}

	b.must(b.commit(claim.Epoch, 1, put("x", "2")))
	b.want(partition, "x=2")
	// Too late for a repetition: another commit has followed.
	b.wantLost(b.store.Commit(b.Context(), []rows.Commit{first})[0], 2)
	b.want(partition, "x=2")
}

func commitIsLost(b *bench) {
	claim := b.claim("a", partition, 0)
	b.must(b.commit(claim.Epoch, 0))
	b.wantLost(b.commit(claim.Epoch, 5, put("x", "1")), 1)
	b.want(partition)

	// A commit after a loss may have a number that is greater by more than one.
	healing := newCommit(partition, claim.Epoch, 1, put("x", "1"))
	healing.Number = 7
	b.must(b.store.Commit(b.Context(), []rows.Commit{healing})[0])
	b.want(partition, "x=1")
	b.must(b.commit(claim.Epoch, 7))
}

func idsAreUsedOnce(b *bench) {
	claim := b.claim("a", partition, 0)
	b.must(b.commit(claim.Epoch, 0, id(1, time.Hour), id(2, -time.Second)))

	err := b.commit(claim.Epoch, 1, put("x", "1"), id(1, time.Hour), id(2, time.Hour), id(3, time.Hour))
	var known *rows.Known
	if !errors.As(err, &known) || len(known.IDs) != 1 || known.IDs[0].Bytes != id(1, 0).Bytes {
		b.Errorf("got %v, want that ID 1 is known: ID 2 is forgotten, and ID 3 new", err)
	}

	b.must(b.commit(claim.Epoch, 1, put("x", "1"), id(2, time.Hour), id(3, time.Hour)))
	b.want(partition, "x=1")
	if err := b.commit(claim.Epoch, 2, id(2, time.Hour)); !errors.As(err, &known) {
		b.Errorf("got %v, want that ID 2 is known: it was used again", err)
	}

	// What counts is the time of the commit, and not the store's clock.
	later := newCommit(partition, claim.Epoch, 2, id(1, 3*time.Hour))
	later.At = time.Now().Add(2 * time.Hour)
	if err := b.store.Commit(b.Context(), []rows.Commit{later})[0]; err != nil {
		b.Errorf("got %v, although ID 1 is forgotten at the time of the commit", err)
	}
}

// idsAreUsedAgain tests an ID that has expired and is used again before the store, which deletes few at a time, has
// deleted its first use.
func idsAreUsedAgain(b *bench) {
	claim := b.claim("a", partition, 0)
	const ids = 10
	var old []any
	for n := range byte(ids) {
		old = append(old, id(n, -time.Second))
	}
	b.must(b.commit(claim.Epoch, 0, old...))
	b.must(b.commit(claim.Epoch, 1, id(ids-1, time.Hour)))

	// Each commit deletes a few expired IDs, so after these the first use is certainly deleted.
	for after := range uint64(ids) {
		b.must(b.commit(claim.Epoch, 2+after))
	}
	var known *rows.Known
	if err := b.commit(claim.Epoch, 2+ids, id(ids-1, time.Hour)); !errors.As(err, &known) {
		b.Errorf("got %v, want that the ID is known by its second use", err)
	}
}

func idsAreAsked(b *bench) {
	claim := b.claim("a", partition, 0)
	used := id(1, time.Hour)
	b.must(b.commit(claim.Epoch, 0, used))

	asking := newCommit(partition, claim.Epoch, 1)
	// An ID that is only asked for has no time, so the time in the answer must be that of its first use.
	asking.Asked = []rows.ID{{Bytes: id(2, 0).Bytes}, {Bytes: used.Bytes}}
	err := b.store.Commit(b.Context(), []rows.Commit{asking})[0]
	var known *rows.Known
	if !errors.As(err, &known) || len(known.IDs) != 1 || known.IDs[0].Bytes != used.Bytes {
		b.Fatalf("got %v, want that ID 1 is known", err)
	}
	if apart := known.IDs[0].Until.Sub(used.Until).Abs(); apart > time.Second {
		b.Errorf("ID 1 is known until %s, want %s", known.IDs[0].Until, used.Until)
	}

	// A commit that only asked for an ID has not used it.
	asking.Asked = asking.Asked[:1]
	b.must(b.store.Commit(b.Context(), []rows.Commit{asking})[0])
	b.must(b.commit(claim.Epoch, 2, id(2, time.Hour)))
}

func refusedWritesNothing(b *bench) {
	claim := b.claim("a", partition, 0)
	b.must(b.commit(claim.Epoch, 0, id(1, time.Hour)))

	// Three reasons for a refusal: another epoch, a missing commit, and a known ID beside a new one.
	refused := []error{
		b.commit(claim.Epoch-1, 1, put("x", "1"), id(2, time.Hour)),
		b.commit(claim.Epoch, 2, put("x", "1"), id(2, time.Hour)),
		b.commit(claim.Epoch, 1, put("x", "1"), id(2, time.Hour), id(1, time.Hour)),
	}
	for i, err := range refused {
		if err == nil {
			b.Errorf("commit %d was made", i)
		}
	}

	b.want(partition)
	b.must(b.commit(claim.Epoch, 1, id(2, time.Hour)))
}

// partitionsAreSeparate tests that a store makes one commit of a call although it refuses others.
func partitionsAreSeparate(b *bench) {
	mine := b.claim("a", partition, 0)
	other := b.claim("b", partition+1, 0)

	errs := b.store.Commit(b.Context(), []rows.Commit{
		newCommit(partition, mine.Epoch, 0, put("x", "1")),
		newCommit(partition+1, other.Epoch+1, 0, put("x", "2")),
		newCommit(partition+2, 1, 0, put("x", "3")),
	})
	b.must(errs[0])
	b.wantFenced(errs[1], other.Epoch)
	b.wantFenced(errs[2], 0)

	b.want(partition, "x=1")
	b.want(partition + 1)
	b.want(partition + 2)
}

func idsAreSeparate(b *bench) {
	first := b.claim("a", partition, 0)
	other := b.claim("a", partition+1, 0)
	b.must(b.commit(first.Epoch, 0, id(1, time.Hour)))
	b.must(b.store.Commit(b.Context(), []rows.Commit{newCommit(partition+1, other.Epoch, 0, id(1, time.Hour))})[0])
}

// collectionsAreSeparate tests names that would be equal if a store joined collection and field.
func collectionsAreSeparate(b *bench) {
	claim := b.claim("a", partition, 0)
	long := rows.Row{Name: rows.Name{Collection: "c:d", Field: "e"}, Value: []byte("long")}
	short := rows.Row{Name: rows.Name{Collection: "c", Field: ":de"}, Value: []byte("short")}
	odd := rows.Row{Name: rows.Name{Collection: "c\x07", Field: "e"}, Value: []byte("odd")}
	b.must(b.commit(claim.Epoch, 0, long, short, odd))
	b.want(partition, ":de=short")

	b.must(b.commit(claim.Epoch, 1, remove(":de")))
	b.want(partition)
	found := b.store.Read(b.Context(), []rows.Address{
		{Partition: partition, Name: long.Name}, {Partition: partition, Name: odd.Name},
	})
	if string(found[0].Value) != "long" || string(found[1].Value) != "odd" {
		b.Errorf("other collections have %q and %q", found[0].Value, found[1].Value)
	}
}

func scanGoesOn(b *bench) {
	claim := b.claim("a", partition, 0)
	const n = 2500
	all := make([]any, n)
	for i := range all {
		all[i] = put(fmt.Sprintf("%04d", i), "v")
	}
	b.must(b.commit(claim.Epoch, 0, all...))

	var got []string
	enough := errors.New("enough")
	err := b.store.Scan(b.Context(), partition, "c", "0097", func(field string, _ []byte) error {
		got = append(got, field)
		if len(got) == 150 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || got[0] != "0098" || got[149] != "0247" || !slices.IsSorted(got) {
		b.Errorf("got %v and %d fields from %q to %q", err, len(got), got[0], got[len(got)-1])
	}

	// The whole collection, which a store may read in pages.
	got = nil
	b.must(b.store.Scan(b.Context(), partition, "c", "", func(field string, _ []byte) error {
		got = append(got, field)
		return nil
	}))
	if len(got) != n || !slices.IsSorted(got) {
		b.Errorf("%d fields of %d are scanned, sorted: %t", len(got), n, slices.IsSorted(got))
	}
}

func anyBytes(b *bench) {
	claim := b.claim("a", partition, 0)
	// Names and values come from clients, and may be no valid text in any encoding.
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	row := rows.Row{Name: rows.Name{Collection: "c", Field: string(every)}, Value: every}
	empty := rows.Row{Name: rows.Name{Collection: "c", Field: ""}, Value: []byte{}}
	b.must(b.commit(claim.Epoch, 0, row, empty))

	found := b.store.Read(b.Context(), []rows.Address{
		{Partition: partition, Name: row.Name}, {Partition: partition, Name: empty.Name},
	})
	// A row may have an empty value; only nil means that there is no row.
	if !bytes.Equal(found[0].Value, every) || found[1].Value == nil || len(found[1].Value) > 0 {
		b.Errorf("got %q and %q", found[0].Value, found[1].Value)
	}
}

func publicationsInOrder(b *bench) {
	claim := b.claim("a", partition, 0)
	received := b.listen()

	// The watch may miss publications until it has begun.
	for !received.has("begin") {
		time.Sleep(time.Millisecond)
	}

	var want []string
	for number := range uint64(20) {
		b.must(b.commit(claim.Epoch, number, "p"))
		b.must(b.store.Commit(b.Context(), []rows.Commit{newCommit(partition, claim.Epoch, number, "repeated")})[0])
		want = append(want, fmt.Sprint(partition, " ", number+1, " p"))
	}

	for !received.has(want[len(want)-1]) {
		time.Sleep(time.Millisecond)
	}
	if got := received.last(len(want)); !slices.Equal(got, want) {
		b.Errorf("the last publications are %q, want %q", got, want)
	}
}

// listener has the publications of a watch.
type listener struct {
	mu  sync.Mutex
	all []string
}

// listen begins a watch that ends with the test.
func (b *bench) listen() *listener {
	l := &listener{}
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		if err := b.store.Watch(ctx, l.receive, l.begin); err != nil {
			b.Errorf("the watch ended: %v", err)
		}
	})
	b.Cleanup(func() {
		stop()
		ended.Wait()
	})

	return l
}

func (l *listener) receive(partition int, number uint64, publication []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.all = append(l.all, fmt.Sprint(partition, " ", number, " ", string(publication)))
}

func (l *listener) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.all = append(l.all, "begin")
}

func (l *listener) has(one string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	return slices.Contains(l.all, one)
}

// last returns the last n publications.
func (l *listener) last(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()

	return slices.Clone(l.all[max(len(l.all)-n, 0):])
}

// oneClaimHolds lets several owners claim a partition and write to it at the same time. Each number must be written
// once.
func oneClaimHolds(b *bench) {
	const owners, rounds = 8, 20
	var mu sync.Mutex
	written := map[uint64]string{}
	var all sync.WaitGroup
	for o := range owners {
		name := fmt.Sprint("owner ", o)
		all.Go(func() {
			for range rounds {
				claim := b.claim(name, partition, 0)
				err := b.commit(claim.Epoch, claim.Number, put("x", name))
				if err != nil {
					b.wantRefused(err)
					continue
				}

				mu.Lock()
				if by, ok := written[claim.Number+1]; ok {
					b.Errorf("commit %d was made by %s and %s", claim.Number+1, by, name)
				}
				written[claim.Number+1] = name
				mu.Unlock()
			}
		})
	}
	all.Wait()

	// The numbers count up from 1, so the last one is how many there were.
	last := uint64(len(written))
	b.want(partition, "x="+written[last])
}

func (b *bench) wantRefused(err error) {
	var fenced *rows.Fenced
	if !errors.As(err, &fenced) {
		b.Errorf("got %v, want fenced", err)
	}
}
