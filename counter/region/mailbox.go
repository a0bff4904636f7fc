package region

import (
	"sync"

	"headcount/internal/rows"
)

// mailbox has the publications of an inbox until the receiver takes them. Its methods may be called from any goroutine.
type mailbox struct {
	mu     sync.Mutex // guards the fields below
	missed bool       // publications may be lost
	of     [rows.Partitions]mail
}

// mail are the counters of a partition that have changed.
type mail struct {
	keys     []string
	repairs  []string // those of keys that a repair has brought
	overflow bool     // there were too many, or some that cannot be read
}

// put adds what was published. Keys may be more than once in it.
func (m *mailbox) put(partition int, keys []string, repair, readable bool) {
	m.mu.Lock()
	defer m.mu.Unlock()

	of := &m.of[partition]
	of.keys = append(of.keys, keys...)
	if repair {
		of.repairs = append(of.repairs, keys...)
	}
	if !readable || len(of.keys) > pendingMost {
		of.keys = nil
		of.repairs = nil
		of.overflow = true
	}
}

func (m *mailbox) miss() {
	m.mu.Lock()
	defer m.mu.Unlock()

	m.missed = true
}

// take empties the mailbox.
func (m *mailbox) take() (missed bool, of [rows.Partitions]mail) {
	m.mu.Lock()
	defer m.mu.Unlock()

	missed = m.missed
	of = m.of
	m.missed = false
	m.of = [rows.Partitions]mail{}

	return missed, of
}
