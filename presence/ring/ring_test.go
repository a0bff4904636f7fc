package ring_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/ring"
)

const (
	partitions = presence.DefaultPartitions
	buckets    = presence.DefaultBuckets
)

func table(nodes, dispatchers []string) *ring.Table {
	return ring.New(nodes, dispatchers, partitions, buckets)
}

func names(n int) []string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("10.0.%d.%d:7946", i/250, i%250+1))
	}
	return list
}

func TestEmptyRingOwnsNothing(t *testing.T) {
	tab := table(nil, nil)
	if n, ok := tab.Node(0); ok {
		t.Errorf("%q owns a partition in a ring without nodes", n)
	}
	if n, ok := tab.Dispatcher(0); ok {
		t.Errorf("%q owns a bucket in a ring without dispatchers", n)
	}

	if got := tab.PartitionsOf("a:1"); len(got) != 0 {
		t.Errorf("a process that is not in the ring owns the partitions %v", got)
	}

	if tab.Hash() == 0 || tab.Hash() == table([]string{"a:1"}, nil).Hash() {
		t.Error("the hash of the empty ring is 0, or that of another ring")
	}
}

func TestOutOfRangeHasNoOwner(t *testing.T) {
	tab := table([]string{"a:1"}, []string{"a:1"})
	for _, i := range []int{-1, partitions, math.MaxInt} {
		if n, ok := tab.Node(i); ok {
			t.Errorf("partition %d is owned by %q, want the only node", i, n)
		}
	}
}

// TestSameMembersSameTable: neither the order of the members nor repetitions change the table, and every partition and
// bucket has exactly one owner.
func TestSameMembersSameTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,12}:[0-9]{2,5}`), 1, 20, rapid.ID[string])
		nodes := gen.Draw(t, "nodes")
		dispatchers := gen.Draw(t, "dispatchers")
		p := rapid.IntRange(1, 500).Draw(t, "partitions")
		b := rapid.IntRange(1, 100).Draw(t, "buckets")

		one := ring.New(nodes, dispatchers, p, b)
		again := append(rapid.Permutation(nodes).Draw(t, "order"), rapid.SampledFrom(nodes).Draw(t, "twice"))
		two := ring.New(again, rapid.Permutation(dispatchers).Draw(t, "other order"), p, b)

		if one.Hash() != two.Hash() {
			t.Fatal("the same members have another hash")
		}

		owned := 0
		for _, n := range nodes {
			owned += len(one.PartitionsOf(n))
			for _, i := range one.PartitionsOf(n) {
				if o, ok := two.Node(i); !ok || o != n {
					t.Fatalf("partition %d: %q here, %q there", i, n, o)
				}
			}

			// The load of a node is at most 1.25 times the mean.
			if most := int(math.Ceil(float64(p) / float64(len(nodes)) * 1.25)); len(one.PartitionsOf(n)) > most {
				t.Fatalf("%q has %d partitions, the bound is %d", n, len(one.PartitionsOf(n)), most)
			}
		}
		if owned != p {
			t.Fatalf("%d of %d partitions are owned", owned, p)
		}

		owned = 0
		for _, d := range dispatchers {
			owned += len(one.BucketsOf(d))
		}
		if owned != b {
			t.Fatalf("%d of %d buckets are owned", owned, b)
		}
	})
}

func TestAnotherMemberAnotherHash(t *testing.T) {
	seen := map[uint64]string{}
	for i := range 15 {
		for j := range 3 {
			h := table(names(i), names(j)).Hash()
			if before, ok := seen[h]; ok {
				t.Fatalf("%d nodes and %d dispatchers have the hash of %s", i, j, before)
			}
			seen[h] = fmt.Sprintf("%d nodes and %d dispatchers", i, j)
		}
	}
}

// TestLosingOneMovesLittle: one of ten nodes leaves. Its own partitions must move. Because loads are bounded some
// others move as well, but hardly more than one node has.
func TestLosingOneMovesLittle(t *testing.T) {
	moved := 0.0
	least := 2.0
	most := 0.0
	const rings, members = 20, 10
	for r := range rings {
		nodes := names((r + 1) * members)[r*members:]
		before := table(nodes, nil)
		for _, n := range nodes {
			// The share is in multiples of the mean.
			share := float64(len(before.PartitionsOf(n))) * members / partitions
			least = min(least, share)
			most = max(most, share)
		}

		// In each ring another node leaves, because their shares differ.
		gone := nodes[r%members]
		after := table(slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == gone }), nil)

		changed := 0
		for i := range partitions {
			was, _ := before.Node(i)
			is, _ := after.Node(i)
			if is == gone {
				t.Fatalf("partition %d is still owned by %q, which left", i, gone)
			}
			if is != was {
				changed++
			}
		}

		if limit := partitions / 4; changed > limit {
			t.Errorf("ring %d: %d partitions moved, more than %d", r, changed, limit)
		}

		moved += float64(changed) / partitions / rings
	}

	t.Logf("moved %.1f %% in the mean, shares of %.2f to %.2f", 100*moved, least, most)
	if moved > 0.14 || least < 0.4 || most > 1.26 {
		t.Errorf("moved %.3f, shares of %.2f to %.2f", moved, least, most)
	}
}
