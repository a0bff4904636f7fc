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
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	topAge      = time.Second      // the most age of a list that is followed
	maxTopLists = 128              // lists that visitors follow, and servers; a stream of a further one is 429
	maxBegun    = 8                // of the lists that visitors follow, those that one address was the first to follow
	beginTime   = 10 * time.Second // in which a stream has begun that was admitted
)

// The kinds of the topics of top lists that visitors follow, and servers with an API key. Their values are JSON.
var (
	TopKind       = presence.KindOf("top")
	ServerTopKind = presence.KindOf("servertop")
)

// LiveTop follows the top lists that clients look at. A list is computed once for all visitors who look at it, and
// takes its turn with the other public questions. Lists of servers have a Poll of their own, so they wait for no
// visitor, and visitors take no place of theirs. Any goroutine may call the methods.
type LiveTop struct {
	Visitors, Servers *fanout.Poll

	api       *API
	addresses *httppolicy.AddressSlots // of begun lists

	mu    sync.Mutex
	begun map[presence.Topic]*begunList // lists that visitors follow; guarded by mu
}

// begunList is a list that a visitor was the first to follow.
type begunList struct {
	slot *httppolicy.AddressSlot // of that visitor, until no visitor follows the list
	at   time.Time               // when the last stream was admitted
}

// NewLiveTop returns a LiveTop that does nothing until its polls run.
func NewLiveTop(api *API, hub Hub) *LiveTop {
	t := &LiveTop{
		api: api, addresses: httppolicy.NewAddressSlots(maxBegun), begun: map[presence.Topic]*begunList{},
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
	parts := strings.SplitN(topic.Key, " ", 3)

	// What topic has written can be read.
	list.text = parts[0]
	list.last, _ = counter.ParseDuration(parts[0])
	list.n, _ = strconv.Atoi(parts[1])
	list.rule, _ = a.cfg.Rules.In(topic.Site).TopRule(parts[2])

	return list
}

// Readable returns the topic of the list whose event stream the request asks for, if the caller has permission and
// the list can be computed now.
func (t *LiveTop) Readable(c *gin.Context) (presence.Topic, error) {
	list, server, err := t.api.topList(c)
	if err != nil {
		return presence.Topic{}, err
	}
	if _, err := t.api.findTop(c, list, server); err != nil {
		return presence.Topic{}, err
	}

	topic := list.topic(TopKind)
	admitted := false
	if server {
		topic = list.topic(ServerTopKind)
		followed, lists := t.Servers.Wanted(topic)
		admitted = followed || lists < maxTopLists
	} else {
		admitted = t.admits(topic, t.api.callers.Addr(c.Request))
	}
	if !admitted {
		return topic, t.api.crowded()
	}

	return topic, nil
}

// admits reports whether a visitor at an address may follow a list. The address may have begun to follow it then.
func (t *LiveTop) admits(topic presence.Topic, addr netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	now := time.Now()
	t.endLeftLocked(now)

	if b := t.begun[topic]; b != nil {
		b.at = now
		return true
	}

	if len(t.begun) >= maxTopLists {
		return false
	}
	slot, ok := t.addresses.Enter(addr)
	if ok {
		t.begun[topic] = &begunList{slot, now}
	}

	return ok
}

// endLeftLocked forgets the lists that no visitor follows any more. A stream that was admitted just now may not have
// begun.
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

// polledTops computes lists that are followed.
type polledTops struct {
	api *API
	by  Asker
}

// Values implements fanout.Polled. Lists that cannot be computed now have none.
func (p polledTops) Values(ctx context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	for _, topic := range topics {
		list := p.api.listOf(topic)

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
