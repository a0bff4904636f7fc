package counterapi

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	topEvery    = time.Second // between two looks at a list that somebody follows
	maxTopLists = 256         // lists that are followed at a time, about; a stream of a further one is 429

	// An address may begin to follow so many lists a second that nobody follows.
	newListRate  = 1
	newListBurst = 5
)

// TopKind is the kind of the topics of top lists. Their values are JSON.
var TopKind = presence.KindOf("top")

// LiveTop follows the top lists that clients look at, and passes each to the hub when it has changed, at most once a second.
// A list is computed once, however many clients look at it, and takes its turn with the other public questions. Any
// goroutine may call the methods.
type LiveTop struct {
	api  *API
	hub  Hub
	wake chan struct{} // holds one: somebody has begun to look at a list

	fresh *httppolicy.RateLimiter // of lists that nobody follows yet, by address
	seq   uint64                  // of the updates, so that they are in order also for a list that is followed anew; Run's own

	mu    sync.Mutex // guards lists; the hub's lock may be held when it is taken
	lists map[presence.Topic]*followedTop
}

// followedTop is a list that somebody looks at. Run alone changes it.
type followedTop struct {
	topList
	update presence.Update // the last one
}

// NewLiveTop returns a LiveTop that does nothing until Run.
func NewLiveTop(api *API, hub Hub) *LiveTop {
	return &LiveTop{
		api: api, hub: hub, wake: make(chan struct{}, 1), lists: map[presence.Topic]*followedTop{},
		fresh: httppolicy.NewRateLimiter(newListRate, newListBurst),
	}
}

// topic returns the topic of a list; listOf is its inverse.
func (l topList) topic() presence.Topic {
	site, match := presence.SplitName(l.rule.Match)
	return presence.Topic{Site: site, Kind: TopKind, Key: l.text + " " + strconv.Itoa(l.n) + " " + match}
}

func (t *LiveTop) listOf(topic presence.Topic) (list topList, ok bool) {
	parts := strings.SplitN(topic.Key, " ", 3)
	if len(parts) != 3 {
		return list, false
	}
	var errs [3]error
	list.text = parts[0]
	list.last, errs[0] = counter.ParseDuration(parts[0])
	list.n, errs[1] = strconv.Atoi(parts[1])
	list.rule, errs[2] = t.api.cfg.Rules.In(topic.Site).TopRule(parts[2])
	return list, errs == [3]error{}
}

// Readable returns the topic of the list whose event stream the request asks for, if the caller has permission and the list can
// be computed now. If ok is false, it has written the error answer.
func (t *LiveTop) Readable(c *gin.Context) (topic presence.Topic, ok bool) {
	list, server, ok := t.api.topList(c)
	if !ok {
		return topic, false
	}
	topic = list.topic()
	t.mu.Lock()
	fresh, full := t.lists[topic] == nil, len(t.lists) >= maxTopLists
	t.mu.Unlock()
	if fresh && !full && !server {
		allowed, _ := t.fresh.Allow(httppolicy.Caller{Addr: t.api.callers.Addr(c.Request)}, time.Now())
		full = !allowed
	}
	if fresh && full {
		t.api.crowded(c)
		return topic, false
	}
	_, ok = t.api.findTop(c, list, server)
	return topic, ok
}

// Want implements fanout.Source.
func (t *LiveTop) Want(topic presence.Topic) {
	list, ok := t.listOf(topic)
	if !ok { // Readable made the topic, so this cannot be
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lists[topic] = &followedTop{topList: list, update: presence.Update{Topic: topic}}
	signal(t.wake)
}

// Unwant implements fanout.Source.
func (t *LiveTop) Unwant(topic presence.Topic) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.lists, topic)
}

// Run looks at the lists until ctx ends. It alone passes updates to the hub.
func (t *LiveTop) Run(ctx context.Context) {
	tick := time.NewTicker(topEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			t.look(ctx, false)
		case <-t.wake:
			t.look(ctx, true)
		}
	}
}

// look computes the lists, or only those that nobody has computed yet. A list that cannot be computed now stays as it is.
func (t *LiveTop) look(ctx context.Context, fresh bool) {
	t.mu.Lock()
	var lists []*followedTop
	for _, list := range t.lists {
		if !fresh || list.update.Value == "" {
			lists = append(lists, list)
		}
	}
	t.mu.Unlock()
	for _, list := range lists {
		within, cancel := context.WithTimeout(ctx, readTime)
		top, err := t.api.askTop(within, list.topList, min(list.rule.Stale, topEvery), false)
		cancel()
		if err != nil {
			t.api.cfg.Log.Debug().Err(err).Str("match", list.rule.Written()).Msg("counters: a top list that clients follow could not be computed")
			continue
		}
		value := string(list.appendJSON(nil, top))
		if value == list.update.Value {
			continue
		}
		t.seq++
		list.update.Value, list.update.Version = value, presence.Version{Incarnation: 1, Sequence: t.seq}
		t.mu.Lock()
		followed := t.lists[list.update.Topic] == list
		t.mu.Unlock()
		if followed {
			t.hub.Update(list.update)
		}
	}
}
