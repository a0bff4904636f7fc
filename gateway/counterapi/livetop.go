package counterapi

import (
	"context"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/bounds"
	"headcount/gateway/fanout"
	"headcount/presence"
)

const (
	topAge    = time.Second      // maximum age of a followed list
	beginTime = 10 * time.Second // an admitted stream has begun by then
)

// The topic kinds of the top lists that visitors follow, and of those that servers with an API key follow. Their values
// are JSON.
var (
	TopKind       = presence.KindOf("top")
	ServerTopKind = presence.KindOf("servertop")
)

// LiveTop computes the top lists that clients follow. A list is computed once for all visitors that follow it, in turn
// with the other public questions. Lists of servers have a Poll of their own, so servers never wait for visitors, and
// visitors do not take their places. Any goroutine may call the methods.
type LiveTop struct {
	Visitors, Servers *fanout.Poll

	api       *API
	addresses *bounds.Slots // counts the lists that each address was the first to follow

	mu    sync.Mutex
	begun map[presence.Topic]*begunList // lists that visitors follow; guarded by mu
}

// begunList is a list that visitors follow.
type begunList struct {
	slot *bounds.Slot // of the visitor that followed it first, until no visitor follows the list
	at   time.Time    // when the last stream was admitted
}

// NewLiveTop returns a LiveTop that does nothing until its polls run.
func NewLiveTop(api *API, hub Hub) *LiveTop {
	t := &LiveTop{
		api: api, addresses: bounds.NewSlots(bounds.TopListsOfAddress.Max), begun: map[presence.Topic]*begunList{},
	}

	t.Visitors = fanout.NewPoll(hub, polledTops{api: api})
	t.Servers = fanout.NewPoll(hub, polledTops{api, Asker{Server: true}})

	return t
}

// topic returns the topic of a list; listOf is its inverse.
func (l topList) topic(kind presence.Kind) presence.Topic {
	site, match := presence.SplitName(l.rule.Match)
	key := l.text + " " + strconv.Itoa(l.n) + " " + match

	return presence.Topic{Site: site, Kind: kind, Key: key}
}

func (a *API) listOf(topic presence.Topic) (list topList) {
	// The match comes last, because it may have spaces.
	parts := strings.SplitN(topic.Key, " ", 3)

	// Errors cannot occur: topic has written the text.
	list.text = parts[0]
	list.last, _ = counter.ParseDuration(parts[0])
	list.n, _ = strconv.Atoi(parts[1])
	list.rule, _ = a.cfg.Rules.In(topic.Site).TopRule(parts[2])

	return list
}

// Readable returns the topic of the list whose event stream is requested, if the caller has permission and the list can
// be computed now.
func (t *LiveTop) Readable(c *gin.Context) (presence.Topic, error) {
	list, server, err := t.api.topList(c)
	if err != nil {
		return presence.Topic{}, err
	}
	// Computed first, because a stream that has begun cannot be refused with a status any more.
	if _, err := t.api.findTop(c, list, server); err != nil {
		return presence.Topic{}, err
	}

	topic := list.topic(TopKind)
	admitted := false
	if server {
		topic = list.topic(ServerTopKind)
		followed, lists := t.Servers.Wanted(topic)
		admitted = followed || lists < bounds.TopLists.Max
	} else {
		admitted = t.admits(topic, t.api.callers.Addr(c.Request))
	}
	if !admitted {
		return topic, t.api.crowded()
	}

	return topic, nil
}

// admits reports whether a visitor at an address may follow a list. If so, the list may be counted for the address.
func (t *LiveTop) admits(topic presence.Topic, addr netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	now := time.Now()
	// LiveTop is not told when the last visitor leaves a list, so look for such lists each time.
	t.endLeftLocked(now)

	if b := t.begun[topic]; b != nil {
		b.at = now
		return true
	}

	if len(t.begun) >= bounds.TopLists.Max {
		return false
	}
	slot, ok := t.addresses.Enter(addr)
	if ok {
		t.begun[topic] = &begunList{slot, now}
	}

	return ok
}

// endLeftLocked removes the lists that no visitor follows any more, except lists whose stream was admitted too recently
// to have begun.
func (t *LiveTop) endLeftLocked(now time.Time) {
	for topic, b := range t.begun {
		followed, _ := t.Visitors.Wanted(topic)
		if followed || now.Sub(b.at) <= beginTime {
			continue
		}

		b.slot.Leave()
		delete(t.begun, topic)
	}
}

// polledTops computes the followed lists.
type polledTops struct {
	api *API
	by  Asker
}

// Values implements fanout.Polled. It leaves out lists that cannot be computed now.
func (p polledTops) Values(ctx context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	for _, topic := range topics {
		list := p.api.listOf(topic)

		// Each list has this time, so that one that hangs cannot take the time of the others.
		within, cancel := context.WithTimeout(ctx, readTime)
		top, err := p.api.askTop(within, list, min(list.rule.MaxAge, topAge), p.by)
		cancel()
		if err != nil {
			p.api.cfg.Log.Debug().Err(err).Str("match", list.rule.Written()).
				Msg("counters: a top list that clients follow could not be computed")
			continue
		}

		found(topic, string(list.appendJSON(nil, top)), false)
	}
}
