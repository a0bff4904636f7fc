package gateway

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/api"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// metrics are the metrics of connections. Labels are codes, causes and limits, never a page or a user, so
// the number of time series is bounded.
type metrics struct {
	received atomic.Int64           // client messages
	faults   *prometheus.CounterVec // by code
	refused  prometheus.Counter
	evicted  prometheus.Counter
	joins    prometheus.Counter
	leaves   *prometheus.CounterVec // by cause
	limits   *prometheus.CounterVec // by limit
	ignored  *prometheus.CounterVec // by reason
	joinWait prometheus.Histogram
}

// Causes of a leave.
const (
	leftPage     = "left"      // the client sent a leave, and stays connected
	leftClosed   = "closed"    // the client closed the connection
	leftSentAway = "sent_away" // the gateway closed it: it drains, the token expired, or the client made too many errors
	leftLost     = "lost"      // the connection ended without a close frame, for instance after a timeout
)

// Limits that clients reach.
const (
	limitConnections = httppolicy.ReasonConnections // --max-connections
	limitAddress     = httppolicy.ReasonAddress     // --max-connections-per-address
	limitMemory      = httppolicy.ReasonMemory      // of the process
	limitPages       = "pages"                      // pages and counters of one connection
	limitSize        = "size"                       // of a message
	limitErrors      = "errors"                     // of one connection
)

// limitOfCode returns the limit that an error frame's code stands for.
var limitOfCode = map[string]string{
	codeTooManyPages: limitPages, codeRateLimited: api.LimitRate, codeTooLarge: limitSize, codeTooManyErrors: limitErrors,
}

// Stats returns the gateway's figures.
func (g *Gateway) Stats() presence.GatewayStats {
	return presence.GatewayStats{
		Connections: g.connections.Load(), Watched: int64(g.hub.Topics()), Deliveries: g.hub.Figures().Delivered, Messages: g.metrics.received.Load(),
	}
}

// newMetrics makes the metrics that the gateway counts itself.
func newMetrics() *metrics {
	return &metrics{
		faults: labeled("headcount_client_errors_total", "Error frames sent to clients, by code.", "code",
			codeBadJSON, codeBadType, codeBadPage, codeBadCounter, codeForbidden, codeTooManyPages, codeTooLarge, codeBinary,
			codeTooManyErrors, codeRateLimited, codeTokenExpired),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_refused_total", Help: "Connections refused because there were too many.",
		}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_evicted_total", Help: "Connections closed to make room for others, because they were silent or made no progress.",
		}),
		joins: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_joins_total", Help: "Pages that connections joined.",
		}),
		leaves: labeled("headcount_leaves_total",
			"Pages that connections left, by cause: left (the client sent a leave), closed (the client closed the connection), sent_away (the gateway closed it), lost (the connection ended without a close frame).", "cause",
			leftPage, leftClosed, leftSentAway, leftLost),
		limits: labeled("headcount_limits_hit_total",
			"Refusals because of a limit, by limit: connections, address (connections of one), memory, identities, pages (of a connection), rate, size (of a message), errors (of a connection).", "limit",
			limitConnections, limitAddress, limitMemory, api.LimitIdentities, limitPages, api.LimitRate, limitSize, limitErrors),
		ignored: labeled("headcount_ignored_total", "Connections, holds and changes of clients that are not counted, by reason: crawler.", "reason", api.IgnoredCrawler),
		joinWait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headcount_join_to_seen_seconds", Help: "Time from a join until the store has it and the client may see a count that includes it.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
	}
}

// labeled returns a counter for each value of a label. Each counter is exported from the start, at 0.
func labeled(name, help, label string, values ...string) *prometheus.CounterVec {
	vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	for _, value := range values {
		vec.WithLabelValues(value)
	}
	return vec
}

// registerMetrics registers the metrics, including those that are read from the parts of the gateway.
func (g *Gateway) registerMetrics(reg prometheus.Registerer) {
	figure := func(name, help string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	dropped := func(reason string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_dropped_total", ConstLabels: prometheus.Labels{"reason": reason},
			Help: "Counts not written to a subscriber, by reason: busy (the last write was still under way; the newest count follows), gone (the connection had ended, or the write failed).",
		}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	m := g.metrics
	reg.MustRegister(
		m.faults, m.refused, m.evicted, m.joins, m.leaves, m.limits, m.ignored, m.joinWait,
		figure("headcount_deliveries_conflated_total", "Counts replaced by a newer one before a subscriber got them.", func(f fanout.Figures) int64 { return f.Conflated }),
		dropped("busy", func(f fanout.Figures) int64 { return f.Busy }),
		dropped("gone", func(f fanout.Figures) int64 { return f.Unwritten }),
		figure("headcount_clients_silent_total", "Connections closed because the client did not answer a ping.", func(f fanout.Figures) int64 { return f.Silent }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_beats_repeated_total", Help: "Joins and leaves sent to a presence node again because it had not acknowledged them.",
		}, func() float64 { return float64(g.roster.repeated.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_connections", Help: "Open WebSockets and event streams.",
		}, func() float64 { return float64(g.connections.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_pages_watched", Help: "Topics that clients or unread counts at this gateway need: pages, and users with a WebSocket.",
		}, func() float64 { return float64(g.hub.Topics()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_total", Help: "Counts written to subscribers.",
		}, func() float64 { return float64(g.hub.Figures().Delivered) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_client_messages_total", Help: "Messages received from clients.",
		}, func() float64 { return float64(m.received.Load()) }),
	)
}
