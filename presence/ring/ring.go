// Package ring assigns owners: presence nodes own partitions, dispatchers own
// buckets. Every process derives the same Table from the same live processes, by
// consistent hashing with bounded loads.
//
// The package decides nothing about who is alive. Package member makes a new Table when a
// lease begins or ends (membership.go), and package counter/owners does so for the
// partitions of counters.
package ring

import (
	"fmt"
	"slices"

	"github.com/buraksezer/consistent"
	"github.com/cespare/xxhash/v2"
)

const (
	replicas = 100  // of each member on the ring
	load     = 1.25 // bound of what one member owns, as a multiple of the mean, rounded up
)

// Table names the owner of every partition and bucket. A Table does not change;
// any goroutine may read it.
type Table struct {
	nodes, dispatchers owners
	hash               uint64
}

// owners are the owners of all partitions, or of all buckets.
type owners struct {
	of    []string         // by partition or bucket; empty when there are no members
	parts map[string][]int // in order
}

// New returns the Table of the presence nodes and dispatchers with these names, in any
// order. Without presence nodes no partition has an owner, and without dispatchers no
// bucket. There must be at least one partition and one bucket.
func New(nodes, dispatchers []string, partitions, buckets int) *Table {
	t := &Table{}

	h := xxhash.New()
	for _, kind := range []struct {
		name    string
		members []string
		parts   int
		to      *owners
	}{
		{"partitions", nodes, partitions, &t.nodes},
		{"buckets", dispatchers, buckets, &t.dispatchers},
	} {
		members := slices.Clone(kind.members)
		slices.Sort(members)
		members = slices.Compact(members)
		*kind.to = distribute(members, kind.parts)

		// The hash includes the owners: two builds could distribute differently.
		fmt.Fprintf(h, "%s %d %q %q\n", kind.name, kind.parts, members, kind.to.of)
	}

	t.hash = max(h.Sum64(), 1)
	return t
}

// Node returns the presence node that owns the partition.
func (t *Table) Node(partition int) (string, bool) { return t.nodes.owner(partition) }

// Dispatcher returns the dispatcher that owns the bucket.
func (t *Table) Dispatcher(bucket int) (string, bool) { return t.dispatchers.owner(bucket) }

// PartitionsOf returns the partitions that the presence node owns, in order.
func (t *Table) PartitionsOf(node string) []int { return slices.Clone(t.nodes.parts[node]) }

// BucketsOf returns the buckets that the dispatcher owns, in order.
func (t *Table) BucketsOf(dispatcher string) []int {
	return slices.Clone(t.dispatchers.parts[dispatcher])
}

// Hash returns a hash of the members and owners, the same in every process, never 0.
func (t *Table) Hash() uint64 { return t.hash }

func (o *owners) owner(part int) (string, bool) {
	// Without members there are no owners, and the caller may name any part.
	if part < 0 || part >= len(o.of) {
		return "", false
	}
	return o.of[part], true
}

// distribute gives every part an owner. members is sorted, without duplicates. The library
// would panic if the members could not own all parts, but they can, since load is over 1.
func distribute(members []string, parts int) owners {
	if len(members) == 0 {
		return owners{}
	}

	list := make([]consistent.Member, len(members))
	for i, m := range members {
		list[i] = member(m)
	}

	// Every process must use the same numbers: one that does not shows by the hash of its table.
	c := consistent.New(list, consistent.Config{
		Hasher: hasher{}, PartitionCount: parts, ReplicationFactor: replicas, Load: load,
	})

	o := owners{of: make([]string, parts), parts: make(map[string][]int, len(members))}
	for part := range parts {
		name := c.GetPartitionOwner(part).String()
		o.of[part] = name
		o.parts[name] = append(o.parts[name], part)
	}

	return o
}

type member string

func (m member) String() string { return string(m) }

type hasher struct{}

func (hasher) Sum64(b []byte) uint64 { return xxhash.Sum64(b) }
