package presence

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// The roles a process may have, as leases and settings name them.
const (
	RoleGateway    = "gateway"
	RolePresence   = "presence"
	RoleDispatcher = "dispatcher"
)

var (
	// ErrNameTaken means that another incarnation of this name has a live lease:
	// the same process before its restart, or another process with the same address.
	ErrNameTaken = errors.New("name is taken")
	// ErrNotOwner means that the node that was asked does not own the user's partition.
	ErrNotOwner = errors.New("the node does not own the partition")
	// ErrOvertaken means that a later call about the same hold has been carried out.
	ErrOvertaken = errors.New("a later call about the hold has been carried out")
	// ErrNoFacts means that the store has no cluster facts, but that a running process may
	// be about to write them. The caller tries again soon.
	ErrNoFacts = errors.New("no cluster facts yet")
	// ErrFacts means that the process's settings differ from the cluster's, so that it
	// cannot take part. The text names the fact and both values.
	ErrFacts = errors.New("settings differ from the cluster's")
)

// Process is one running process of the region.
type Process struct {
	Name        string // its cluster address, unique
	Roles       []string
	Incarnation uint64 // distinguishes the runs under one name, see NewIncarnation
}

// randomPart is how many incarnations one millisecond has.
const randomPart = 1_000_000

// NewIncarnation returns a number for a run of a process. Later runs have greater numbers.
// Processes that start in the same millisecond get different numbers: with the same name
// and number, both would keep one lease.
func NewIncarnation(start time.Time) uint64 {
	return uint64(start.UnixMilli())*randomPart + rand.Uint64N(randomPart)
}

// Started returns when the run with the incarnation started.
func Started(incarnation uint64) time.Time {
	return time.UnixMilli(int64(incarnation / randomPart))
}

// IncarnationName returns the name of one run of a process, "process/incarnation". What a
// gateway stores under this name is valid until that run ends.
func IncarnationName(process string, incarnation uint64) string {
	return process + "/" + strconv.FormatUint(incarnation, 10)
}

// ProcessOf returns the name of the process in an IncarnationName.
func ProcessOf(name string) string {
	// From the end: nothing is known of the form of a name, but the number after it has no slash.
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i]
	}
	return name
}

// Processes has the leases of the running processes.
type Processes interface {
	// Renew extends p's lease to ttl from now, and returns all processes that have a
	// lease, including p, sorted by name, and the time by the store's clock. The first call
	// of a process checks the cluster facts. If the store has none, calls return ErrNoFacts
	// for as long as a running process may need to write them again; after that a call writes
	// p's facts. Other errors are ErrNameTaken, ErrFacts and ErrUnavailable.
	Renew(ctx context.Context, p Process, ttl time.Duration) ([]Process, time.Time, error)
	// Leave ends p's lease now.
	Leave(ctx context.Context, p Process) error
}
