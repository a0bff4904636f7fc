package gateway

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/api"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// metrics are the gateway's metrics. Labels are route patterns and codes, never a
// page or a user, so their number is bounded.
type metrics struct {
	received atomic.Int64 // client messages
	faults   *prometheus.CounterVec
	refused  prometheus.Counter
	evicted  prometheus.Counter
	joins    prometheus.Counter
	leaves   map[string]prometheus.Counter // by cause
	limits   *prometheus.CounterVec        // by limit
	seen     prometheus.Histogram
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

// limitOfCode is the limit that an error frame tells of.
var limitOfCode = map[string]string{
	codeTooManyPages: limitPages, codeRateLimited: api.LimitRate, codeTooLarge: limitSize, codeTooManyErrors: limitErrors,
}

// byLabel is what vec has for each of the values; all of them are shown from 0 on.
func byLabel(vec *prometheus.CounterVec, values ...string) map[string]prometheus.Counter {
	all := map[string]prometheus.Counter{}
	for _, value := range values {
		all[value] = vec.WithLabelValues(value)
	}
	return all
}

// Stats returns the gateway's statistics. Any goroutine may call it.
func (g *Gateway) Stats() presence.GatewayStats {
	return presence.GatewayStats{
		Connections: g.connections.Load(), Watched: int64(g.hub.Topics()), Deliveries: g.hub.Delivered(), Messages: g.metrics.received.Load(),
	}
}

// newMetrics makes the metrics, and registers them unless reg is nil.
func newMetrics(g *Gateway, reg prometheus.Registerer) *metrics {
	m := &metrics{
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_client_errors_total", Help: "Error frames sent to clients, by code.",
		}, []string{"code"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_refused_total", Help: "Connections refused because there were too many.",
		}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_evicted_total", Help: "Connections that were closed to make room for others, since they were silent or made no progress.",
		}),
		joins: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_joins_total", Help: "Pages that connections joined.",
		}),
		seen: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headcount_join_to_seen_seconds", Help: "Time from a join until the store has it and the client may see a count that includes it.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
	}
	byLabel(m.faults, codeBadJSON, codeBadType, codeBadPage, codeBadCounter, codeForbidden, codeTooManyPages, codeTooLarge, codeBinary,
		codeTooManyErrors, codeRateLimited, codeTokenExpired)
	leaves := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_leaves_total",
		Help: "Pages that connections left, by cause: left (the client said so), closed (it closed its connection), sent_away (the gateway did), lost (nobody said anything).",
	}, []string{"cause"})
	m.leaves = byLabel(leaves, leftPage, leftClosed, leftSentAway, leftLost)
	m.limits = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_limits_hit_total",
		Help: "What clients were refused because of a limit: connections, address (its connections), memory, identities, pages (of a connection), rate, size (of a message), errors (of a connection).",
	}, []string{"limit"})
	byLabel(m.limits, limitConnections, limitAddress, limitMemory, api.LimitIdentities, limitPages, api.LimitRate, limitSize, limitErrors)
	if reg == nil {
		return m
	}
	figure := func(name, help string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	dropped := func(reason string, of func(fanout.Figures) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_dropped_total", ConstLabels: prometheus.Labels{"reason": reason},
			Help: "Counts that were not written to a subscriber, by reason: busy (it had not taken the last one; it gets the newest when it has), gone.",
		}, func() float64 { return float64(of(g.hub.Figures())) })
	}
	reg.MustRegister(
		leaves, m.limits, m.joins, m.seen,
		figure("headcount_deliveries_conflated_total", "Counts that a newer one replaced before a subscriber got them.", func(f fanout.Figures) int64 { return f.Conflated }),
		dropped("busy", func(f fanout.Figures) int64 { return f.Busy }),
		dropped("gone", func(f fanout.Figures) int64 { return f.Unwritten }),
		figure("headcount_clients_silent_total", "Connections that were closed since the client did not answer a ping.", func(f fanout.Figures) int64 { return f.Silent }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_beats_repeated_total", Help: "Joins and leaves that were sent to a presence node again, since it had not acknowledged them.",
		}, func() float64 { return float64(g.roster.repeated.Load()) }),
		m.faults, m.refused, m.evicted,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_connections", Help: "Open WebSockets and event streams.",
		}, func() float64 { return float64(g.connections.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_pages_watched", Help: "Topics that clients or unread counts at this gateway need: pages, and users with a WebSocket.",
		}, func() float64 { return float64(g.hub.Topics()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_total", Help: "Counts written to subscribers.",
		}, func() float64 { return float64(g.hub.Delivered()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_client_messages_total", Help: "Messages received from clients.",
		}, func() float64 { return float64(m.received.Load()) }),
	)
	return m
}
