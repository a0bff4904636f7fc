package region

import (
	"sync"

	"headcount/internal/rows"
)

// backlogMost is the maximum number of counters of a partition that a backlog lists. If more have changed, all counters
// of the partition have to be compared.
const backlogMost = 4096

// backlogs record the pending work for each partition that this process owns: the counters that a link has to send, or
// that a receiver has to merge. Their methods may be called from any goroutine.
type backlogs struct {
	mu sync.Mutex // guards of
	of [rows.Partitions]backlog
}

// backlog is the pending work for one partition.
type backlog struct {
	epoch       uint64          // of the claim of this process; 0: it does not own the partition
	changed     map[string]bool // changed counters; true: a repair has brought the change
	missed      bool            // unknown counters may have changed, so a comparison of all is needed
	comparesAll bool            // a comparison of all counters is in progress
	after       string          // cursor of that comparison
}

// job is one portion of a backlog.
type job struct {
	epoch   uint64
	keys    []string
	repairs []bool // for each key, whether a repair has brought the change
	more    bool   // there is more to do

	comparesAll bool // the job is the next page of a comparison of all counters
	begins      bool // it is the first page
	after       string
}

// own sets which partitions this process owns, and the epochs of its claims. Under a new claim, nothing is known of
// what the peer has, so all counters have to be compared.
func (l *backlogs) own(epochs *[rows.Partitions]uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for id, epoch := range epochs {
		// The pending work is dropped as well: the next owner compares all counters.
		if epoch == 0 {
			l.of[id] = backlog{}
		}
		l.of[id].claim(epoch)
	}
}

// owned returns the partitions that this process owns.
func (l *backlogs) owned() (partitions []int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for id := range l.of {
		if l.of[id].epoch != 0 {
			partitions = append(partitions, id)
		}
	}

	return partitions
}

// claim resets the backlog if the claim is newer than the known one.
func (b *backlog) claim(epoch uint64) {
	if epoch > b.epoch {
		*b = backlog{epoch: epoch, missed: true}
	}
}

// committed adds counters that an owner has changed under a claim.
func (l *backlogs) committed(id int, epoch uint64, keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	// An owner may commit before own hears of its claim, up to Config.Every later.
	l.of[id].claim(epoch)
	l.of[id].add(keys, func(int) bool { return false })
}

// addPublished adds counters that a publication lists.
func (l *backlogs) addPublished(id int, keys []string, repair bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].add(keys, func(int) bool { return repair })
}

// putBack puts the unfinished part of a job back into the backlog.
func (l *backlogs) putBack(id int, j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].add(j.keys, func(i int) bool { return j.repairs[i] })
}

func (b *backlog) add(keys []string, repair func(i int) bool) {
	if b.epoch == 0 || b.missed {
		return // the pending comparison covers them
	}

	if b.changed == nil {
		b.changed = map[string]bool{}
	}
	// A counter that a repair has brought once stays marked as repaired until it is passed on.
	for i, key := range keys {
		b.changed[key] = b.changed[key] || repair(i)
	}
	if len(b.changed) > backlogMost {
		b.changed = nil
		b.missed = true
	}
}

// miss records that any counter of a partition may have changed.
func (l *backlogs) miss(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].changed = nil
	l.of[id].missed = true
}

// missAll is miss for all partitions.
func (l *backlogs) missAll() {
	for id := range rows.Partitions {
		l.miss(id)
	}
}

// isComparing reports whether a comparison of all counters of a partition is in progress or pending.
func (l *backlogs) isComparing(id int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.of[id].missed || l.of[id].comparesAll
}

// restart restarts the comparison of a partition.
func (l *backlogs) restart(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].changed = nil
	l.of[id].missed = true
	l.of[id].comparesAll = false
}

// take removes up to most counters from the backlog of a partition, or returns the next page if a comparison is in
// progress. ok is false if there is no work.
func (l *backlogs) take(id, most int) (j job, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	b := &l.of[id]
	if b.epoch == 0 {
		return job{}, false
	}

	j.epoch = b.epoch
	// Changes that are missed during a comparison need another comparison after it.
	if b.missed && !b.comparesAll {
		b.missed = false
		b.comparesAll = true
		b.after = ""
		j.begins = true
	}
	if b.comparesAll {
		j.comparesAll = true
		j.after = b.after
		return j, true
	}

	// The order does not matter: a share contains every change until the moment when it is read.
	for key, repair := range b.changed {
		if len(j.keys) == most {
			j.more = true
			break
		}
		j.keys = append(j.keys, key)
		j.repairs = append(j.repairs, repair)
		delete(b.changed, key)
	}

	return j, len(j.keys) > 0
}

// pageDone records that a page of a comparison is done, and where the next page begins; after the last page next is
// empty.
func (l *backlogs) pageDone(id int, j *job, next string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	// The partition may have been claimed again in the meantime, or its comparison restarted.
	b := &l.of[id]
	isCurrent := b.epoch == j.epoch && b.comparesAll && b.after == j.after
	if isCurrent {
		b.comparesAll = next != ""
		b.after = next
	}
}
