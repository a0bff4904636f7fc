package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

const (
	readBatch = 500  // pages in one run of read.lua or detach.lua
	scanBatch = 1000 // endpoints looked at in one step
)

// known is the client when there is one, or the word that Redis is away.
func (s *Store) known(ctx context.Context) (*client, error) {
	if c := s.client.Load(); c != nil {
		return c, nil
	}
	var c *client
	err := s.do(ctx, func(_ context.Context, found *client) error {
		c = found
		return nil
	})
	return c, err
}

// Counts implements presence.Counters.
func (s *Store) Counts(ctx context.Context, pages []string) ([]presence.Count, error) {
	counts, err := s.read(ctx, "", pages)
	if err != nil {
		return nil, fmt.Errorf("redisstore: counts of %d pages: %w", len(pages), err)
	}
	return counts, nil
}

// Attach implements presence.Endpoints.
func (s *Store) Attach(ctx context.Context, gateway string, pages []string) ([]presence.Count, error) {
	if gateway == "" || strings.Contains(gateway, "\x00") {
		return nil, fmt.Errorf("redisstore: attach: %q is no gateway", gateway)
	}
	counts, err := s.read(ctx, gateway, pages)
	if err != nil {
		return nil, fmt.Errorf("redisstore: attach %s to %d pages: %w", gateway, len(pages), err)
	}
	return counts, nil
}

// pagesByBucket returns the places of pages, by bucket, in batches.
func (s *Store) pagesByBucket(pages []string, fn func(bucket int, places []int)) {
	buckets := map[int][]int{}
	for i, page := range pages {
		b := presence.Bucket(page, s.cfg.Buckets)
		buckets[b] = append(buckets[b], i)
	}
	for b, all := range buckets {
		for places := range slices.Chunk(all, readBatch) {
			fn(b, places)
		}
	}
}

// read returns the counts and, when gateway is not empty, attaches it to them.
func (s *Store) read(ctx context.Context, gateway string, topics []string) ([]presence.Count, error) {
	if !slices.ContainsFunc(topics, func(t string) bool { return !presence.IsPage(t) }) {
		counts, _, err := s.readPages(ctx, gateway, topics, false)
		return counts, err
	}
	var names [2][]string // pages, and the others
	var places [2][]int
	for i, t := range topics {
		kind := 0
		if !presence.IsPage(t) {
			kind = 1
		}
		names[kind], places[kind] = append(names[kind], t), append(places[kind], i)
	}
	pages, _, err := s.readPages(ctx, gateway, names[0], false)
	if err != nil {
		return nil, err
	}
	others, err := s.readTopics(ctx, gateway, names[1])
	if err != nil {
		return nil, err
	}
	counts := make([]presence.Count, len(topics))
	for kind, part := range [2][]presence.Count{pages, others} {
		for j, i := range places[kind] {
			counts[i] = part[j]
		}
	}
	return counts, nil
}

// Parts is the count of a page and each region's share of it: this one's first,
// without those that are left out, the others by name.
func (s *Store) Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error) {
	counts, parts, err := s.readPages(ctx, "", []string{page}, true)
	if err != nil {
		return presence.Count{}, nil, fmt.Errorf("redisstore: parts of a count: %w", err)
	}
	return counts[0], parts, nil
}

// readPages returns the counts and, when gateway is not empty, attaches it to
// them; with parts also the regions' shares of the last page.
func (s *Store) readPages(ctx context.Context, gateway string, pages []string, parts bool) (counts []presence.Count, shares []presence.Part, err error) {
	if len(pages) == 0 {
		return nil, nil, nil
	}
	c, err := s.known(ctx)
	if err != nil {
		return nil, nil, err
	}
	var calls []*call
	var places [][]int
	s.pagesByBucket(pages, func(b int, at []int) {
		prefix := pagePrefix(b)
		cl := &call{
			script: "read",
			keys:   append(make([]string, 0, 3+len(at)), stateKey(b), readyKey(b), endpointsKey(b)),
			args:   []any{channel(b, s.db), c.publish, s.cfg.Partitions, len(prefix), gateway, flag(parts)},
		}
		for _, i := range at {
			cl.keys = append(cl.keys, prefix+pages[i])
		}
		calls, places = append(calls, cl), append(places, at)
	})
	if err := s.run(ctx, calls); err != nil {
		return nil, nil, err
	}
	counts = make([]presence.Count, len(pages))
	for k, cl := range calls {
		reply := cl.reply.([]any)
		for j, i := range places[k] {
			counts[i] = s.count(pages[i], reply[1+j].(string), reply[0].(string))
			if parts {
				shares = s.parts(reply[1+j].(string))
			}
		}
	}
	return counts, shares, nil
}

// parts reads what read.lua appends to a count: "users name=users …".
func (s *Store) parts(text string) []presence.Part {
	fields := strings.Fields(text)
	if len(fields) < 5 {
		return nil
	}
	own, _ := strconv.ParseInt(fields[4], 10, 64)
	parts := []presence.Part{{Region: s.cfg.Facts.Region, Users: own}}
	slices.Sort(fields[5:])
	for _, f := range fields[5:] {
		name, users, _ := strings.Cut(f, "=")
		n, _ := strconv.ParseInt(users, 10, 64)
		parts = append(parts, presence.Part{Region: name, Users: n})
	}
	return parts
}

// parseStale reads what staleWord of pairs.lua says: whether counts lack users,
// and which regions are left out of them.
func parseStale(word string) (stale bool, without string) {
	flag, without, _ := strings.Cut(word, " ")
	return flag == "1", without
}

// count reads "users updated incarnation sequence", and what staleWord says.
func (s *Store) count(page, text, word string) presence.Count {
	c := presence.Count{Page: page}
	c.Stale, c.Without = parseStale(word)
	fields := strings.Fields(text)
	if len(fields) < 4 {
		return c
	}
	c.Users, _ = strconv.ParseInt(fields[0], 10, 64)
	if sec, _ := strconv.ParseInt(fields[1], 10, 64); sec > 0 {
		c.Updated = time.Unix(sec, 0).UTC()
	}
	c.Version.Incarnation, _ = strconv.ParseUint(fields[2], 10, 64)
	c.Version.Sequence, _ = strconv.ParseUint(fields[3], 10, 64)
	s.seen(c.Version.Incarnation)
	return c
}

// Detach implements presence.Endpoints.
func (s *Store) Detach(ctx context.Context, gateway string, pages []string) error {
	if len(pages) == 0 {
		return nil
	}
	c, err := s.known(ctx)
	if err == nil {
		var calls []*call
		s.pagesByBucket(pages, func(b int, at []int) {
			cl := &call{
				script: "detach",
				keys:   []string{stateKey(b), endpointsKey(b)},
				args:   append(make([]any, 0, 3+len(at)), channel(b, s.db), c.publish, gateway),
			}
			for _, i := range at {
				cl.args = append(cl.args, pages[i])
			}
			calls = append(calls, cl)
		})
		err = s.run(ctx, calls)
	}
	if err != nil {
		return fmt.Errorf("redisstore: detach %s from %d pages: %w", gateway, len(pages), err)
	}
	return nil
}

// Attached implements presence.Endpoints. An endpoint that comes or goes while
// the set is read is published, so it may be in the answer or not.
func (s *Store) Attached(ctx context.Context, bucket int) ([]presence.Endpoint, error) {
	all, err := s.scan(ctx, bucket, "*")
	if err != nil {
		return nil, fmt.Errorf("redisstore: endpoints of bucket %d: %w", bucket, err)
	}
	return all, nil
}

// scan returns the endpoints of a bucket that match the pattern.
func (s *Store) scan(ctx context.Context, bucket int, pattern string) ([]presence.Endpoint, error) {
	seen := map[string]struct{}{} // SSCAN may say one twice
	var all []presence.Endpoint
	for cursor := uint64(0); ; {
		var members []string
		err := s.do(ctx, func(ctx context.Context, c *client) error {
			var err error
			s.metrics.commands.Inc()
			members, cursor, err = c.SScan(ctx, endpointsKey(bucket), cursor, pattern, scanBatch).Result()
			return err
		})
		if err != nil {
			return nil, err
		}
		for _, m := range members {
			gateway, page, ok := strings.Cut(m, "\x00")
			if _, twice := seen[m]; twice || !ok {
				continue
			}
			seen[m] = struct{}{}
			all = append(all, presence.Endpoint{Page: page, Gateway: gateway})
		}
		if cursor == 0 {
			return all, nil
		}
	}
}

// globs are the characters that mean something in a pattern of SSCAN.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `^`, `\^`)

// DropGateway takes a gateway that is dead out of all endpoints.
func (s *Store) DropGateway(ctx context.Context, gateway string) error {
	var errs []error
	for b := range s.cfg.Buckets {
		ends, err := s.scan(ctx, b, globs.Replace(gateway)+"\x00*")
		if err != nil {
			errs = append(errs, fmt.Errorf("bucket %d: %w", b, err))
			if errors.Is(err, presence.ErrUnavailable) {
				break
			}
			continue
		}
		pages := make([]string, len(ends))
		for i, e := range ends {
			pages[i] = e.Page
		}
		if err := s.Detach(ctx, gateway, pages); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("redisstore: drop gateway %s: %w", gateway, err)
	}
	return nil
}
