// Package transfer reads and writes export files: counters with everything that a store keeps of them, as lines of
// JSON.
//
//	{"format":1,"at":"2030-10-10T12:11:42Z"}
//	{"key":"views:1","kind":"sum",…}                  a counter, see counter.Copy; in the order of the names' bytes
//	{"site":"shop","key":"views:1","kind":"sum",…}    a counter of a site other than the default one
//	{"counters":1,"deleted":1700000000000}            the end: how many counters, and the highest deleted incarnation
//
// A file without the end is incomplete: an export can be resumed after its last complete line ([Resume]). An import
// may be repeated, because a store keeps a counter that has the same version or a greater one. Files have no top
// lists, idempotency keys and limits. Files of older releases have lines of idempotency keys, {"identities":[…]},
// which an import skips.
//
// A [Place] says where the counters are. What it opens is the same for all stores: rows of partitions and, with
// PostgreSQL, exact counters apart from them.
package transfer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"headcount/counter"
	"headcount/presence"
)

// Format is the format number of export files.
const Format = 1

// Bounds of one transaction of an import: counters, and their members, entries, time buckets, reservations and values
// of dimensions together. A single counter may have more.
const (
	batchCounters = 1000
	batchParts    = 20_000
)

var (
	// ErrFormat is wrapped by every error about an invalid file.
	ErrFormat = errors.New("bad file")
	// ErrCut means that a file has no end. Its counters were imported.
	ErrCut = fmt.Errorf("%w: it has no end, so the export was interrupted; resume it (export --resume) and import the "+
		"whole file again", ErrFormat)
)

// begin is how a file begins.
const begin = `{"format":`

var errBegin = fmt.Errorf("%w: it does not begin like an export", ErrFormat)

// Progress observes a transfer.
type Progress interface {
	// Transferred is called after some counters, and at the end.
	Transferred(counters, restored int, bytes int64)
}

type (
	headLine struct {
		Format int       `json:"format"`
		At     time.Time `json:"at"`
	}
	endLine struct {
		Counters int    `json:"counters"`
		Deleted  uint64 `json:"deleted"`
	}
	// line is any line of a file.
	line struct {
		Format     *int       `json:"format"`
		Site       string     `json:"site"`
		Key        *string    `json:"key"`
		Identities []struct{} `json:"identities"` // of older releases
		Counters   *int       `json:"counters"`
		Deleted    uint64     `json:"deleted"`
	}
)

// Position is the end of the complete lines of a file.
type Position struct {
	Offset   int64  // after the last complete line of a counter; 0: there is no first line yet
	After    string // name of that counter
	Counters int
	Whole    bool // the file is complete
}

// Resume finds where to resume an export.
func Resume(r io.Reader) (Position, error) {
	var p Position
	in := bufio.NewReaderSize(r, 1<<16)
	for at := int64(0); !p.Whole; {
		text, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// What has no newline was cut off, so it does not count.
			return p, p.checkRest(text)
		}
		if err != nil {
			return p, err
		}

		at += int64(len(text))
		if err := p.take(text, at); err != nil {
			return p, err
		}
	}

	return p, nil
}

// checkRest refuses a file whose first line is incomplete, and does not begin like that of an export: it may be another
// file. Any other incomplete line is written anew.
func (p *Position) checkRest(text []byte) error {
	n := min(len(text), len(begin))
	if p.Offset == 0 && string(text[:n]) != begin[:n] {
		return errBegin
	}

	return nil
}

// take moves the position beyond a line, which ends there.
func (p *Position) take(text []byte, end int64) error {
	l, err := parse(text, p.Offset == 0)
	if err != nil {
		return err
	}

	switch {
	case l.Format != nil:
		p.Offset = end
	case l.Key != nil:
		// The export goes on after the last counter whose line is whole.
		p.After, err = counter.NameIn(l.Site, *l.Key)
		if err != nil {
			return fmt.Errorf("%w: a counter: %w", ErrFormat, err)
		}
		p.Offset = end
		p.Counters++
	case l.Counters != nil:
		p.Whole = true
	}

	return nil
}

// parse parses a line; with first it must be the first one of a file.
func parse(text []byte, first bool) (l line, err error) {
	if err := json.Unmarshal(text, &l); err != nil {
		return l, fmt.Errorf("%w: a line is not JSON: %w", ErrFormat, err)
	}
	if first {
		return l, l.checkFirst()
	}

	isKnown := l.Key != nil || l.Identities != nil || l.Counters != nil
	if !isKnown {
		return l, fmt.Errorf("%w: a line is neither a counter nor the end", ErrFormat)
	}

	return l, nil
}

// checkFirst returns an error if a file with this first line is no export, or one of another format.
func (l *line) checkFirst() error {
	if l.Format == nil {
		return errBegin
	}
	if *l.Format != Format {
		return fmt.Errorf("%w: its format is %d, this version knows %d; use the version that wrote it",
			ErrFormat, *l.Format, Format)
	}

	return nil
}

// writer writes lines and counts the counters.
type writer struct {
	out      *bufio.Writer
	bytes    int64
	counters int
	progress Progress
}

func (w *writer) line(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}

	n, err := w.out.Write(append(text, '\n'))
	w.bytes += int64(n)

	return err
}

// counter writes a counter.
func (w *writer) counter(c counter.Copy) error {
	w.counters++
	if w.counters%batchCounters == 0 {
		w.progress.Transferred(w.counters, 0, w.bytes)
	}

	return w.line(c)
}

// Of returns a Dumper of the counters of one site.
func Of(site presence.Site, from counter.Dumper) counter.Dumper { return ofSite{from, site} }

type ofSite struct {
	counter.Dumper
	site presence.Site
}

// Dump implements counter.Dumper.
func (o ofSite) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	return o.Dumper.Dump(ctx, after, func(c counter.Copy) error {
		if site, _ := presence.SplitName(c.Key); site != o.site {
			return nil
		}

		return each(c)
	})
}

// Export writes everything after the position to out.
func Export(ctx context.Context, out io.Writer, from counter.Dumper, p Position, progress Progress) error {
	w := &writer{out: bufio.NewWriterSize(out, 1<<16), bytes: p.Offset, counters: p.Counters, progress: progress}
	if p.Offset == 0 {
		if err := w.line(headLine{Format, time.Now().UTC().Truncate(time.Second)}); err != nil {
			return err
		}
	}

	deleted, err := from.Deleted(ctx)
	if err != nil {
		return err
	}
	if err := from.Dump(ctx, p.After, w.counter); err != nil {
		return errors.Join(err, w.out.Flush()) // so that a resumed export continues after it
	}

	if err := w.line(endLine{w.counters, deleted}); err != nil {
		return err
	}
	if err := w.out.Flush(); err != nil {
		return err
	}
	progress.Transferred(w.counters, 0, w.bytes)

	return nil
}

var errSites = fmt.Errorf("%w: it has counters of several sites, which cannot go into one; export each with --site",
	ErrFormat)

// reader imports a file.
type reader struct {
	to       counter.Restorer
	rules    *counter.Rules
	into     *presence.Site
	progress Progress

	batch    []counter.Copy
	parts    int
	site     presence.Site // of the last counter, in the file
	bytes    int64
	counters int
	restored int
}

// Import puts all counters of a file into a store: those of one site into the site into, or if that is nil, each into
// its own site.
func Import(
	ctx context.Context, in io.Reader, to counter.Restorer, rules *counter.Rules, into *presence.Site,
	progress Progress,
) error {
	r := &reader{to: to, rules: rules, into: into, progress: progress}
	lines := bufio.NewReaderSize(in, 1<<16)
	for n := 1; ; n++ {
		text, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// What is left of the last line was cut off, so it is not imported.
			return r.cut(ctx, n == 1)
		}
		if err != nil {
			return err
		}

		r.bytes += int64(len(text))
		l, err := r.line(ctx, text, n == 1)
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if l.Counters != nil {
			return r.end(ctx, l)
		}
	}
}

// cut ends the import of a file without an end. What it has is imported.
func (r *reader) cut(ctx context.Context, isEmpty bool) error {
	if isEmpty {
		return fmt.Errorf("%w: it is empty", ErrFormat)
	}

	return errors.Join(ErrCut, r.flush(ctx))
}

// line imports a line, unless it is the last one. If it is wrong, those before it are imported.
func (r *reader) line(ctx context.Context, text []byte, first bool) (line, error) {
	l, err := parse(text, first)
	if err == nil && l.Key != nil {
		err = r.counter(ctx, text)
	}
	if errors.Is(err, ErrFormat) {
		// The lines before it are whole, and the import may be repeated with a better file.
		err = errors.Join(err, r.flush(ctx))
	}

	return l, err
}

func (r *reader) counter(ctx context.Context, text []byte) error {
	// Parsed once more, because only now it is known to be a counter.
	var c counter.Copy
	if err := json.Unmarshal(bytes.TrimSpace(text), &c); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if err := r.move(&c); err != nil {
		return err
	}

	r.counters++
	r.batch = append(r.batch, c)
	r.parts += partsOf(&c)
	if len(r.batch) < batchCounters && r.parts < batchParts {
		return nil
	}

	return r.flush(ctx)
}

// partsOf returns how many parts of a counter have to be written: about as many rows as it takes, or more.
func partsOf(c *counter.Copy) int {
	n := len(c.Members) + len(c.Hashes) + len(c.Ledger) + len(c.Steps) + len(c.Reservations)
	for i := range c.Dimensions {
		n += len(c.Dimensions[i].Values)
	}

	return n
}

// move moves a counter into the site of the import. All counters of the file have to be of one site then.
func (r *reader) move(c *counter.Copy) error {
	if r.into == nil {
		return nil
	}

	site, key := presence.SplitName(c.Key)
	if r.counters > 0 && site != r.site {
		return errSites
	}
	r.site = site
	c.Key = r.into.Qualify(key)

	return nil
}

func (r *reader) flush(ctx context.Context) error {
	if len(r.batch) == 0 {
		return nil
	}

	n, err := r.to.Restore(ctx, r.batch, r.rules)
	if err != nil {
		return err
	}
	r.restored += n
	r.batch = r.batch[:0]
	r.parts = 0
	r.progress.Transferred(r.counters, r.restored, r.bytes)

	return nil
}

func (r *reader) end(ctx context.Context, l line) error {
	if err := r.flush(ctx); err != nil {
		return err
	}
	// Nothing else would show that lines in the middle are missing.
	if *l.Counters != r.counters {
		return fmt.Errorf("%w: it has %d counters, and its end says %d", ErrFormat, r.counters, *l.Counters)
	}

	// After all counters: if the deletions were recorded first, the counters would get greater incarnations than they
	// have in the file, although they are newer than those deletions.
	if err := r.to.RestoreDeleted(ctx, l.Deleted); err != nil {
		return err
	}
	r.progress.Transferred(r.counters, r.restored, r.bytes)

	return nil
}
