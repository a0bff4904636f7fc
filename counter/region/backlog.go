package region

import (
	"sync"

	"headcount/internal/rows"
)

// backlogMost is the number of counters of a partition that a backlog names. If there are more, it has all of them.
const backlogMost = 4096

// backlogs have what is to be done for the counters of each partition that this process owns: what a link has to send,
// or what a receiver has to merge. Their methods may be called from any goroutine.
type backlogs struct {
	mu sync.Mutex // guards of
	of [rows.Partitions]backlog
}

// backlog is that of one partition.
type backlog struct {
	epoch   uint64          // of the claim of this process; 0: it does not own the partition
	changed map[string]bool // counters, and whether a repair has brought them
	missed  bool            // further ones may have changed, so all have to be looked at
	whole   bool            // all of them are being looked at
	after   string          // behind this cursor
}

// job is a part of a backlog.
type job struct {
	epoch   uint64
	keys    []string
	repairs []bool // of the same keys
	more    bool   // there is more to do

	whole  bool // it is a page of all counters
	begins bool // the first one
	after  string
}

// own follows which partitions this process owns, and by which claims. Of a claim that is new nothing is known.
func (l *backlogs) own(epochs *[rows.Partitions]uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for id, epoch := range epochs {
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

// claim begins anew if a claim is newer than the one that is known.
func (b *backlog) claim(epoch uint64) {
	if epoch > b.epoch {
		*b = backlog{epoch: epoch, missed: true}
	}
}

// committed adds counters that an owner has changed under a claim.
func (l *backlogs) committed(id int, epoch uint64, keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].claim(epoch)
	l.of[id].add(keys, func(int) bool { return false })
}

// heard adds counters that a publication names.
func (l *backlogs) heard(id int, keys []string, repair bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].add(keys, func(int) bool { return repair })
}

// putBack adds what a job could not do.
func (l *backlogs) putBack(id int, j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].add(j.keys, func(i int) bool { return j.repairs[i] })
}

func (b *backlog) add(keys []string, repair func(i int) bool) {
	if b.epoch == 0 || b.missed {
		return // all of them will be looked at
	}

	if b.changed == nil {
		b.changed = map[string]bool{}
	}
	// Whoever has once learned of a repair passes it on as one.
	for i, key := range keys {
		b.changed[key] = b.changed[key] || repair(i)
	}
	if len(b.changed) > backlogMost {
		b.changed = nil
		b.missed = true
	}
}

// miss notes that anything in a partition may have changed.
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

// compares reports whether all counters of a partition are looked at, or will be.
func (l *backlogs) compares(id int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.of[id].missed || l.of[id].whole
}

// restart has a partition that is being looked at as a whole looked at from the beginning.
func (l *backlogs) restart(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.of[id].changed = nil
	l.of[id].missed = true
	l.of[id].whole = false
}

// take takes at most most counters out of the backlog of a partition, or the next page of all, and reports whether
// there is anything to do.
func (l *backlogs) take(id, most int) (j job, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	b := &l.of[id]
	if b.epoch == 0 {
		return job{}, false
	}

	j.epoch = b.epoch
	// What is missed while all of them are looked at needs another round, after this one.
	if b.missed && !b.whole {
		b.missed = false
		b.whole = true
		b.after = ""
		j.begins = true
	}
	if b.whole {
		j.whole = true
		j.after = b.after
		return j, true
	}

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

// turn notes that a page of all counters is done, and where the next one begins; after the last one next is empty.
func (l *backlogs) turn(id int, j *job, next string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	// Meanwhile the partition may have been claimed anew, or its round may have begun again.
	b := &l.of[id]
	isThat := b.epoch == j.epoch && b.whole && b.after == j.after
	if isThat {
		b.whole = next != ""
		b.after = next
	}
}
