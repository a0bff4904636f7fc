package gateway

import (
	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/api"
	"headcount/gateway/conn"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// metrics are the metrics of the entrance. Labels are reasons and limits, never a page or a user, so
// the number of time series is bounded.
type metrics struct {
	refused  prometheus.Counter
	evicted  prometheus.Counter
	limits   *prometheus.CounterVec // by limit
	ignored  *prometheus.CounterVec // by reason
	joinWait prometheus.Histogram
}

// Stats returns the gateway's figures.
func (g *Gateway) Stats() presence.GatewayStats {
	return presence.GatewayStats{
		Connections: g.clients.Connections(),
		Watched:     int64(g.hub.Topics()),
		Deliveries:  g.hub.Figures().Delivered,
		Messages:    g.clients.Received(),
	}
}

// newMetrics makes the metrics that the gateway counts itself.
func newMetrics() *metrics {
	plain := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}

	return &metrics{
		refused: plain("headcount_connections_refused_total", "Connections refused because there were too many."),
		evicted: plain("headcount_connections_evicted_total",
			"Connections closed to make room for others, because they were silent or made no progress."),
		limits: api.Labeled("headcount_limits_hit_total",
			"Refusals because of a limit, by limit: connections, address (connections of one), memory, identities, "+
				"pages (of a connection), rate, size (of a message), errors (of a connection).",
			"limit",
			append(conn.Limits, httppolicy.ReasonConnections, httppolicy.ReasonAddress, httppolicy.ReasonMemory,
				api.LimitIdentities, api.LimitRate)...),
		ignored: api.Labeled("headcount_ignored_total",
			"Connections, holds and changes of clients that are not counted, by reason: crawler.",
			"reason", api.IgnoredCrawler),
		joinWait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headcount_join_to_seen_seconds",
			Help:    "Time from a join until the store has it and the client may see a count that includes it.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
	}
}

// registerMetrics registers the metrics, including those that are read from the parts of the gateway.
func (g *Gateway) registerMetrics(reg prometheus.Registerer) {
	sum := func(name, help string, labels prometheus.Labels, of func() int64) prometheus.Collector {
		opts := prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}
		return prometheus.NewCounterFunc(opts, func() float64 { return float64(of()) })
	}
	gauge := func(name, help string, of func() int64) prometheus.Collector {
		opts := prometheus.GaugeOpts{Name: name, Help: help}
		return prometheus.NewGaugeFunc(opts, func() float64 { return float64(of()) })
	}
	dropped := func(reason string, of func() int64) prometheus.Collector {
		return sum("headcount_deliveries_dropped_total",
			"Counts not written to a subscriber, by reason: busy (the last write was still under way; the newest "+
				"count follows), gone (the connection had ended, or the write failed).",
			prometheus.Labels{"reason": reason}, of)
	}

	m := g.metrics
	figures := g.hub.Figures

	reg.MustRegister(g.clients.Collectors()...)
	reg.MustRegister(
		m.refused, m.evicted, m.limits, m.ignored, m.joinWait,
		sum("headcount_deliveries_total", "Counts written to subscribers.", nil,
			func() int64 { return figures().Delivered }),
		sum("headcount_deliveries_conflated_total", "Counts replaced by a newer one before a subscriber got them.", nil,
			func() int64 { return figures().Conflated }),
		dropped("busy", func() int64 { return figures().Busy }),
		dropped("gone", func() int64 { return figures().Unwritten }),
		sum("headcount_clients_silent_total", "Connections closed because the client did not answer a ping.", nil,
			func() int64 { return figures().Silent }),
		sum("headcount_client_messages_total", "Messages received from clients.", nil, g.clients.Received),
		sum("headcount_beats_repeated_total",
			"Joins and leaves sent to a presence node again because it had not acknowledged them.", nil,
			g.roster.Repeated),
		gauge("headcount_connections", "Open WebSockets and event streams.", g.clients.Connections),
		gauge("headcount_pages_watched",
			"Topics that clients or unread counts at this gateway need: pages, and users with a WebSocket.",
			func() int64 { return int64(g.hub.Topics()) }),
	)
}
