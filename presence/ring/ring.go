// Package ring assigns owners: presence nodes own partitions, dispatchers own
// buckets. Every process derives the same Table from the same live processes, by
// consistent hashing with bounded loads.
package ring

import (
	"errors"
	"fmt"
	"slices"

	"github.com/buraksezer/consistent"
	"github.com/cespare/xxhash/v2"
)

const (
	replicas = 100  // of each member on the ring
	load     = 1.25 // bound of what one member owns, as a multiple of the mean, rounded up
)

// ErrConfig is in every error about settings that cannot work.
var ErrConfig = errors.New("bad setting")

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
// bucket.
func New(nodes, dispatchers []string, partitions, buckets int) (*Table, error) {
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
		var err error
		if *kind.to, err = distribute(members, kind.parts); err != nil {
			return nil, fmt.Errorf("ring: %s: %w", kind.name, err)
		}
		// The hash includes the owners: two builds could distribute differently.
		fmt.Fprintf(h, "%s %d %q %q\n", kind.name, kind.parts, members, kind.to.of)
	}
	t.hash = max(h.Sum64(), 1)
	return t, nil
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
	if part < 0 || part >= len(o.of) {
		return "", false
	}
	return o.of[part], true
}

// distribute gives every part an owner. members is sorted, without duplicates.
func distribute(members []string, parts int) (o owners, err error) {
	switch {
	case parts < 1:
		return o, fmt.Errorf("%w: %d is not a valid number", ErrConfig, parts)
	case slices.Contains(members, ""):
		return o, fmt.Errorf("%w: a member has no name", ErrConfig)
	case len(members) == 0:
		return o, nil
	}
	// The library panics if the members cannot own all parts. They can, since load is over
	// 1; if that ever changes, the caller must get an error instead.
	defer func() {
		if r := recover(); r != nil {
			o, err = owners{}, fmt.Errorf("%w: %d among %d members: %v", ErrConfig, parts, len(members), r)
		}
	}()
	list := make([]consistent.Member, len(members))
	for i, m := range members {
		list[i] = member(m)
	}
	c := consistent.New(list, consistent.Config{
		Hasher: hasher{}, PartitionCount: parts, ReplicationFactor: replicas, Load: load,
	})
	o = owners{of: make([]string, parts), parts: make(map[string][]int, len(members))}
	for part := range parts {
		owner := c.GetPartitionOwner(part)
		if owner == nil {
			return owners{}, fmt.Errorf("%w: number %d has no owner", ErrConfig, part)
		}
		name := owner.String()
		o.of[part] = name
		o.parts[name] = append(o.parts[name], part)
	}
	return o, nil
}

type member string

func (m member) String() string { return string(m) }

type hasher struct{}

func (hasher) Sum64(b []byte) uint64 { return xxhash.Sum64(b) }
