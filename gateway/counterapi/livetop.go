package counterapi

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/presence"
)

const (
	topEvery    = time.Second // between two looks at a list that somebody follows
	maxTopLists = 64          // lists that are followed at a time; a stream of a further one is 429
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
	return &LiveTop{api: api, hub: hub, wake: make(chan struct{}, 1), lists: map[presence.Topic]*followedTop{}}
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
	full := t.lists[topic] == nil && len(t.lists) >= maxTopLists
	t.mu.Unlock()
	if full {
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
		list.update.Value = value
		list.update.Version.Incarnation = 1
		list.update.Version.Sequence++
		t.hub.Update(list.update)
	}
}
