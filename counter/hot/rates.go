package hot

import (
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/counter"
)

const (
	ratesKept = 4096        // keys that are observed at a time; a new one may replace one that was observed for rateOver
	rateOver  = time.Second // the shortest time over which a rate is measured
)

// rates finds the sums that all processes together write often: the sequence of a version grows by 1 with each write of
// any process.
type rates struct {
	most float64 // writes a second

	mu   sync.Mutex // guards list
	list [ratesKept]watched
}

// watched is a key that this process has written.
type watched struct {
	key     string
	version counter.Version
	at      time.Time
}

func newRates(most int) *rates { return &rates{most: float64(most)} }

// hot notes the version that a write of key returned, and reports whether the key is hot.
func (r *rates) hot(key string, v counter.Version) bool {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	w := &r.list[xxhash.Sum64String(key)%ratesKept]
	took := now.Sub(w.at)
	if took < rateOver {
		return false // also if another key is being observed
	}
	hot := w.key == key && w.version.Incarnation == v.Incarnation && v.Sequence > w.version.Sequence &&
		float64(v.Sequence-w.version.Sequence) > r.most*took.Seconds()
	if w.key != key {
		w.key = strings.Clone(key) // it may be a slice of a request
	}
	w.version, w.at = v, now
	return hot
}
