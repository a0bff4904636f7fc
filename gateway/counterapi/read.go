package counterapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/presence"
)

// getOne answers with a counter, which may lag as its rule permits.
func (a *API) getOne(c *gin.Context, one call) (calls.Answer, error) {
	is, err := a.readLagging(c, one)
	if err != nil {
		return calls.Answer{}, err
	}

	return answerOne(is), nil
}

// getExact answers with a counter that includes every acknowledged change.
func (a *API) getExact(c *gin.Context, one call) (calls.Answer, error) {
	is, err := a.readOne(c, one, 0)
	if err != nil {
		return calls.Answer{}, err
	}

	return answerOne(is), nil
}

// readLagging reads the counter of a call, which may lag as its rule permits. If the counter is public, proxies may
// cache the answer.
func (a *API) readLagging(c *gin.Context, one call) (counter.Counter, error) {
	is, err := a.readOne(c, one, one.rule.MaxAge)

	// A proxy sends the same answer to everybody, so it may cache only public counters.
	if err == nil && one.rule.Allows(counter.PublicRead) {
		a.callers.Cacheable(c)
	}

	return is, err
}

// readOne reads the counter of a call.
func (a *API) readOne(c *gin.Context, one call, lag time.Duration) (counter.Counter, error) {
	ctx, cancel := a.within(c)
	defer cancel()

	before := floorOf(one.key)
	read, err := a.read(ctx, []string{one.key}, "", lag)
	if err != nil {
		return counter.Counter{}, a.failed(c, err)
	}
	// Only an exact read has to have everything that was answered before.
	if lag == 0 {
		before.note(&read[0].Counter)
	}

	return read[0].Counter, nil
}

// Value returns the value of the counter in the path, if the caller may read it. Before reading, it calls valid with
// the key, and returns the error of valid.
func (a *API) Value(c *gin.Context, valid func(key string) error) (int64, error) {
	one, err := a.counter(c, counter.PublicRead)
	if err != nil {
		return 0, err
	}
	if err := valid(presence.KeyOf(one.key)); err != nil {
		return 0, err
	}

	is, err := a.readLagging(c, one)

	return is.Value, err
}

// selection is the several counters that a request names.
type selection struct {
	names []string
	lag   time.Duration // the shortest MaxAge of their rules
	open  bool          // all of them are public
}

// getSeveral answers with several counters. None of them is older than its rule permits.
func (a *API) getSeveral(c *gin.Context) (calls.Answer, error) {
	server := a.callers.IsServer(c.Request)
	these, err := a.selection(c)
	if err != nil {
		return calls.Answer{}, err
	}

	if !server {
		if !these.open {
			return calls.Answer{}, notPublic(", or that on another one of those asked for")
		}
		if err := a.callers.Public(c); err != nil {
			return calls.Answer{}, err
		}
	}

	ctx, cancel := a.within(c)
	defer cancel()
	read, err := a.read(ctx, these.names, "", these.lag)
	if err != nil {
		return calls.Answer{}, a.failed(c, err)
	}
	if these.open {
		a.callers.Cacheable(c)
	}

	return answerList(len(read), func(i int) *counter.Counter { return &read[i].Counter }), nil
}

// selection parses which counters a request names.
func (a *API) selection(c *gin.Context) (selection, error) {
	these := selection{lag: counter.DefaultMaxAge, open: true}
	site := a.callers.Site(c)

	_, err := Several(c, "key", "counters", func(key string) error {
		name, rule, err := a.Find(site, key)
		if err != nil {
			return badCounter(err)
		}

		// All are read with the same lag, so the strictest rule decides.
		if len(these.names) == 0 || rule.MaxAge < these.lag {
			these.lag = rule.MaxAge
		}
		these.names = append(these.names, name)
		these.open = these.open && rule.Allows(counter.PublicRead)

		return nil
	})

	return these, err
}

func (a *API) getLedger(c *gin.Context, one call) (calls.Answer, error) {
	query := ReadQuery(c, "?after=7&limit=100")
	after := query.Number("after", 0, 0, math.MaxUint64)
	limit := query.Number("limit", defaultLedger, 1, counter.MaxLedger)
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	ctx, cancel := a.within(c)
	defer cancel()
	page, err := a.cfg.Counters.Ledger(ctx, one.key, after, int(limit))

	return a.page(c, page, err)
}

// page answers with one page of a ledger or of a list of reservations, as the store returned it.
func (a *API) page(c *gin.Context, page any, err error) (calls.Answer, error) {
	if err != nil {
		return calls.Answer{}, a.failed(c, err)
	}

	body, err := json.Marshal(page)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.JSON(body), nil
}

// getAggregate answers with the total of all counters with a prefix.
func (a *API) getAggregate(c *gin.Context) (calls.Answer, error) {
	match, err := param(c, "key")
	if err == nil {
		err = counter.CheckMatch(match)
	}
	prefix, several := strings.CutSuffix(match, "*")
	if err == nil && !several {
		err = errors.New("it has no *")
	}
	if err != nil {
		return calls.Answer{}, calls.Bad(
			"An aggregate is over a prefix with a * at its end, such as views:*, or * for all: " + err.Error() + ".")
	}

	if !a.callers.IsServer(c.Request) {
		return calls.Answer{}, notPublic("")
	}

	ctx, cancel := a.within(c)
	defer cancel()
	sum, err := a.cfg.Counters.Aggregate(ctx, a.callers.Site(c).Qualify(prefix))
	switch {
	// No outage: the store has answered that there is no such total.
	case errors.As(err, new(*counter.Conflict)):
		return calls.Answer{}, err
	case err != nil:
		return calls.Answer{}, a.failed(c, err)
	}

	b := append([]byte(nil), `{"match":`...)
	b = presence.AppendString(b, match)
	b = append(b, `,"counters":`...)
	b = strconv.AppendInt(b, sum.Counters, 10)
	b = append(b, `,"value":`...)
	b = strconv.AppendInt(b, sum.Value, 10)

	return calls.JSON(append(b, '}')), nil
}

// Readable returns the counter whose event stream is requested, if the caller has permission and the counter can be
// read now. It does not check tokens.
func (a *API) Readable(c *gin.Context) (key string, err error) {
	one, err := a.named(c)
	if err != nil {
		return "", err
	}
	if err := one.permits(counter.PublicRead); err != nil {
		return "", err
	}

	// The stream may begin with the value known here, so the store need not be asked.
	if a.live.known(one.key) {
		return one.key, nil
	}

	ctx, cancel := a.within(c)
	defer cancel()
	// With some lag in any case, so that a stream can begin with the last known value while the store is away.
	if _, err := a.read(ctx, []string{one.key}, "", max(one.rule.MaxAge, 1)); err != nil {
		return "", a.failed(c, err)
	}

	return one.key, nil
}

// read reads distinct counters, each of which has a rule. With a lag it may answer from this process's memory.
func (a *API) read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	// Memory does not know who is a member.
	lagging := lag > 0 && member == ""
	fromServer := lagging && a.cfg.Counters.Remote()

	// The subscribers' values are new enough, and reading them costs no call to the store.
	if fromServer {
		if current := a.live.current(keys, lag); current != nil {
			a.touch(keys)
			return current, nil
		}
	}

	// Concurrent reads are common for a single counter, and rare for the same list of several.
	var readings []counter.Reading
	var err error
	if fromServer && len(keys) == 1 {
		readings, err = a.readShared(ctx, keys, lag)
	} else {
		readings, err = a.readStore(ctx, keys, member, lag)
	}
	if err != nil {
		if !lagging {
			return nil, err
		}
		readings = counter.Away(keys) // fall back to the last known values
	}

	for i := range readings {
		r := &readings[i]
		if err := a.complete(r, err); err != nil {
			return nil, err
		}
		// Whoever asks for many keys that do not exist must not have all of them followed.
		if fromServer && r.Touched() {
			a.live.hub.Touch(Topic(r.Key))
		}

		// While the store is unavailable, readers should see what subscribers see.
		if lag > 0 && !a.live.up() {
			r.Stale = true
			r.Approx = true
		}
	}

	return readings, nil
}

// touch keeps the topics of the read counters attached, as a subscription would.
func (a *API) touch(keys []string) {
	for _, key := range keys {
		a.live.hub.Touch(Topic(key))
	}
}

// complete turns a reading into what a client sees. A stale reading becomes the last known value. If none is known, the
// error wraps that of the read.
func (a *API) complete(r *counter.Reading, failed error) error {
	if r.Stale {
		known := false
		r.Counter, known = a.live.newest(*r)
		if !known {
			return fmt.Errorf("counterapi: nothing is known of %q: %w", r.Key, cmp.Or(failed, counter.ErrUnavailable))
		}
	} else {
		// Remember the value, so that it is the last known one if the store goes away.
		a.live.remember(r.Counter)
	}

	rule := a.cfg.Rules.Find(r.Key)
	if r.Kind != 0 && r.Kind != rule.Kind {
		a.logKind(rule)
	}
	// A counter that was never changed has no kind of its own.
	r.Counter = r.Or(rule.Kind)

	return nil
}

// readShared reads one counter. Concurrent reads of the same counter share one call to the store.
func (a *API) readShared(ctx context.Context, keys []string, lag time.Duration) ([]counter.Reading, error) {
	read := func(ctx context.Context) ([]counter.Reading, error) { return a.readStore(ctx, keys, "", lag) }
	shared, err := a.reads.Read(ctx, keys[0], lag, patience, read)

	// A copy, since read completes the readings, which others share.
	return slices.Clone(shared), err
}

// readStore reads counters from the store. The store must not add a lag of its own, so a lag only permits it to answer
// with old values while a part of it is unavailable.
func (a *API) readStore(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	// Before the read, since what it confirms may change at once afterwards.
	began := time.Now()
	readings, err := a.cfg.Counters.Read(ctx, keys, member, min(lag, noLag))
	if err == nil {
		a.live.confirm(readings, began)
	}

	return readings, err
}
