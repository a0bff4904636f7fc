// Package rows is the contract of stores that keep rows of partitions. A partition has one writer at a time, its owner.
//
// A row is a named value: a partition, a collection, a field and bytes that only the owner can interpret. A store knows
// nothing else, in particular nothing about counters. It has five methods, and every store passes the contract tests of
// package rowstest.
//
// # Claims
//
// A process that wants to write a partition claims it, and gets an epoch that is greater than all earlier ones. A claim
// is safe at any moment: from then on the store refuses the commits of all former owners.
//
// # Commits
//
// A commit puts and deletes rows of one partition, atomically and durably. The commits of a partition are numbered, and
// each one names the number that it follows. So a store that has lost its newest commits, as a Redis may in a failover,
// answers with the number that it still has, and the owner writes the lost rows again. A commit may be repeated until
// its outcome is known: a store that already has it does nothing.
package rows

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
)

// Partitions is the number of partitions. Stored data depends on it, so it never changes.
const Partitions = 64

// PartitionOf returns the partition of a key.
func PartitionOf(key string) int { return int(uint32(xxhash.Sum64String(key)) % Partitions) }

// Name names a row within a partition.
type Name struct {
	Collection string
	Field      string
}

// Address is the full address of a row.
type Address struct {
	Partition int
	Name
}

// Found is the result of a read. Value is nil if the row does not exist.
type Found struct {
	Value []byte
	Err   error // ErrUnavailable or nil
}

// Row is a row as a commit writes it. A nil Value deletes the row.
type Row struct {
	Name
	Value []byte
}

// ID is an identifier that only one commit may use until it expires: the store refuses other commits with the same ID.
// Idempotency keys are IDs.
type ID struct {
	Bytes [16]byte
	Until time.Time
}

// Without returns ids without others. It modifies neither.
func Without(ids, others []ID) []ID {
	// Both may be hundreds of thousands, after a long outage.
	gone := make(map[[16]byte]bool, len(others))
	for _, other := range others {
		gone[other.Bytes] = true
	}

	return slices.DeleteFunc(slices.Clone(ids), func(id ID) bool { return gone[id.Bytes] })
}

// Former names a partition to claim. Epoch is that of the caller's former claim, or 0 if there is none.
type Former struct {
	Partition int
	Epoch     uint64
}

// Claim is the result of a claim.
type Claim struct {
	// Epoch is the number of the claim: the store's clock in unix milliseconds, or one more than the former epoch if
	// that is greater. It is 0 if another process owns the partition by a newer claim than the caller's former one;
	// then nothing changed.
	Epoch uint64
	// Number is that of the partition's newest commit, 0 if there is none.
	Number uint64
	// Err says that this partition cannot be claimed now, although others may be; it is ErrUnavailable. Epoch is then
	// 0. The claim may have been made all the same, as after an error of the whole call.
	Err error
}

// Commit is one atomic change of one partition. A Commit without rows and IDs only checks that the store has lost
// nothing.
type Commit struct {
	Partition int
	Epoch     uint64 // of the claim by which the caller owns the partition
	After     uint64 // the number that the partition must have
	Number    uint64 // the number that the partition gets; greater than After
	At        time.Time
	IDs       []ID  // distinct; none of them may be remembered at At
	Asked     []ID  // the same, but the commit does not use them up; their Until is ignored
	Rows      []Row // distinct; at most one for each name
	// Publication goes to all watches if it is not nil.
	Publication []byte
}

// TimeFor returns how much longer commits may take than small ones, in a store that takes time for each row.
func TimeFor(commits []Commit) time.Duration {
	n := 0
	for i := range commits {
		n += len(commits[i].Rows) + len(commits[i].IDs)
	}

	return TimeForRows(n)
}

// TimeForRows returns how much longer a transaction of n rows may take than a small one.
func TimeForRows(n int) time.Duration {
	// A busy PostgreSQL writes several times as many in a second.
	return time.Duration(n) * time.Second / 5000
}

// Place is how far a walk over the rows of a partition has come that takes several calls. The zero value is its
// beginning.
type Place struct {
	Table int  // which of the store's tables comes next, in the order of the walk
	Last  Name // the last row of that table that was examined
	End   bool // all rows were examined
}

type malformed struct{}

func (malformed) Error() string        { return "the store has malformed rows" }
func (malformed) Is(target error) bool { return target == ErrUnavailable }

// Errors of a commit. Only ErrUnavailable leaves open whether the commit was made.
var (
	// ErrUnavailable means that the store is unavailable now. A commit may have been made: repeat it unchanged until
	// its outcome is known.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrMalformed means that the store has data that no store of rows can have written. It is an ErrUnavailable with
	// another text: the partition becomes usable once the data is deleted.
	ErrMalformed error = malformed{}
	// ErrFull means that the store has no room. Nothing was written.
	ErrFull = errors.New("store is full")
)

// Fenced is the error of a commit by a process that does not own the partition, as far as the store knows. Nothing was
// written.
type Fenced struct {
	// Epoch is the store's epoch. If it is lower than that of the commit, the store has lost the claim.
	Epoch uint64
}

// Error implements error.
func (e *Fenced) Error() string { return fmt.Sprintf("fenced by epoch %d", e.Epoch) }

// Lost is the error of a commit that does not follow the newest commit of the store: the store has lost commits of this
// owner. Nothing was written.
type Lost struct {
	Number uint64 // that of the store's newest commit
}

// Error implements error.
func (e *Lost) Error() string { return fmt.Sprintf("the store has no commit after %d", e.Number) }

// Known is the error of a commit with IDs that are remembered. Nothing was written.
type Known struct {
	IDs []ID // the IDs of the commit that are remembered, with their expiry times
}

// Error implements error.
func (e *Known) Error() string { return fmt.Sprintf("%d IDs are remembered", len(e.IDs)) }

// Store keeps rows. Its methods may be called from any goroutine. Errors are ErrUnavailable unless their comment says
// more. Neither the caller nor the store modifies values. A store keeps the values that it gets, but not the slices of
// commits, IDs, rows and addresses: after the call the caller may reuse these.
type Store interface {
	// Claim makes owner the writer of partitions. If a caller names a former claim, it gets no new one if another
	// process has claimed the partition since. A claim whose answer was lost may be repeated. The results are in the
	// order of partitions.
	Claim(ctx context.Context, owner string, partitions []Former) ([]Claim, error)
	// Commit makes each commit atomically and durably, or has no effect. The partitions must be distinct. The errors
	// are in the order of commits: nil, *Fenced, *Lost, *Known, ErrFull or ErrUnavailable. For a commit that the store
	// already has, the error is nil.
	Commit(ctx context.Context, commits []Commit) []error
	// Read returns the rows at addresses, in order. It sees everything that was committed before the call.
	Read(ctx context.Context, addresses []Address) []Found
	// Scan calls each with the rows of a collection whose fields are greater than after, in the byte order of the
	// fields. It stops at the first error of each.
	Scan(
		ctx context.Context, partition int, collection, after string, each func(field string, value []byte) error,
	) error
	// Watch calls received with publications until ctx ends, those of a partition in the order of their commits. It
	// calls missed when it begins to receive publications, and after each gap in which publications may have been lost.
	// Calls of the two functions never overlap.
	Watch(ctx context.Context, received func(partition int, number uint64, publication []byte), missed func()) error
}
