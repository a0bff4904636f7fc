package gateway

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/presence"
)

// metrics are the gateway's metrics. Labels are route patterns and codes, never a
// page or a user, so their number is bounded.
type metrics struct {
	received atomic.Int64 // client messages
	faults   *prometheus.CounterVec
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	refused  prometheus.Counter
	evicted  prometheus.Counter
	panics   prometheus.Counter

	mu     sync.RWMutex       // guards served
	served map[answer]figures // those of requests and seconds, found once
}

// answer is what requests are counted by. There are as many as routes have methods and statuses.
type answer struct {
	route, method string
	status        int
}

type figures struct {
	requests prometheus.Counter
	seconds  prometheus.Observer
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
		served: map[answer]figures{},
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_client_errors_total", Help: "Error frames sent to clients, by code.",
		}, []string{"code"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_http_requests_total", Help: "HTTP requests, by route pattern, method and status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headcount_http_request_seconds", Help: "Time to answer, by route pattern. For a long connection, only the time to open it.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}, []string{"route"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_refused_total", Help: "Connections refused because there were too many.",
		}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_evicted_total", Help: "Connections that were closed to make room for others, since they were silent or made no progress.",
		}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_panics_total", Help: "Requests that panicked. Each one is a defect.",
		}),
	}
	if reg == nil {
		return m
	}
	reg.MustRegister(
		m.faults, m.requests, m.seconds, m.refused, m.evicted, m.panics,
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

// observe counts a request under its route pattern.
func (m *metrics) observe(c *gin.Context) {
	start := time.Now()
	c.Next()
	route := c.FullPath()
	if route == "" {
		route = "none"
	}
	method := c.Request.Method
	switch method {
	case "GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS":
	default:
		method = "other"
	}
	f := m.figures(answer{route, method, c.Writer.Status()})
	f.requests.Inc()
	f.seconds.Observe(time.Since(start).Seconds())
}

func (m *metrics) figures(a answer) figures {
	m.mu.RLock()
	f, ok := m.served[a]
	m.mu.RUnlock()
	if !ok {
		f = figures{m.requests.WithLabelValues(a.route, a.method, strconv.Itoa(a.status)), m.seconds.WithLabelValues(a.route)}
		m.mu.Lock()
		m.served[a] = f
		m.mu.Unlock()
	}
	return f
}
