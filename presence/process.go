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
	// ErrNameTaken says that another incarnation of this name has a live lease:
	// the same process before its restart, or another one with the same address.
	ErrNameTaken = errors.New("name is taken")
	// ErrNotOwner says that the node that was asked does not own the user's partition.
	ErrNotOwner = errors.New("the node does not own the partition")
	// ErrNoFacts says that the store has no cluster facts, and that a running process
	// may be about to write them. The caller asks again soon.
	ErrNoFacts = errors.New("no cluster facts yet")
	// ErrFacts says that a process's settings differ from the cluster's, so that the
	// process cannot take part. The text names the fact and both values.
	ErrFacts = errors.New("settings differ from the cluster's")
)

// Process is one running process of the region.
type Process struct {
	Name        string // its cluster address, unique
	Roles       []string
	Incarnation uint64 // tells two runs of the same name apart, see NewIncarnation
}

// randomPart is how many incarnations one millisecond has.
const randomPart = 1_000_000

// NewIncarnation returns a number for the run of a process that starts at a time. Later runs
// have greater numbers. Two processes that start in the same millisecond get different numbers:
// with one name and one number, both would go on under one lease.
func NewIncarnation(start time.Time) uint64 {
	return uint64(start.UnixMilli())*randomPart + rand.Uint64N(randomPart)
}

// Started returns when the run with the incarnation started.
func Started(incarnation uint64) time.Time {
	if incarnation >= 1e15 { // older releases have the milliseconds alone
		incarnation /= randomPart
	}
	return time.UnixMilli(int64(incarnation))
}

// IncarnationName names one run (life) of a process. What a gateway notes in the store
// under this name is valid until that run ends.
func IncarnationName(process string, incarnation uint64) string {
	return process + "/" + strconv.FormatUint(incarnation, 10)
}

// ProcessOf returns the name of the process that the life belongs to.
func ProcessOf(name string) string {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i]
	}
	return name
}

// Processes keeps the leases of the running processes.
type Processes interface {
	// Renew keeps p's lease for ttl and returns all processes whose lease is
	// live, p among them, sorted by name. The first call of a process checks the
	// cluster facts. When the store has none, calls return ErrNoFacts for as long as
	// a running process may take to write them again; then a call writes p's facts.
	// Other errors are ErrNameTaken, ErrFacts and ErrUnavailable.
	Renew(ctx context.Context, p Process, ttl time.Duration) ([]Process, error)
	// Leave ends p's lease now.
	Leave(ctx context.Context, p Process) error
}
