package gateway

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a gateway. Labels are route patterns and codes, never a page or a
// user: their number is bounded.
type metrics struct {
	received atomic.Int64 // client messages
	faults   *prometheus.CounterVec
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	refused  prometheus.Counter
	evicted  prometheus.Counter
	panics   prometheus.Counter
	all      []prometheus.Collector
}

func newMetrics(g *Gateway) *metrics {
	m := &metrics{
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_client_errors_total", Help: "Error frames sent to clients, by code.",
		}, []string{"code"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_http_requests_total", Help: "HTTP requests, by route pattern, method and status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headcount_http_request_seconds", Help: "Time to answer, by route pattern; of long connections only the time to open them.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}, []string{"route"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_refused_total", Help: "Connections refused because there were too many.",
		}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_connections_evicted_total", Help: "Connections without a request for a second or more that were closed to make room for others.",
		}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_panics_total", Help: "Requests that panicked: defects.",
		}),
	}
	m.all = []prometheus.Collector{
		m.faults, m.requests, m.seconds, m.refused, m.evicted, m.panics,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_connections", Help: "Open WebSockets and event streams.",
		}, func() float64 { return float64(g.connections.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_pages_watched", Help: "Pages with subscribers or followers at this gateway, and followers.",
		}, func() float64 {
			g.hub.mu.Lock()
			defer g.hub.mu.Unlock()
			return float64(len(g.hub.pages))
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_deliveries_total", Help: "Counts written to subscribers.",
		}, func() float64 {
			n := int64(0)
			for _, s := range g.hub.shards {
				n += s.delivered.Load()
			}
			return float64(n)
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "headcount_client_messages_total", Help: "Messages received from clients.",
		}, func() float64 { return float64(m.received.Load()) }),
	}
	return m
}

func (m *metrics) collectors() []prometheus.Collector { return m.all }

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
	m.requests.WithLabelValues(route, method, strconv.Itoa(c.Writer.Status())).Inc()
	m.seconds.WithLabelValues(route).Observe(time.Since(start).Seconds())
}
