package conn

import (
	"slices"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/fanout"
	"headcount/gateway/pusher"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// wanted is a page that a connection's client has joined or subscribed to.
type wanted struct {
	name   string // see presence.Site.Qualify
	joined bool
	counts counts
}

// counts says until when a connection gets the counts of a page.
type counts uint8

const (
	noCounts         counts = iota // none: an unsubscribe has ended them
	untilLeave                     // subscribed by a join
	untilUnsubscribe               // subscribed by a subscribe message; a leave does not end them
)

// want returns the connection's page with the name, and adds it if it is missing, neither
// joined nor subscribed. It returns nil if another page would exceed presence.MaxPages.
func (c *conn) want(name string) *wanted {
	for i := range c.wants {
		if c.wants[i].name == name {
			return &c.wants[i]
		}
	}

	// Pages and counters share one bound, since each is a subscription.
	if len(c.wants)+len(c.subscribed()) >= presence.MaxPages {
		return nil
	}

	c.wants = append(c.wants, wanted{name: name})

	return &c.wants[len(c.wants)-1]
}

// tidy drops the pages that are neither joined nor subscribed.
func (c *conn) tidy() {
	c.wants = slices.DeleteFunc(c.wants, wanted.isIdle)
}

// isIdle reports whether the page is neither joined nor subscribed, as after want has added it.
func (w wanted) isIdle() bool { return !w.joined && w.counts == noCounts }

// do serves a message. A *fault is the client's mistake; any other error ends the
// connection. do must not wait: the same goroutine serves other connections.
func (c *conn) do(m message) error {
	// A message with one name is charged as a message alone.
	if names := len(m.pages) + len(m.counters); names > 1 {
		c.chargeNames(names)
	}

	site := c.site()
	// From here on they are names, which have the site in them.
	for i, page := range m.pages {
		m.pages[i] = site.Qualify(page)
	}
	for i, key := range m.counters {
		m.counters[i] = site.Qualify(key)
	}

	// Whoever is on a private page may leave it without asking.
	if m.kind == typeJoin || m.kind == typeSubscribe {
		if err := c.admitPrivate(m.pages); err != nil {
			return err
		}
	}

	switch m.kind {
	case typeJoin:
		return c.join(m.pages[0])
	case typeLeave:
		c.leave(m.pages[0])
	case typeSubscribe:
		return c.subscribe(m)
	case typeUnsubscribe:
		c.unsubscribe(m.pages)
		c.unsubscribeCounters(m.counters)
	case typeHeartbeat:
		return c.send(websocket.Text, c.dialect().heartbeat())
	case typeSignin:
		return c.send(websocket.Text, pusher.AppendNoSignin(nil))
	case typePause, typeResume:
		c.Pause(m.kind == typePause)
	case typeRead:
		page := ""
		if len(m.pages) > 0 {
			page = m.pages[0]
		}
		c.all.cfg.Unread.Read(c.sum, c, page)
	}

	return nil
}

// admitPrivate returns a fault about the first of the pages that is private and not open to the client.
func (c *conn) admitPrivate(names []string) error {
	if c.server {
		return nil
	}

	var open []string
	if c.opens != nil {
		open = *c.opens
	}

	if name := c.all.cfg.Callers.Shut(names, open); name != "" {
		return faultOf(calls.ErrNotPublic, api.PrivateDetail).about("page", presence.KeyOf(name))
	}

	return nil
}

// enterRoster joins the page in the roster, which calls Arrived when the store has the join. A crawler joins nothing
// and only gets the counts.
func (c *conn) enterRoster(name string) error {
	// There is no join to wait for, so the counts come at once.
	if c.crawler {
		c.all.crawlers.add(name, 1)
		c.Arrived(name)
		return nil
	}

	c.noteJoin(name)

	return c.all.cfg.Roster.Join(c.user, name, c)
}

// waits reports whether the store is yet to have the join of the page.
func (c *conn) waits(name string) bool { return !c.crawler && c.all.cfg.Roster.Waits(c.user, name, c) }

// leaveRoster ends what enterRoster began, with the grace if the connection was lost.
func (c *conn) leaveRoster(name string, lost bool) {
	if c.crawler {
		c.all.crawlers.add(name, -1)
		return
	}

	c.noteLeave(name)
	c.all.cfg.Roster.Leave(c.user, name, c, lost)
}

// join joins the page and subscribes to it. The page's next count is held back
// until the store has the join, so that this count includes the client.
func (c *conn) join(name string) error {
	w := c.want(name)
	if w == nil {
		return faultBeyond(bounds.Pages).about("page", presence.KeyOf(name))
	}

	// A page that the connection has already is nothing new to the gateway.
	if w.isIdle() && !c.admitNewTopics(presence.CountTopic(name)) {
		c.tidy() // want has added it

		return c.dialect().tooManyNew(name)
	}

	topic := presence.CountTopic(name)
	switch {
	case !w.joined:
		return c.take(w)
	case w.counts != noCounts:
		c.Renew(topic)
	default: // an unsubscribe has ended the counts, and the owner may have let the user time out since the join
		w.counts = untilLeave
		c.Withhold(topic)
		c.confirm(name)
	}

	return nil
}

// take joins a page that the client has not joined. The page's next count is held back until the store has the join.
// So is that of the site, unless the store has another join of the connection.
func (c *conn) take(w *wanted) error {
	name := w.name // tidy may remove w
	// Withheld before enterRoster, whose arrival may come at once.
	topic := presence.CountTopic(name)
	c.Withhold(topic)
	if form := c.dialect().form(); form != 0 {
		c.Reform(topic, form, false)
	}

	totalWaits := c.watchesTotal() && !c.counted() && !c.totalHeld.Load()
	if totalWaits {
		c.Withhold(c.total())
	}

	if err := c.enterRoster(name); err != nil {
		// The page and the site are as before the attempt.
		if w.counts != noCounts {
			c.Ready(topic)
		} else {
			c.Unsubscribe(topic)
		}
		if totalWaits {
			c.Ready(c.total())
		}
		c.tidy()

		return tooManyOfUser.about("page", presence.KeyOf(name))
	}

	w.joined = true
	w.counts = max(w.counts, untilLeave)
	c.all.metrics.joins.Inc()
	if totalWaits {
		c.holdTotal()
	}

	return nil
}

// confirm is enterRoster for a page that the client has joined before.
func (c *conn) confirm(name string) {
	if c.crawler {
		c.Arrived(name)
		return
	}

	c.all.cfg.Roster.Confirm(c.user, name, c)
}

// Arrived implements roster.Joiner: the store has the join.
func (c *conn) Arrived(name string) {
	if !c.crawler {
		c.all.cfg.Arrivals.Arrived(c.user, c.name)
	}

	// Before Ready, after which the count may follow at once: a client learns of its join first.
	c.dialect().arrived(c, name)
	c.noteArrival(name)
	c.Ready(presence.CountTopic(name))
	c.releaseTotal()
}

// counted reports whether the store has a join of the client.
func (c *conn) counted() bool {
	return slices.ContainsFunc(c.wants, func(w wanted) bool { return w.joined && !c.waits(w.name) })
}

// uncounted reports whether the client has joined pages and the store has none of these
// joins. Then the count of its site may lack the user.
func (c *conn) uncounted() bool {
	joined := slices.ContainsFunc(c.wants, func(w wanted) bool { return w.joined })

	return joined && !c.counted()
}

// watchesTotal reports whether the client gets the count of its site.
func (c *conn) watchesTotal() bool {
	return slices.ContainsFunc(c.wants, func(w wanted) bool {
		return w.counts != noCounts && presence.KeyOf(w.name) == presence.AllPages
	})
}

// total returns the topic of the count of the connection's site.
func (c *conn) total() presence.Topic {
	return presence.CountTopic(c.site().Qualify(presence.AllPages))
}

// holdTotal holds the count of the site back, which is withheld already, until the store has a join.
func (c *conn) holdTotal() {
	c.totalHeld.Store(true)
	if !c.uncounted() { // the last join arrived before totalHeld was set
		c.releaseTotal()
	}
}

// releaseTotal stops holding back the count of the site.
func (c *conn) releaseTotal() {
	// Few connections hold it back, so most calls only read.
	if c.totalHeld.Load() && c.totalHeld.Swap(false) {
		c.Ready(c.total())
	}
}

// leave ends the user's presence on the page, and the subscription that the join
// made.
func (c *conn) leave(name string) {
	i := slices.IndexFunc(c.wants, func(w wanted) bool { return w.name == name })

	if i < 0 || !c.wants[i].joined {
		return
	}

	w := &c.wants[i]
	w.joined = false

	switch w.counts {
	case untilUnsubscribe:
		c.Ready(presence.CountTopic(name)) // the count of the page no longer waits for the join
	case untilLeave:
		w.counts = noCounts
		c.Unsubscribe(presence.CountTopic(name))
	}

	c.releaseTotal() // the count of the site does not wait for this join either
	c.tidy()
	c.all.metrics.leaves.WithLabelValues(leftPage).Inc()
	c.leaveRoster(name, false)
}

// subscribe subscribes to all pages and counters of the message. If they are too
// many, or the client may not read one of them, it subscribes to none. Like the count of a
// joined page, the count of the site is held back until the store has a join of the
// connection, so that the count includes the client.
func (c *conn) subscribe(m message) error {
	// All that may refuse the message comes before the first change.
	rules, err := c.readable(m.counters)
	if err != nil {
		return err
	}

	fresh, fit := c.fresh(m)
	if !fit {
		return faultBeyond(bounds.Pages)
	}
	if !c.admitNewTopics(fresh...) {
		return faultBeyond(bounds.NewTopics)
	}

	// The count of a page that the client has joined, but not yet seen, waits for the join.
	var withheld []string
	for _, name := range m.pages {
		w := c.want(name) // fresh has seen to it that there is room
		if w.joined && w.counts == noCounts {
			c.Withhold(presence.CountTopic(name))
			withheld = append(withheld, name)
		}
		w.counts = untilUnsubscribe
	}

	topics := presence.CountTopics(m.pages)
	// A count that is held back already is not held back for longer because the client asks again.
	totalWaits := slices.Contains(topics, c.total()) && c.uncounted() && !c.totalHeld.Load()
	// Before Subscribe, which sends the count at once.
	if totalWaits {
		c.Withhold(c.total())
	}

	c.Subscribe(topics, fanout.Form(m.precision))
	if totalWaits {
		c.holdTotal()
	}

	for _, name := range withheld {
		c.confirm(name)
	}
	c.subscribeCounters(m.counters, rules)

	return nil
}

// fresh returns the topics of a subscribe that the connection does not have, each once. It stops when the connection
// has no room for them, and fit is then false: a long list must not be compared whole.
func (c *conn) fresh(m message) (fresh []presence.Topic, fit bool) {
	room := presence.MaxPages - len(c.wants) - len(c.subscribed())

	for _, name := range m.pages {
		topic := presence.CountTopic(name)
		has := slices.ContainsFunc(c.wants, func(w wanted) bool { return w.name == name })
		if !has && !slices.Contains(fresh, topic) {
			fresh = append(fresh, topic)
		}
		if len(fresh) > room {
			return nil, false
		}
	}

	for _, key := range m.counters {
		topic := counterapi.Topic(key)
		if !slices.Contains(c.subscribed(), key) && !slices.Contains(fresh, topic) {
			fresh = append(fresh, topic)
		}
		if len(fresh) > room {
			return nil, false
		}
	}

	return fresh, true
}

// unsubscribe ends the subscriptions to these pages. The user stays present there.
func (c *conn) unsubscribe(names []string) {
	for _, name := range names {
		i := slices.IndexFunc(c.wants, func(w wanted) bool { return w.name == name })
		if i < 0 || c.wants[i].counts == noCounts {
			continue
		}

		c.wants[i].counts = noCounts
		c.Unsubscribe(presence.CountTopic(name))
		if presence.KeyOf(name) == presence.AllPages {
			c.totalHeld.Store(false) // a later subscription is held back anew
		}
	}
	c.tidy()
}

var tooManyOfUser = faultOf(presence.ErrTooMany,
	"a user may join at most 10000 pages over all connections; leave some")
