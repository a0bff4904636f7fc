package pagestable

import (
	"context"
	"errors"
	"slices"

	"headcount/internal/postgres"
	"headcount/presence"
)

// readBatch is how many counts are read at once.
const readBatch = 1024

// errStale means that the store of presence may lack users.
var errStale = errors.New("counts are stale")

// isAway reports whether a comparison failed for a reason that is logged elsewhere.
func isAway(err error) bool {
	return errors.Is(err, errStale) || errors.Is(err, presence.ErrUnavailable) || errors.Is(err, postgres.ErrAway)
}

// compare compares the rows of the served buckets with the store of presence.
func (t *Table) compare(ctx context.Context, served map[int]bool) error {
	if err := t.compareRows(ctx, served); err != nil {
		return err
	}
	if err := t.comparePages(ctx, served); err != nil {
		return err
	}

	return t.rows.Sweep(ctx)
}

func serves(served map[int]bool, page string) bool {
	return served[presence.Bucket(page, presence.DefaultBuckets)]
}

// compareRows looks for rows that say that a page has users.
func (t *Table) compareRows(ctx context.Context, served map[int]bool) error {
	for last := ""; ; {
		rows, err := t.rows.Occupied(ctx, last, maxRows)
		if err != nil || len(rows) == 0 {
			return err
		}
		last = rows[len(rows)-1].Page

		var gone []presence.Count
		rows = slices.DeleteFunc(rows, func(row presence.Count) bool { return !serves(served, row.Page) })
		counts, err := t.read(ctx, rows)
		if err != nil {
			return err
		}

		for i, c := range counts {
			isUnknown := c.Version == presence.Version{}
			if isUnknown || !t.matches(c.Page) {
				gone = append(gone, rows[i])
			} else if c.Newer(rows[i]) {
				t.queue(c)
			}
		}
		if len(gone) == 0 {
			continue
		}
		if err := t.rows.Drop(ctx, gone); err != nil {
			return err
		}
	}
}

// comparePages looks for pages with users that have no row, or an older one.
func (t *Table) comparePages(ctx context.Context, served map[int]bool) error {
	var pages []presence.Count
	var failed error
	err := t.cfg.Pages.Pages(ctx, func(names []string) {
		for _, name := range names {
			if failed != nil || !serves(served, name) || !t.matches(name) {
				continue
			}
			pages = append(pages, presence.Count{Page: name})
			if len(pages) == maxRows {
				failed = t.compareSome(ctx, pages)
				pages = pages[:0]
			}
		}
	})
	if err := errors.Join(err, failed); err != nil {
		return err
	}

	return t.compareSome(ctx, pages)
}

func (t *Table) compareSome(ctx context.Context, pages []presence.Count) error {
	counts, err := t.read(ctx, pages)
	if err != nil {
		return err
	}

	counts = slices.DeleteFunc(counts, func(c presence.Count) bool { return c.Users == 0 })
	lacks, err := t.rows.Lacking(ctx, counts)
	for _, c := range lacks {
		t.queue(c)
	}

	return err
}

// read reads the counts of pages, in their order.
func (t *Table) read(ctx context.Context, pages []presence.Count) (counts []presence.Count, err error) {
	for some := range slices.Chunk(pages, readBatch) {
		names := make([]string, len(some))
		for i := range some {
			names[i] = some[i].Page
		}

		read, err := t.cfg.Pages.Counts(ctx, names)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(read, func(c presence.Count) bool { return c.Stale }) {
			return nil, errStale
		}
		counts = append(counts, read...)
	}

	return counts, nil
}
