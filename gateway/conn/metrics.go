package conn

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/api"
	"headcount/gateway/calls"
)

// metrics are the metrics of connections. Labels are codes, causes and reasons, never a page or a user, so the
// number of time series is bounded.
type metrics struct {
	received atomic.Int64           // client messages
	faults   *prometheus.CounterVec // by code
	closed   *prometheus.CounterVec // by reason
	joins    prometheus.Counter
	leaves   *prometheus.CounterVec // by cause
}

// Causes of a leave.
const (
	leftPage   = "left"   // the client sent a leave, and stays connected
	leftClosed = "closed" // the client closed the connection
	// The gateway sent a close frame: it drains, the token has expired, or the client made too many errors
	leftSentAway = "sent_away"
	leftLost     = "lost" // the connection ended without a close frame, for instance after a timeout
)

// closedSlow is the reason for which the gateway closes a connection whose client does not read.
const closedSlow = "slow"

// Limits that clients reach.
const (
	limitPages  = "pages"  // pages and counters of one connection
	limitSize   = "size"   // of a message
	limitErrors = "errors" // of one connection
)

// Limits are the limits that connections count in Config.Limits, besides api.LimitRate.
var Limits = []string{limitPages, limitSize, limitErrors}

// limitOfCode has the limit that an error frame's code stands for.
var limitOfCode = map[string]string{
	calls.CodeTooManyPages: limitPages, calls.CodeRateLimited: api.LimitRate,
	calls.CodeTooLarge: limitSize, calls.CodeTooManyErrors: limitErrors,
}

func newMetrics() *metrics {
	return &metrics{
		faults: api.Labeled("headcount_client_errors_total", "Error frames sent to clients, by code.", "code",
			calls.Codes...),
		closed: api.Labeled("headcount_connections_closed_total",
			"Connections that the gateway closed, by reason: slow (the client did not read what was sent to it).",
			"reason", closedSlow),
		joins: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_joins_total", Help: "Pages that connections joined.",
		}),
		leaves: api.Labeled("headcount_leaves_total",
			"Pages that connections left, by cause: left (the client sent a leave), closed (the client closed the "+
				"connection), sent_away (the gateway sent a close frame), lost (it ended without one, also where the "+
				"gateway closed a slow or silent client).",
			"cause",
			leftPage, leftClosed, leftSentAway, leftLost),
	}
}

// countFault counts a fault that a client is sent, and the limit that it is about.
func (cs *Clients) countFault(f *fault) {
	cs.metrics.faults.WithLabelValues(f.code).Inc()
	if limit, is := limitOfCode[f.code]; is {
		cs.cfg.Limits.WithLabelValues(limit).Inc()
	}
}

// Collectors returns the metrics of connections.
func (cs *Clients) Collectors() []prometheus.Collector {
	m := cs.metrics
	return []prometheus.Collector{m.faults, m.closed, m.joins, m.leaves}
}

// Received returns the number of messages that clients have sent.
func (cs *Clients) Received() int64 { return cs.metrics.received.Load() }
