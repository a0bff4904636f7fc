package region

import (
	"sort"
	"sync"

	"headcount/internal/rows"
)

// logged is the number of counters of a partition that are known to have changed. A region that is further behind is sent
// the whole partition.
const logged = 4096

// logs have the changes of all partitions that this process owns. All methods may be called from any goroutine.
type logs struct {
	mu sync.Mutex // guards of
	of [rows.Partitions]*log
}

// log has the counters of a partition that have changed since this process claimed it, each once, at the place of its
// last change. It begins with the claim, and has the epoch of the claim as its name.
type log struct {
	epoch   uint64
	end     uint64            // the place of the last change; the first one has 1
	trimmed uint64            // changes up to this place are not in it
	places  map[string]uint64 // of each counter
	order   []logEntry        // by place; an entry is outdated if its counter has changed again
}

type logEntry struct {
	key   string
	place uint64
}

// add notes changes.
func (l *logs) add(partition int, epoch uint64, keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	of := l.of[partition]
	if of == nil || of.epoch < epoch {
		of = newLog(epoch)
		l.of[partition] = of
	}
	if of.epoch == epoch {
		of.add(keys)
	}
}

func newLog(epoch uint64) *log { return &log{epoch: epoch, places: map[string]uint64{}} }

func (l *log) add(keys []string) {
	for _, key := range keys {
		l.end++
		l.places[key] = l.end
		l.order = append(l.order, logEntry{key, l.end})
	}

	for len(l.places) > logged {
		first := l.order[0]
		l.order = l.order[1:]
		if l.places[first.key] == first.place {
			delete(l.places, first.key)
			l.trimmed = first.place
		}
	}
	// Counters that change all the time leave more outdated entries than there are others.
	if len(l.order) > 2*logged {
		l.compact()
	}
}

func (l *log) compact() {
	order := make([]logEntry, 0, len(l.places))
	for _, e := range l.order {
		if l.places[e.key] == e.place {
			order = append(order, e)
		}
	}
	l.order = order
}

// own makes the logs those of the claims with these epochs.
func (l *logs) own(epochs *[rows.Partitions]uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for id, epoch := range epochs {
		of := l.of[id]
		switch {
		case epoch == 0:
			l.of[id] = nil
		case of == nil || of.epoch < epoch:
			l.of[id] = newLog(epoch)
		}
	}
}

// owned returns the partitions that have logs.
func (l *logs) owned() (partitions []int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for id, of := range l.of {
		if of != nil {
			partitions = append(partitions, id)
		}
	}

	return partitions
}

// changes are what a log has after a position.
type changes struct {
	owned   bool     // there is a log
	end     Position // of the log
	entries []logEntry
	more    bool // there are further ones
	whole   bool // the log does not reach back to the position
}

// after returns at most limit changes of a partition after a position.
func (l *logs) after(partition int, at Position, limit int) changes {
	l.mu.Lock()
	defer l.mu.Unlock()

	of := l.of[partition]
	if of == nil {
		return changes{}
	}

	is := changes{owned: true, end: Position{of.epoch, of.end}}
	if at.Epoch != of.epoch || at.Place < of.trimmed || at.Place > of.end {
		is.whole = true
		return is
	}

	first := sort.Search(len(of.order), func(i int) bool { return of.order[i].place > at.Place })
	for _, e := range of.order[first:] {
		if of.places[e.key] != e.place {
			continue
		}
		if len(is.entries) == limit {
			is.more = true
			break
		}
		is.entries = append(is.entries, e)
	}

	return is
}
