package gateway

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/api"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// metrics are those of connections. Labels are codes, causes and limits, never a page or a user, so
// their number is bounded.
type metrics struct {
	received atomic.Int64           // client messages
	faults   *prometheus.CounterVec // by code
	refused  prometheus.Counter
	evicted  prometheus.Counter
	joins    prometheus.Counter
	leaves   *prometheus.CounterVec // by cause
	limits   *prometheus.CounterVec // by limit
	joinWait prometheus.Histogram
}

// Causes of a leave.
const (
	leftPage     = "left"      // the client has said so, and stays connected
	leftClosed   = "closed"    // the client has closed its connection
	leftSentAway = "sent_away" // this gateway has: it drains, the token has expired, or the client made too many errors
	leftLost     = "lost"      // neither has said anything, or the client did not take what it was sent
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

// limitOfCode is the limit that a client has reached who gets an error frame with this code.
var limitOfCode = map[string]string{
	codeTooManyPages: limitPages, codeRateLimited: api.LimitRate, codeTooLarge: limitSize, codeTooManyErrors: limitErrors,
}

// Stats returns the gateway's statistics. Any goroutine may call it.
func (g *Gateway) Stats() presence.GatewayStats {
	return presence.GatewayStats{
		Connections: g.connections.Load(), Watched: int64(g.hub.Topics()), Deliveries: g.hub.Figures().Delivered, Messages: g.metrics.received.Load(),
	}
}

// newMetrics makes the metrics that others change.
func newMetrics() *metrics {
	return &metrics{
		faults: labeled("headcount_client_errors_total", "Error frames sent to clients, by code.", "code",
			codeBadJSON, codeBadType, codeBadPage, codeBadCounter, codeForbidden, codeTooManyPages, codeTooLarge, codeBinary,
			codeTooManyErrors, codeRateLimited, codeTokenExpired),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_refused_total", Help: "Connections refused because there were too many.",
		}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_evicted_total", Help: "Connections that were closed to make room for others, since they were silent or made no progress.",
		}),
		joins: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_joins_total", Help: "Pages that connections joined.",
		}),
		leaves: labeled("headcount_leaves_total",
			"Pages that connections left, by cause: left (the client said so), closed (it closed its connection), sent_away (the gateway did), lost (nobody said anything).", "cause",
			leftPage, leftClosed, leftSentAway, leftLost),
		limits: labeled("headcount_limits_hit_total",
			"What clients were refused because of a limit: connections, address (its connections), memory, identities, pages (of a connection), rate, size (of a message), errors (of a connection).", "limit",
			limitConnections, limitAddress, limitMemory, api.LimitIdentities, limitPages, api.LimitRate, limitSize, limitErrors),
		joinWait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headcount_join_to_seen_seconds", Help: "Time from a join until the store has it and the client may see a count that includes it.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
	}
}

// labeled returns a counter for each value of a label. All of them are shown from 0 on.
func labeled(name, help, label string, values ...string) *prometheus.CounterVec {
	vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	for _, value := range values {
		vec.WithLabelValues(value)
	}
	return vec
}

// registerMetrics registers the metrics, and those that are read from the parts of the gateway.
func (g *Gateway) registerMetrics(reg prometheus.Registerer) {
	figure := func(name, help string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	dropped := func(reason string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_dropped_total", ConstLabels: prometheus.Labels{"reason": reason},
			Help: "Counts that were not written to a subscriber, by reason: busy (it had not taken the last one; it gets the newest when it has), gone.",
		}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	m := g.metrics
	reg.MustRegister(
		m.faults, m.refused, m.evicted, m.joins, m.leaves, m.limits, m.joinWait,
		figure("headcount_deliveries_conflated_total", "Counts that a newer one replaced before a subscriber got them.", func(f fanout.Figures) int64 { return f.Conflated }),
		dropped("busy", func(f fanout.Figures) int64 { return f.Busy }),
		dropped("gone", func(f fanout.Figures) int64 { return f.Unwritten }),
		figure("headcount_clients_silent_total", "Connections that were closed since the client did not answer a ping.", func(f fanout.Figures) int64 { return f.Silent }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_beats_repeated_total", Help: "Joins and leaves that were sent to a presence node again, since it had not acknowledged them.",
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
