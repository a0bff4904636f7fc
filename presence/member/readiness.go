package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

// A starting member checks whether the counts are complete, first after minLookPause.
// After each check it doubles the pause, up to maxLookPause.
const (
	minLookPause = time.Millisecond
	maxLookPause = 200 * time.Millisecond
)

// Ready returns nil if the process can serve its roles now, or else the reason.
func (m *Member) Ready() error {
	t := m.table.Load()
	switch {
	case m.leaving.Load():
		return errors.New("the process is shutting down")
	case !m.up.Load():
		return presence.ErrUnavailable
	case t == nil:
		return errors.New("the process has not joined its cluster yet")
	}

	if m.parts.Node != nil {
		ids := t.PartitionsOf(m.self.Name)
		owned := 0
		for _, id := range ids {
			if m.parts.Node.Owns(id) {
				owned++
			}
		}

		if owned < len(ids) {
			return fmt.Errorf("the presence node is taking over its partitions: it has %d of %d", owned, len(ids))
		}
	}

	if m.parts.Gateway != nil {
		// All partitions have an owner, or none has.
		if _, ok := t.Node(0); !ok {
			return errors.New("no presence node is known")
		}
		if !m.read.Load() {
			return errors.New("the counts are not complete yet")
		}
	}

	return nil
}

// StoreState sets whether the store is available. It does not block.
func (m *Member) StoreState(up bool) {
	m.up.Store(up)
	if up {
		// After an outage the lease has ended, or is about to.
		wake.Signal(m.renewNow)
	}
	wake.Signal(m.storeChanged)
}

// followStore notifies the gateway when the store's availability changes, until ctx ends.
func (m *Member) followStore(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.storeChanged:
		}

		if m.up.Load() {
			m.parts.Gateway.StoreBack()
		} else {
			m.parts.Gateway.StoreAway()
		}
	}
}

// awaitCounts waits until complete counts of all pages can be read for the first time.
// Each check reads one page of every bucket, including those that were complete before:
// while partitions change hands, a bucket may lack users again.
func (m *Member) awaitCounts(ctx context.Context) error {
	pages := pagePerBucket(m.buckets)
	for pause := minLookPause; ctx.Err() == nil; pause = min(2*pause, maxLookPause) {
		if m.up.Load() && m.table.Load() != nil && m.complete(ctx, pages) {
			m.read.Store(true)
			return nil
		}

		outage.Sleep(ctx, pause)
	}
	return nil
}

// complete reports whether none of the counts of pages is stale.
func (m *Member) complete(ctx context.Context, pages []string) bool {
	rctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()

	counts, err := m.parts.Store.Counts(rctx, pages)
	return err == nil && !slices.ContainsFunc(counts, func(c presence.Count) bool { return c.Stale })
}

// pagePerBucket returns names of pages, one in each bucket.
func pagePerBucket(buckets int) []string {
	pages := make([]string, buckets)
	for left, n := buckets, 0; left > 0; n++ {
		name := strconv.Itoa(n)
		b := presence.Bucket(name, buckets)
		if pages[b] == "" {
			pages[b] = name
			left--
		}
	}

	return pages
}
