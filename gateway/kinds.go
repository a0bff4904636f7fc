package gateway

import (
	"headcount/gateway/conn"
	"headcount/gateway/counterapi"
	"headcount/presence"
	"headcount/unread"
)

// registerKinds registers every kind of topic with the receiver of its updates:
// clients, through an encoder, or a part of this process.
func (g *Gateway) registerKinds() {
	g.hub.Deliver(presence.KindCount, conn.CountEncoder{})
	g.hub.Supply(counterapi.Kind, conn.CounterEncoder{}, g.live)
	g.hub.Supply(counterapi.TopKind, namedEvent("top"), g.liveTop.Visitors)
	g.hub.Supply(counterapi.ServerTopKind, namedEvent("top"), g.liveTop.Servers)
	g.hub.Supply(userKind, namedEvent("user"), g.users)
	g.hub.Supply(topPagesKind, namedEvent("top"), g.topPages)
	g.hub.Watch(unread.KindLevel, g.unread)
	g.hub.Watch(unread.KindRecord, g.unread)
}
