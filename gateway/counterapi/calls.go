package counterapi

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

func answer(c *gin.Context, body []byte) {
	httppolicy.Answer(c.Writer, "application/json", append(body, '\n'))
}

func writeOne(c *gin.Context, one counter.Counter) {
	buffer := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	*buffer = append(one.AppendJSON((*buffer)[:0]), '\n')
	httppolicy.Answer(c.Writer, "application/json", *buffer)
}

// writeMember answers with a set and whether the member is in it.
func writeMember(c *gin.Context, one counter.Counter, member bool) {
	b := append(make([]byte, 0, 256), '{')
	b = one.AppendMembers(b)
	b = append(b, `,"member":`...)
	b = strconv.AppendBool(b, member)
	answer(c, append(b, '}'))
}

// buffers has buffers for answers, of up to maxList bytes each.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

const maxList = 512 << 10

func writeList(c *gin.Context, n int, at func(int) counter.Counter) {
	buffer := buffers.Get().(*[]byte)
	defer func() {
		if cap(*buffer) <= maxList {
			buffers.Put(buffer)
		}
	}()
	b := append(slices.Grow((*buffer)[:0], 16+160*n), `{"counters":[`...)
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = at(i).AppendJSON(b)
	}
	*buffer = append(b, "]}\n"...)
	httppolicy.Answer(c.Writer, "application/json", *buffer)
}

// postStep increments or decrements a counter.
func (a *API) postStep(c *gin.Context, down bool) {
	need := counter.PublicIncrement
	if down {
		need = nobody
	}
	one, ok := a.begin(c, need)
	if !ok {
		return
	}
	op, ok := a.change(c, one, func(text []byte, key string, rule *counter.Rule) (counter.Change, error) {
		if !one.server {
			return counter.ParseOpenStep(text, key, rule)
		}
		return counter.ParseStep(text, key, rule, down)
	})
	if !ok {
		return
	}
	if change := &op.Changes[0]; !one.server && (change.Delta != 1 || len(change.Dimensions) > 0 || change.Reason+change.By != "") {
		forbidden(c, " but by 1 and without dimensions, reason and by")
		return
	}
	if a.limited(c, one, &op.Changes[0]) {
		return
	}
	if !one.server && a.callers.Crawler(c.Request) {
		if is, ok := a.readOne(c, one, 0); ok {
			writeOne(c, is)
		}
		return
	}
	if made, ok := a.make(c, op); ok {
		a.issue(c, one)
		writeOne(c, made[0])
	}
}

// issue sends a caller without API key its identity to keep.
func (a *API) issue(c *gin.Context, one call) {
	if !one.server {
		a.callers.Issue(c, one.id)
	}
}

// postReasoned makes a change that only servers may make.
func (a *API) postReasoned(c *gin.Context, parse func([]byte, string, *counter.Rule) (counter.Change, error)) {
	one, ok := a.begin(c, nobody)
	if !ok {
		return
	}
	op, ok := a.change(c, one, parse)
	if !ok {
		return
	}
	if made, ok := a.make(c, op); ok {
		writeOne(c, made[0])
	}
}

// postBatch makes several changes.
func (a *API) postBatch(c *gin.Context) {
	server := a.callers.IsServer(c.Request)
	if !server {
		forbidden(c, "")
		return
	}
	text, ok := a.body(c, server)
	if !ok {
		return
	}
	var op counter.Op
	var err error
	site := a.callers.Site(c)
	if op.Changes, err = counter.ParseBatch(text, a.cfg.Rules.In(site)); err != nil {
		badBody(c, err)
		return
	}
	for i := range op.Changes {
		op.Changes[i].Key = site.Qualify(op.Changes[i].Key)
	}
	if op.IdempotencyKey, ok = remembered(c, site.Qualify("*"), ""); !ok {
		return
	}
	if made, ok := a.make(c, op); ok {
		writeList(c, len(made), func(i int) counter.Counter { return made[i] })
	}
}

// delete deletes a counter.
func (a *API) delete(c *gin.Context) {
	one, ok := a.begin(c, nobody)
	if !ok {
		return
	}
	if _, ok := a.make(c, counter.Op{Changes: []counter.Change{{Key: one.key, Rule: one.rule, Verb: counter.Delete}}}); ok {
		httppolicy.NoContent(c)
	}
}

// member returns the member and the set that the path names, if the caller has permission. issues says that a caller
// without an identity gets one; otherwise the member is empty then, and in no set. If ok is false, member has written
// the error answer.
func (a *API) member(c *gin.Context, issues bool) (one call, member string, ok bool) {
	if one, ok = a.named(c); !ok {
		return one, "", false
	}
	member, err := param(c, "member")
	if err == nil && member != me {
		err = counter.CheckMember(member)
	}
	if err != nil {
		problem(c, http.StatusBadRequest, "This cannot be a member: "+strings.TrimPrefix(err.Error(), counter.ErrMember.Error()+": ")+". Send 1 to 128 characters without control characters, percent-encoded.")
		return one, "", false
	}
	need := nobody
	if member == me {
		need = counter.PublicMember
	}
	if !a.allowed(c, one.server, one.rule, need) {
		return one, "", false
	}
	if member != me {
		return one, member, true
	}
	if one.id, ok = a.callers.Identify(c); !ok {
		return one, "", false
	}
	switch {
	case one.id.Fresh && one.server:
		problem(c, http.StatusUnauthorized, "A server has no identity of its own, so there is no member me; name the member, or send the id of a user in the header "+identity.Header+".")
		return one, "", false
	}
	if unknown := one.id.Fresh && !one.id.Derived; unknown && !issues {
		return one, "", true
	}
	if err := counter.CheckMember(one.id.User); err != nil {
		problem(c, http.StatusBadRequest, "The user of the token cannot be a member: "+err.Error()+".")
		return one, "", false
	}
	return one, one.id.User, true
}

// changeMember adds a member to a set, or removes it.
func (a *API) changeMember(c *gin.Context, join bool) {
	one, member, ok := a.member(c, join)
	if !ok {
		return
	}
	text, ok := a.body(c, one.server)
	if !ok {
		return
	}
	if err := counter.ParseNothing(text); err != nil {
		badBody(c, err)
		return
	}
	change := counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Edit}
	switch {
	case join:
		change.Join = []string{member}
	case member == "": // a caller without identity is in no set
		a.readMember(c, one, "")
		return
	default:
		change.Leave = []string{member}
	}
	if a.limited(c, one, &change) {
		return
	}
	if !one.server && a.callers.Crawler(c.Request) {
		if is, ok := a.readOne(c, one, 0); ok {
			writeMember(c, is, false)
		}
		return
	}
	if made, ok := a.make(c, counter.Op{Changes: []counter.Change{change}}); ok {
		if one.id.User != "" {
			a.callers.Issue(c, one.id)
		}
		writeMember(c, made[0], join)
	}
}

func (a *API) getMember(c *gin.Context) {
	if one, member, ok := a.member(c, false); ok {
		a.readMember(c, one, member)
	}
}

// readMember answers whether a member is in a set; an empty member is in none.
func (a *API) readMember(c *gin.Context, one call, member string) {
	ctx, cancel := a.within(c)
	defer cancel()
	read, err := a.read(ctx, []string{one.key}, member, 0)
	if err != nil {
		a.unavailable(c, err)
		return
	}
	// A caller who may ask about a member may also remove it.
	change := counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Edit, Leave: []string{member}}
	if conflict := change.Refusal(read[0].Counter); conflict != nil {
		writeConflict(c, conflict)
		return
	}
	writeMember(c, read[0].Counter, read[0].Mine)
}

// getOne reads a counter. An exact read includes every acknowledged change.
func (a *API) getOne(c *gin.Context, exact bool) {
	one, ok := a.begin(c, counter.PublicRead)
	if !ok {
		return
	}
	if exact {
		if is, ok := a.readOne(c, one, 0); ok {
			writeOne(c, is)
		}
		return
	}
	if is, ok := a.readLagging(c, one); ok {
		writeOne(c, is)
	}
}

// readLagging reads the counter of a call, which may lag as its rule says, also in a proxy if everybody may read it. If ok is
// false, it has written the error answer.
func (a *API) readLagging(c *gin.Context, one call) (is counter.Counter, ok bool) {
	is, ok = a.readOne(c, one, one.rule.Stale)
	if ok && one.rule.Allows(counter.PublicRead) {
		a.callers.Cacheable(c)
	}
	return is, ok
}

// readOne reads the counter of a call. If ok is false, it has written the error answer.
func (a *API) readOne(c *gin.Context, one call, lag time.Duration) (is counter.Counter, ok bool) {
	ctx, cancel := a.within(c)
	defer cancel()
	read, err := a.read(ctx, []string{one.key}, "", lag)
	if err != nil {
		a.unavailable(c, err)
		return is, false
	}
	return read[0].Counter, true
}

// Value returns the value of the counter that the path names, for whoever may read it. Before it reads, it calls valid with
// the key. If ok is false, it or valid has written the error answer.
func (a *API) Value(c *gin.Context, valid func(key string) bool) (value int64, ok bool) {
	one, ok := a.begin(c, counter.PublicRead)
	if !ok || !valid(presence.KeyOf(one.key)) {
		return 0, false
	}
	is, ok := a.readLagging(c, one)
	return is.Value, ok
}

// getSeveral reads several counters. None of them is older than its rule permits.
func (a *API) getSeveral(c *gin.Context) {
	server := a.callers.IsServer(c.Request)
	var names []string
	lag, open := counter.DefaultStale, true
	if _, ok := Several(c, "key", "counters", func(key string) error {
		name, rule, err := a.Find(a.callers.Site(c), key)
		if err != nil {
			return errors.New(badKey(err))
		}
		if len(names) == 0 || rule.Stale < lag {
			lag = rule.Stale
		}
		names, open = append(names, name), open && rule.Allows(counter.PublicRead)
		return nil
	}); !ok {
		return
	}
	switch {
	case !server && !open:
		forbidden(c, ", or that on another one of those asked for")
		return
	case !server && !a.callers.Public(c):
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	read, err := a.read(ctx, names, "", lag)
	if err != nil {
		a.unavailable(c, err)
		return
	}
	if open {
		a.callers.Cacheable(c)
	}
	writeList(c, len(read), func(i int) counter.Counter { return read[i].Counter })
}

func (a *API) getLedger(c *gin.Context) {
	one, ok := a.begin(c, nobody)
	if !ok {
		return
	}
	query := ReadQuery(c, "?after=7&limit=100")
	after := query.Number("after", 0, 0, math.MaxUint64)
	limit := query.Number("limit", defaultLedger, 1, counter.MaxLedger)
	if !query.OK {
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	page, err := a.cfg.Counters.Ledger(ctx, one.key, after, int(limit))
	if err != nil {
		a.unavailable(c, err)
		return
	}
	body, err := json.Marshal(page)
	if err != nil {
		a.defect(c, err)
		return
	}
	answer(c, body)
}

// getAggregate adds up all counters with a prefix.
func (a *API) getAggregate(c *gin.Context) {
	server := a.callers.IsServer(c.Request)
	match, err := param(c, "key")
	if err == nil {
		err = counter.CheckMatch(match)
	}
	prefix, open := strings.CutSuffix(match, "*")
	if err != nil || !open {
		why := "it has no *"
		if err != nil {
			why = err.Error()
		}
		problem(c, http.StatusBadRequest, "An aggregate is over a prefix with a * at its end, such as views:*, or * for all: "+why+".")
		return
	}
	if !server {
		forbidden(c, "")
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	sum, err := a.cfg.Counters.Aggregate(ctx, a.callers.Site(c).Qualify(prefix))
	var conflict *counter.Conflict
	switch {
	case errors.As(err, &conflict):
		writeConflict(c, conflict)
		return
	case err != nil:
		a.unavailable(c, err)
		return
	}
	b := append([]byte(nil), `{"match":`...)
	b = presence.AppendString(b, match)
	b = append(b, `,"counters":`...)
	b = strconv.AppendInt(b, sum.Counters, 10)
	b = append(b, `,"value":`...)
	b = strconv.AppendInt(b, sum.Value, 10)
	answer(c, append(b, '}'))
}

// Readable returns the counter whose event stream the request asks for, if the caller has permission and the counter
// can be read now. It does not check tokens. If ok is false, it has written the error answer.
func (a *API) Readable(c *gin.Context) (key string, ok bool) {
	one, ok := a.named(c)
	if !ok || !a.allowed(c, one.server, one.rule, counter.PublicRead) {
		return "", false
	}
	if !a.live.known(one.key) {
		ctx, cancel := a.within(c)
		defer cancel()
		if _, err := a.read(ctx, []string{one.key}, "", max(one.rule.Stale, 1)); err != nil {
			a.unavailable(c, err)
			return "", false
		}
	}
	return one.key, true
}
