package presence

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrNameTaken says that another incarnation of this name has a live lease:
	// the same process before its restart, or another one with the same address.
	ErrNameTaken = errors.New("name is taken")
	// ErrFacts says that a process's settings are not those of the cluster; the
	// text names the fact and both values. It cannot take part.
	ErrFacts = errors.New("settings differ from the cluster's")
)

// Process is one running process of the region.
type Process struct {
	Name        string // its cluster address, unique
	Roles       []string
	Incarnation uint64 // tells two runs of the same name apart
}

// Processes knows who runs.
type Processes interface {
	// Renew keeps p's lease for ttl and returns all processes whose lease is
	// live, p among them, sorted by name. The first call of a process checks the
	// cluster facts, and where there are none it waits for running processes to
	// write theirs before it writes its own. The error is ErrNameTaken, ErrFacts
	// or ErrUnavailable.
	Renew(ctx context.Context, p Process, ttl time.Duration) ([]Process, error)
	// Leave ends p's lease now.
	Leave(ctx context.Context, p Process) error
}
