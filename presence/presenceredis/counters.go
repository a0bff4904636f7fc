package presenceredis

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"headcount/presence"
	"headcount/scripts"
)

const (
	readBatch = 500  // topics in one run of a script that reads or detaches them
	scanBatch = 1000 // endpoints, or keys, in one part of a scan
)

// Counts implements presence.Counters.
func (s *Store) Counts(ctx context.Context, pages []string) ([]presence.Count, error) {
	updates, _, err := s.read(ctx, "", presence.CountTopics(pages), false)
	if err != nil {
		return nil, fmt.Errorf("presenceredis: counts of %d pages: %w", len(pages), err)
	}

	counts := make([]presence.Count, len(updates))
	for i, u := range updates {
		// read.lua writes values in the form of Count.Update, so every one of them parses.
		counts[i], _ = presence.CountOf(u)
	}

	return counts, nil
}

// Updates implements presence.Updates.
func (s *Store) Updates(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	updates, _, err := s.read(ctx, "", topics, false)
	if err != nil {
		return nil, fmt.Errorf("presenceredis: read %d topics: %w", len(topics), err)
	}

	return updates, nil
}

// Attach implements presence.Endpoints.
func (s *Store) Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error) {
	// A zero byte separates the gateway from the topic in the set of endpoints.
	if gateway == "" || strings.Contains(gateway, "\x00") {
		return nil, fmt.Errorf("presenceredis: attach: %q is no gateway", gateway)
	}

	updates, _, err := s.read(ctx, gateway, topics, false)
	if err != nil {
		return nil, fmt.Errorf("presenceredis: attach %s to %d topics: %w", gateway, len(topics), err)
	}

	return updates, nil
}

// batch is the bucket, and when reading also the site and kind, that the topics of one run have in common.
type batch struct {
	bucket int
	site   presence.Site // when read
	kind   presence.Kind // when read
}

// batches calls fn with indexes into topics, grouped by bucket and, for reading, by site
// and kind, at most readBatch at a time.
func (s *Store) batches(topics []presence.Topic, read bool, fn func(b batch, places []int)) {
	all := map[batch][]int{}
	for i, t := range topics {
		b := batch{bucket: t.Bucket(s.cfg.Buckets)}
		if read {
			b.site, b.kind = t.Site, t.Kind
		}

		all[b] = append(all[b], i)
	}

	// The order of a map does not matter: each place says which topic it belongs to.
	for b, list := range all {
		for places := range slices.Chunk(list, readBatch) {
			fn(b, places)
		}
	}
}

// read returns the updates of topics and, unless gateway is empty, attaches it to them.
// A topic of an unknown kind reads as never published: a newer process may have attached
// a gateway to it. inParts says that the only topic is a count, of which read also returns
// the part of each region.
func (s *Store) read(
	ctx context.Context, gateway string, topics []presence.Topic, inParts bool,
) (updates []presence.Update, parts []presence.Part, err error) {
	if len(topics) == 0 {
		return nil, nil, nil
	}

	c, err := s.known(ctx)
	if err != nil {
		return nil, nil, err
	}

	updates = make([]presence.Update, len(topics))
	for i, t := range topics {
		updates[i].Topic = t
	}

	var runs []*scriptRun
	var places [][]int
	s.batches(topics, true, func(b batch, at []int) {
		// A topic without a reader keeps the zero version that it has by now.
		if reader := kinds[b.kind]; reader != nil {
			runs = append(runs, reader(s, reading{b.bucket, c.Publish, gateway, topics, at, inParts}))
			places = append(places, at)
		}
	})

	if err := s.conn.Run(ctx, runs); err != nil {
		return nil, nil, err
	}

	// The counts are read before the generation, see repaired.
	generations := make([]string, len(runs))
	for k, run := range runs {
		generations[k] = run.Reply.([]any)[1].(string)
	}

	repaired, err := s.repaired(ctx, generations...)
	if err != nil {
		return nil, nil, err
	}

	for k, run := range runs {
		reply := run.Reply.([]any)
		for j, i := range places[k] {
			// A bucket of an older generation shows what Redis had before its loss, until the nodes write it again.
			stale := reply[0] == "1" || !repaired[k]
			updates[i] = s.update(topics[i], reply[2+j].(string), stale)
		}

		if inParts {
			parts = s.parts(reply[3].(string))
		}
	}

	return updates, parts, nil
}

// update parses "incarnation sequence value".
func (s *Store) update(t presence.Topic, text string, stale bool) presence.Update {
	inc, rest, _ := strings.Cut(text, " ")
	seq, value, _ := strings.Cut(rest, " ")

	u := presence.Update{Topic: t, Stale: stale, Value: value}
	u.Version.Incarnation, _ = strconv.ParseUint(inc, 10, 64)
	u.Version.Sequence, _ = strconv.ParseUint(seq, 10, 64)

	// Counts that are only read raise it as well: this process may be the last one to know their incarnation.
	s.raiseHighest(u.Version.Incarnation)
	return u
}

// Parts returns the count of a page and the part of each region: this region first, then the
// others by name, without regions that are left out.
func (s *Store) Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error) {
	updates, parts, err := s.read(ctx, "", []presence.Topic{presence.CountTopic(page)}, true)
	if err != nil {
		return presence.Count{}, nil, fmt.Errorf("presenceredis: parts of a count: %w", err)
	}

	c, _ := presence.CountOf(updates[0])
	return c, parts, nil
}

// parts parses the regions' parts in the reply of read.lua: "users name=users …".
func (s *Store) parts(text string) []presence.Part {
	fields := strings.Fields(text)
	if len(fields) == 0 {
		return nil
	}

	own, _ := strconv.ParseInt(fields[0], 10, 64)
	parts := []presence.Part{{Region: s.cfg.Facts.Region, Users: own}}

	// A table of Lua has no order.
	slices.Sort(fields[1:])
	for _, f := range fields[1:] {
		name, users, _ := strings.Cut(f, "=")
		n, _ := strconv.ParseInt(users, 10, 64)
		parts = append(parts, presence.Part{Region: name, Users: n})
	}

	return parts
}

// Detach implements presence.Endpoints.
func (s *Store) Detach(ctx context.Context, gateway string, topics []presence.Topic) error {
	if len(topics) == 0 {
		return nil
	}

	c, err := s.known(ctx)
	if err == nil {
		err = s.conn.Run(ctx, s.detachRuns(gateway, topics, c.Publish))
	}
	if err != nil {
		return fmt.Errorf("presenceredis: detach %s from %d topics: %w", gateway, len(topics), err)
	}

	return nil
}

func (s *Store) detachRuns(gateway string, topics []presence.Topic, publish string) []*scriptRun {
	var runs []*scriptRun

	s.batches(topics, false, func(b batch, at []int) {
		args := append(make([]any, 0, 3+len(at)), s.at().channel(b.bucket, s.cfg.Conn.DB), publish, gateway)
		for _, i := range at {
			args = append(args, topics[i].String())
		}

		runs = append(runs, &scriptRun{
			Script: scripts.Detach,
			Keys:   []string{s.at().stateKey(b.bucket), s.at().endpointsKey(b.bucket)},
			Args:   args,
		})
	})

	return runs
}

// Missing implements presence.Endpoints.
func (s *Store) Missing(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Topic, error) {
	var missing []presence.Topic
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		var places [][]int
		var replies []*redis.BoolSliceCmd

		s.batches(topics, false, func(b batch, at []int) {
			members := make([]any, len(at))
			for j, i := range at {
				members[j] = gateway + "\x00" + topics[i].String()
			}

			s.conn.Metrics.Commands.Inc()
			replies = append(replies, pipe.SMIsMember(ctx, s.at().endpointsKey(b.bucket), members...))
			places = append(places, at)
		})

		if len(replies) == 0 {
			return nil
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}

		for k, r := range replies {
			for j, is := range r.Val() {
				if !is {
					missing = append(missing, topics[places[k][j]])
				}
			}
		}

		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("presenceredis: check %d endpoints of %s: %w", len(topics), gateway, err)
	}

	return missing, nil
}

// Attached implements presence.Endpoints. An endpoint that changes during the scan may
// be in the result or not: its change is published.
func (s *Store) Attached(ctx context.Context, bucket int) ([]presence.Endpoint, error) {
	seen := map[string]struct{}{} // SSCAN may return an element twice
	var all []presence.Endpoint

	// Each part has a deadline of its own, so a large set takes longer and does not fail.
	for cursor := uint64(0); ; {
		var members []string
		err := s.do(ctx, func(ctx context.Context, c *client) error {
			s.conn.Metrics.Commands.Inc()

			var err error
			members, cursor, err = c.SScan(ctx, s.at().endpointsKey(bucket), cursor, "*", scanBatch).Result()
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("presenceredis: endpoints of bucket %d: %w", bucket, err)
		}

		for _, m := range members {
			gateway, text, _ := strings.Cut(m, "\x00")
			topic, err := presence.ParseTopic(text)
			_, twice := seen[m]
			if twice || err != nil { // a newer process may attach to a kind that this one does not know
				continue
			}

			seen[m] = struct{}{}
			all = append(all, presence.Endpoint{Topic: topic, Gateway: gateway})
		}

		if cursor == 0 {
			return all, nil
		}
	}
}
