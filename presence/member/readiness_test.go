package member

import (
	"context"
	"testing"

	"headcount/presence"
)

// partly is a store whose counts are stale in some buckets.
type partly struct {
	Store
	stale map[int]bool
}

func (p partly) Counts(_ context.Context, pages []string) ([]presence.Count, error) {
	counts := make([]presence.Count, len(pages))
	for i, page := range pages {
		counts[i] = presence.Count{Page: page, Stale: p.stale[presence.Bucket(page, presence.DefaultBuckets)]}
	}

	return counts, nil
}

// TestNotReadyBeforeTheLastBucket: a process is ready only when the counts of every bucket are complete. A complete
// count of the site is not enough.
func TestNotReadyBeforeTheLastBucket(t *testing.T) {
	complete := func(stale map[int]bool) bool {
		m := &Member{parts: Parts{Store: partly{stale: stale}}}
		return m.complete(t.Context(), pagePerBucket(presence.DefaultBuckets))
	}

	if !complete(nil) {
		t.Error("not complete, though the counts of no bucket are stale")
	}

	for b := range presence.DefaultBuckets {
		if complete(map[int]bool{b: true}) {
			t.Errorf("complete, though the counts of bucket %d are stale", b)
		}
	}
}

// unheard is a store that cannot be told of the end of a lease.
type unheard struct{ Store }

func (unheard) Leave(context.Context, presence.Process) error { return presence.ErrUnavailable }

// TestMembershipEndsWithTheLease: a process that is told to end before it takes part renews nothing any more. It used
// to try that without a pause.
func TestMembershipEndsWithTheLease(t *testing.T) {
	m := &Member{parts: Parts{Store: unheard{}}, renewing: make(chan struct{}, 1)}
	m.end(t.Context())

	if err := m.membership(t.Context()); err != nil {
		t.Error(err)
	}
}
