package hot

import (
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/counter"
)

const (
	ratesKept = 4096        // keys whose rates are watched at a time; a new one takes the place of one that was watched for rateOver
	rateOver  = time.Second // the least time over which a rate is taken
)

// rates finds the sums that all processes together write often: the sequence of a version grows
// by one with each write, of whatever process.
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

// hot notes what a write of key has answered, and reports whether the key is hot.
func (r *rates) hot(key string, v counter.Version) bool {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	w := &r.list[xxhash.Sum64String(key)%ratesKept]
	took := now.Sub(w.at)
	if took < rateOver {
		return false // also of another key, whose turn it is
	}
	hot := w.key == key && w.version.Incarnation == v.Incarnation && v.Sequence > w.version.Sequence &&
		float64(v.Sequence-w.version.Sequence) > r.most*took.Seconds()
	if w.key != key {
		w.key = strings.Clone(key) // it may be a part of a request
	}
	w.version, w.at = v, now
	return hot
}
