package counterapi

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	topAge      = time.Second // the most age of a list that is followed
	maxTopLists = 256         // lists that are followed at a time, about; a stream of a further one is 429

	// An address may begin to follow so many lists a second that nobody follows.
	newListRate  = 1
	newListBurst = 5
)

// TopKind is the kind of the topics of top lists. Their values are JSON.
var TopKind = presence.KindOf("top")

// LiveTop follows the top lists that clients look at. A list is computed once, however many clients look at it, and takes its
// turn with the other public questions. Any goroutine may call the methods.
type LiveTop struct {
	*fanout.Poll
	api   *API
	fresh *httppolicy.RateLimiter // of lists that nobody follows yet, by address
}

// NewLiveTop returns a LiveTop that does nothing until Run.
func NewLiveTop(api *API, hub Hub) *LiveTop {
	t := &LiveTop{api: api, fresh: httppolicy.NewRateLimiter(newListRate, newListBurst)}
	t.Poll = fanout.NewPoll(hub, t)
	return t
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
	if followed, lists := t.Wanted(topic); !followed && (lists >= maxTopLists || !server && !t.admits(c)) {
		t.api.crowded(c)
		return topic, false
	}
	_, ok = t.api.findTop(c, list, server)
	return topic, ok
}

// admits reports whether the address of the request may begin to follow another list.
func (t *LiveTop) admits(c *gin.Context) bool {
	ok, _ := t.fresh.Allow(httppolicy.Caller{Addr: t.api.callers.Addr(c.Request)}, time.Now())
	return ok
}

// Values implements fanout.Polled. Lists that cannot be computed now have none.
func (t *LiveTop) Values(ctx context.Context, topics []presence.Topic, found func(presence.Topic, string)) {
	for _, topic := range topics {
		list, ok := t.listOf(topic)
		if !ok { // Readable made the topic, so this cannot be
			continue
		}
		within, cancel := context.WithTimeout(ctx, readTime)
		top, err := t.api.askTop(within, list, min(list.rule.Stale, topAge), Asker{})
		cancel()
		if err != nil {
			t.api.cfg.Log.Debug().Err(err).Str("match", list.rule.Written()).Msg("counters: a top list that clients follow could not be computed")
			continue
		}
		found(topic, string(list.appendJSON(nil, top)))
	}
}
