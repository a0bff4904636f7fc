package rowsredis_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/rows"
)

// ownerOfAll has claimed all partitions, each of which has a slot of its own.
type ownerOfAll struct {
	t      testing.TB
	store  rows.Store
	claims []rows.Claim
}

func ownAll(t testing.TB, store rows.Store) *ownerOfAll {
	t.Helper()
	all := make([]rows.Former, rows.Partitions)
	for p := range all {
		all[p].Partition = p
	}
	claims, err := store.Claim(t.Context(), "a", all)
	if err != nil {
		t.Fatal(err)
	}

	return &ownerOfAll{t: t, store: store, claims: claims}
}

// commit publishes a value, and writes it to a row of each partition.
func (o *ownerOfAll) commit(value string) []error {
	commits := make([]rows.Commit, rows.Partitions)
	for p := range commits {
		is := o.claims[p]
		commits[p] = rows.Commit{Partition: p, Epoch: is.Epoch, After: is.Number, Number: is.Number + 1, At: time.Now()}
		commits[p].Rows = []rows.Row{{Name: rows.Name{Collection: "c", Field: "x"}, Value: []byte(value)}}
		commits[p].Publication = []byte(value)
	}

	errs := o.store.Commit(o.t.Context(), commits)
	for p, err := range errs {
		if err == nil {
			o.claims[p].Number++
		}
	}

	return errs
}

// read reads the row of each partition.
func (o *ownerOfAll) read() []rows.Found {
	addresses := make([]rows.Address, rows.Partitions)
	for p := range addresses {
		addresses[p] = rows.Address{Partition: p, Name: rows.Name{Collection: "c", Field: "x"}}
	}

	return o.store.Read(o.t.Context(), addresses)
}

// TestServerClusterHasPartitionsEverywhere: commits, reads and watches work for partitions at all masters of a Cluster.
func TestServerClusterHasPartitionsEverywhere(t *testing.T) {
	url := redistest.ThreeMasters(t).URL()
	s := open(t, url)
	if _, err := s.Claim(t.Context(), "a", []rows.Former{{Partition: 0}, {Partition: 63}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Claim(t.Context(), "b", []rows.Former{{Partition: 63}}); err != nil {
		t.Fatal(err)
	}

	owners, err := s.Owners(t.Context())
	want := make([]string, rows.Partitions)
	want[0], want[63] = "a", "b"
	if err != nil || !slices.Equal(owners, want) {
		t.Errorf("the owners are %q, %v; want %q", owners, err, want)
	}

	o := ownAll(t, s)
	heard := watch(t, s)

	o.claims[partition].Epoch--
	errs := o.commit("v")
	o.claims[partition].Epoch++
	for p, found := range o.read() {
		var fenced *rows.Fenced
		isMade := errs[p] == nil && string(found.Value) == "v"
		switch {
		case found.Err != nil:
			t.Errorf("partition %d: %v", p, found.Err)
		case p == partition:
			if !errors.As(errs[p], &fenced) || fenced.Epoch != o.claims[p].Epoch || found.Value != nil {
				t.Errorf("a commit under an older epoch returns %v, and the row is %q; want it fenced, and no row",
					errs[p], found.Value)
			}
		case !isMade:
			t.Errorf("partition %d: %v, and the row is %q", p, errs[p], found.Value)
		}
	}

	heard.awaitAny(t, rows.Partitions-1) // one for each commit that was made

	closed := open(t, url)
	closed.Close()
	if _, err := closed.Owners(t.Context()); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("Owners of a closed store returns %v, want ErrUnavailable", err)
	}
}

// TestServerClusterMasterRefuses: one of three masters is full, and later permits no reads. The others serve, and their
// partitions can be claimed, however often this one refuses.
func TestServerClusterMasterRefuses(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	s := open(t, cluster.URL())
	o := ownAll(t, s)
	refusing := cluster.Masters[1]
	const there = rows.Partitions / 2 // a partition at the second master

	refusing.Do(t, "CONFIG", "SET", "maxmemory", "1")
	for range 8 {
		c := rows.Commit{Partition: there, Epoch: o.claims[there].Epoch, Number: 1, At: time.Now()}
		if err := o.store.Commit(t.Context(), []rows.Commit{c})[0]; !errors.Is(err, rows.ErrFull) {
			t.Errorf("a commit at a full master returns %v, want ErrFull", err)
		}
	}

	errs := o.commit("v")
	claimsApart(t, s, there)

	refusing.Do(t, "CONFIG", "SET", "maxmemory", "0")
	refusing.Do(t, "ACL", "SETUSER", "default", "-hmget")
	found := o.read()
	refusing.Do(t, "ACL", "SETUSER", "default", "+hmget")

	refused := 0
	for p, err := range errs {
		isServed := err == nil && found[p].Err == nil && string(found[p].Value) == "v"
		switch {
		case errors.Is(err, rows.ErrFull):
			refused++
			if !errors.Is(found[p].Err, rows.ErrUnavailable) {
				t.Errorf("partition %d is on the same master: %q, %v", p, found[p].Value, found[p].Err)
			}
		case !isServed:
			t.Errorf("partition %d is on another master: %v, the row is %q, %v", p, err, found[p].Value, found[p].Err)
		}
	}

	if refused < rows.Partitions/3 || refused > rows.Partitions/3+1 {
		t.Errorf("one of three masters refused %d of %d partitions", refused, rows.Partitions)
	}
}

// claimsApart claims all partitions. Those at the same master as the partition there cannot be claimed.
func claimsApart(t *testing.T, s rows.Store, there int) {
	t.Helper()
	all := make([]rows.Former, rows.Partitions)
	for p := range all {
		all[p].Partition = p
	}

	claims, err := s.Claim(t.Context(), "b", all)
	_, alone := s.Claim(t.Context(), "b", all[there:there+1])
	if err != nil || !errors.Is(alone, rows.ErrUnavailable) {
		t.Errorf("claims of all partitions return %v, and the claim of one that cannot be claimed %v", err, alone)
	}

	refused := 0
	for p, claim := range claims {
		switch {
		case claim.Err != nil:
			refused++
			if claim.Epoch != 0 || !errors.Is(claim.Err, rows.ErrUnavailable) {
				t.Errorf("partition %d: %+v, want ErrUnavailable", p, claim)
			}
		case claim.Epoch == 0:
			t.Errorf("partition %d is not claimed", p)
		}
	}

	if refused < rows.Partitions/3 || refused > rows.Partitions/3+1 {
		t.Errorf("one of three masters refused %d of %d claims", refused, rows.Partitions)
	}
}

// TestServerClusterMovesASlot: a partition moves to another master while its owner commits rows and IDs, and none of
// them is lost.
func TestServerClusterMovesASlot(t *testing.T) {
	const (
		atLeast = 2500 // rows, more than Redis returns at once
		slot    = (2*partition + 1) * redisconn.Slots / (2 * rows.Partitions)
	)
	cluster := redistest.ThreeMasters(t)
	o := own(t, open(t, cluster.URL()), 0)

	var all []string
	var commits sync.WaitGroup
	var moved atomic.Bool
	commits.Go(func() {
		for i := 0; len(all) < atLeast || !moved.Load(); i++ {
			var fields []string
			for j := range 50 {
				fields = append(fields, fmt.Sprintf("%06d.%02d=%d", i, j, i))
			}
			c := o.next(fields...)
			c.IDs = []rows.ID{{Bytes: [16]byte{byte(i), byte(i >> 8)}, Until: time.Now().Add(time.Hour)}}
			o.insist(c)
			all = append(all, fields...)
		}
	})

	cluster.Migrate(t, slot, 2)
	cluster.Migrate(t, slot, 0)
	moved.Store(true)
	commits.Wait()

	want(t, o.store, all...)
}
