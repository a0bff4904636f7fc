package presenceredis

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"headcount/presence"
	"headcount/scripts"
	"headcount/unread"
)

const (
	authorBatch = 1000
	ringSize    = 8 // newest authored changes that change.lua keeps
)

var _ unread.Store = (*Store)(nil)

// Change implements unread.Store. Its cost does not depend on the number of followers.
func (s *Store) Change(ctx context.Context, page string, c unread.Change) error {
	cn, err := s.known(ctx)
	if err == nil {
		err = s.conn.Run(ctx, []*scriptRun{s.changeRun(page, c, cn.Publish)})
	}

	if err != nil {
		return fmt.Errorf("presenceredis: change: %w", err)
	}
	return nil
}

func (s *Store) changeRun(page string, c unread.Change, publish string) *scriptRun {
	b := presence.Bucket(page, s.cfg.Buckets)
	run := &scriptRun{Script: scripts.Change, Keys: []string{s.at().stateKey(b), s.at().historyKey(b, page)}}
	if c.Key != "" {
		// The idempotency key is in the bucket of the page, so that one script sees both. It holds for this page alone.
		hash := unread.KeyHash(page, c.Key)
		run.Keys = append(run.Keys, s.at().onceKey(b, base64.RawURLEncoding.EncodeToString(hash[:])))
	}

	by := ""
	if c.By != nil {
		by = c.By.String()
	}
	run.Args = []any{
		s.at().channel(b, s.cfg.Conn.DB), publish, unread.LevelTopic(page).String(), by, unread.MaxAuthors,
		int(unread.KeyFor.Seconds()), c.Value(),
	}

	return run
}

// Levels implements unread.Store. Plain reads in a pipeline take half the time of a
// script.
func (s *Store) Levels(ctx context.Context, user unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	levels := make([]unread.Level, 0, len(pages))
	owns := make([]unread.Own, 0, len(pages))
	// A page counts the user's own changes apart: they are not unread for their author.
	own := byField + user.String()

	for batch := range slices.Chunk(pages, maxPipeline) {
		cmds := make([]*redis.SliceCmd, len(batch))
		voids, err := s.readUnread(ctx, func(ctx context.Context, pipe redis.Pipeliner, v *voids) {
			for i, page := range batch {
				b := presence.Bucket(page, s.cfg.Buckets)
				cmds[i] = pipe.HMGet(ctx, s.at().historyKey(b, page), levelField, beforeField, own)
				s.askVoid(ctx, pipe, v, b)
			}
		})
		if err != nil {
			return nil, nil, fmt.Errorf("presenceredis: levels of %d pages: %w", len(pages), err)
		}

		for i, cmd := range cmds {
			v := texts(cmd.Val())
			void := voids.lowest(presence.Bucket(batch[i], s.cfg.Buckets))
			levels = append(levels, parseLevel(v[0], v[1], void))
			owns = append(owns, parseOwn(v[2]))
		}
	}

	return levels, owns, nil
}

// Notes implements unread.Store.
func (s *Store) Notes(ctx context.Context, pages []string) ([]unread.Note, error) {
	notes := make([]unread.Note, 0, len(pages))

	for batch := range slices.Chunk(pages, maxPipeline) {
		cmds := make([]*redis.SliceCmd, len(batch))
		err := s.do(ctx, func(ctx context.Context, c *client) error {
			pipe := c.Pipeline()
			for i, page := range batch {
				key := s.at().historyKey(presence.Bucket(page, s.cfg.Buckets), page)
				cmds[i] = pipe.HMGet(ctx, key, noteField)
			}

			s.conn.Metrics.Commands.Add(float64(len(batch)))
			_, err := pipe.Exec(ctx)
			return err
		})

		if err != nil {
			return nil, fmt.Errorf("presenceredis: notes of %d pages: %w", len(pages), err)
		}

		for _, cmd := range cmds {
			note, _ := cmd.Val()[0].(string) // nil: there is no note
			notes = append(notes, unread.NoteOf(note))
		}
	}
	return notes, nil
}

// voids reads the generation of buckets, and the lowest incarnation that is valid in
// them, together with other reads. See void.lua.
type voids struct {
	commands int
	cmds     map[int]*redis.SliceCmd
}

// askVoid adds a read of the bucket's state to the pipeline, once per bucket. The caller has
// added a read of something else in the bucket.
func (s *Store) askVoid(ctx context.Context, pipe redis.Pipeliner, v *voids, bucket int) {
	v.commands++
	if v.cmds[bucket] == nil {
		v.commands++
		v.cmds[bucket] = pipe.HMGet(ctx, s.at().stateKey(bucket), "generation", "void")
	}
}

// lowest returns the lowest valid incarnation in the bucket.
func (v *voids) lowest(bucket int) uint64 {
	void, _ := strconv.ParseUint(texts(v.cmds[bucket].Val())[1], 10, 64)
	return void
}

// readUnread runs reads of records and histories in one pipeline. It returns errRestored
// while Redis could still assign lost versions to other contents.
func (s *Store) readUnread(ctx context.Context, read func(context.Context, redis.Pipeliner, *voids)) (*voids, error) {
	var v *voids
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		v = &voids{cmds: map[int]*redis.SliceCmd{}}
		read(ctx, pipe, v)
		s.conn.Metrics.Commands.Add(float64(v.commands))
		_, err := pipe.Exec(ctx)
		return err
	})

	if err != nil {
		return nil, err
	}

	generations := make([]string, 0, len(v.cmds))
	for _, cmd := range v.cmds {
		generations = append(generations, texts(cmd.Val())[0])
	}

	// Not before the reads: a restart in between would go unnoticed.
	repaired, err := s.repaired(ctx, generations...)
	if err == nil && slices.Contains(repaired, false) {
		err = errRestored
	}

	return v, err
}

// texts returns the values of a reply as strings, empty for missing ones.
func texts(values []any) []string {
	all := make([]string, len(values))
	for i, v := range values {
		all[i], _ = v.(string)
	}

	return all
}

// parseLevel parses "incarnation changes authored time" of change.lua, and before, which is
// Level.Before. void is the lowest valid incarnation.
func parseLevel(text, before string, void uint64) (l unread.Level) {
	// The page never changed, or Redis has lost all of its changes. By the incarnation a gateway that knows lost
	// changes sees that its level is outdated.
	if text == "" {
		return unread.Level{Incarnation: void}
	}

	n, _ := numbersIn(text, 4)
	l = unread.Level{Incarnation: n[0], All: int64(n[1]), By: int64(n[2]), At: presence.TimeOf(int64(n[3]))}
	l.Before, _ = strconv.ParseInt(before, 10, 64)

	// Redis may have lost changes after this level. void.lua gives their sequences a higher incarnation.
	if l.Incarnation < void { // return the level that the next change will write
		l.Incarnation = void
		l.Before = l.All
	}

	return l
}

func parseOwn(text string) unread.Own {
	n, ok := numbersIn(text, 3)
	if !ok {
		return unread.Own{}
	}
	return unread.Own{Changes: int64(n[0]), Last: int64(n[1]), Before: presence.TimeOf(int64(n[2]))}
}

// Authors implements unread.Store. If few changes with an author followed since, the history
// has their authors. Otherwise Authors looks up the users in batches; the level is that of
// the first batch, so the data of a later batch may be newer.
func (s *Store) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	fields := make([]string, 0, ringSize)
	for i := range ringSize {
		fields = append(fields, newestField+strconv.Itoa(i))
	}
	l, newest, err := s.history(ctx, page, fields)
	if err != nil {
		return unread.Level{}, nil, err
	}

	owns := map[unread.User]unread.Own{}
	if l.By <= since {
		return l, owns, nil
	}

	// Most questions come right after a change, and the ring answers these however many users are asked about.
	if l.By-since <= ringSize {
		for by := since + 1; by <= l.By; by++ { // a later change of a user replaces an earlier one
			number, rest, _ := strings.Cut(newest[by%ringSize], " ")
			own, name, ok := cutLast(rest)
			if !ok || number != strconv.FormatInt(by, 10) {
				continue
			}
			if u, err := unread.ParseUser(name); err == nil {
				owns[u] = parseOwn(own)
			}
		}
		return l, owns, nil
	}

	first := true
	for batch := range slices.Chunk(users, authorBatch) {
		fields := make([]string, len(batch))
		for i, u := range batch {
			fields[i] = byField + u.String()
		}

		level, values, err := s.history(ctx, page, fields)
		if err != nil {
			return unread.Level{}, nil, err
		}

		if first {
			l = level
			first = false
		}

		for i, v := range values {
			if v != "" {
				owns[batch[i]] = parseOwn(v)
			}
		}
	}

	return l, owns, nil
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, ' ')
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}

// history reads a page's level and other fields of the same hash, as of one moment.
func (s *Store) history(
	ctx context.Context, page string, fields []string,
) (l unread.Level, values []string, err error) {
	b := presence.Bucket(page, s.cfg.Buckets)
	var cmd *redis.SliceCmd
	names := append([]string{levelField, beforeField}, fields...)
	voids, err := s.readUnread(ctx, func(ctx context.Context, pipe redis.Pipeliner, v *voids) {
		cmd = pipe.HMGet(ctx, s.at().historyKey(b, page), names...)
		s.askVoid(ctx, pipe, v, b)
	})

	if err != nil {
		return l, nil, fmt.Errorf("presenceredis: history of a page: %w", err)
	}

	values = texts(cmd.Val())
	return parseLevel(values[0], values[1], voids.lowest(b)), values[2:], nil
}

func (s *Store) userBucket(u unread.User) int {
	return unread.RecordTopic(u).Bucket(s.cfg.Buckets)
}

// Records implements unread.Store.
func (s *Store) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	records := make([]unread.Record, 0, len(users))
	for batch := range slices.Chunk(users, maxPipeline) {
		cmds := make([]*redis.MapStringStringCmd, len(batch))
		// HGETALL and the read of the bucket are no transaction. The version is what save.lua compares, so a mix of
		// two moments is refused.
		voids, err := s.readUnread(ctx, func(ctx context.Context, pipe redis.Pipeliner, v *voids) {
			for i, u := range batch {
				cmds[i] = pipe.HGetAll(ctx, s.at().recordKey(s.userBucket(u), u.String()))
				s.askVoid(ctx, pipe, v, s.userBucket(u))
			}
		})

		for i := 0; err == nil && i < len(cmds); i++ {
			var r unread.Record
			r, err = parseRecord(cmds[i].Val(), voids.lowest(s.userBucket(batch[i])))
			records = append(records, r)
		}

		if err != nil {
			return nil, fmt.Errorf("presenceredis: follows of %d users: %w", len(users), err)
		}
	}

	return records, nil
}

// parseRecord parses the hash of save.lua. void is the lowest valid incarnation.
func parseRecord(fields map[string]string, void uint64) (r unread.Record, err error) {
	head, ok := fields[recordField]
	if !ok {
		if len(fields) > 0 {
			return r, fmt.Errorf("%w: follows without a version", ErrForeign)
		}
		return r, nil
	}

	n, ok := numbersIn(head, 3)
	if !ok {
		return r, fmt.Errorf("%w: the version of follows is %q", ErrForeign, head)
	}

	// void raises the version here because save.lua raises it in the same way before comparing it.
	r.Version = presence.Version{Incarnation: max(n[0], void), Sequence: n[1]}
	r.Updated = presence.TimeOf(int64(n[2]))
	r.Follows = make([]unread.Follow, 0, len(fields)-1)

	for page, value := range fields {
		if page == recordField {
			continue
		}
		f, err := unread.ParseFollow(page, value)
		if err != nil {
			return r, fmt.Errorf("%w: %w", ErrForeign, err)
		}
		r.Follows = append(r.Follows, f)
	}

	slices.SortFunc(r.Follows, func(a, b unread.Follow) int { return strings.Compare(a.Page, b.Page) })
	return r, nil
}

// Save implements unread.Store.
func (s *Store) Save(ctx context.Context, user unread.User, old, r unread.Record) (presence.Version, error) {
	v, err := s.save(ctx, user, old, r)
	if err != nil {
		return v, fmt.Errorf("presenceredis: save follows: %w", err)
	}
	return v, nil
}

func (s *Store) save(ctx context.Context, user unread.User, old, r unread.Record) (v presence.Version, err error) {
	cn, err := s.known(ctx)
	if err != nil {
		return v, err
	}

	set, gone := r.Differences(old)
	b := s.userBucket(user)
	run := &scriptRun{
		Script: scripts.Save,
		Keys:   []string{s.at().stateKey(b), s.at().recordKey(b, user.String())},
		Args: append(make([]any, 0, 7+2*len(set)+len(gone)),
			s.at().channel(b, s.cfg.Conn.DB), cn.Publish, unread.RecordTopic(user).String(),
			fmt.Sprintf("%d %d", old.Version.Incarnation, old.Version.Sequence), presence.Seconds(r.Updated),
			int(unread.EmptyFor.Seconds()), len(set)),
	}

	for _, f := range set {
		run.Args = append(run.Args, f.Page, f.AppendValue(nil))
	}
	for _, page := range gone {
		run.Args = append(run.Args, page)
	}

	if err := s.conn.Run(ctx, []*scriptRun{run}); err != nil {
		return v, err
	}

	text := run.Reply.(string)
	// Another call was faster; the caller reads again, and decides anew.
	if text == "" {
		return v, unread.ErrConflict
	}

	n, _ := numbersIn(text, 2)
	return presence.Version{Incarnation: n[0], Sequence: n[1]}, nil
}
