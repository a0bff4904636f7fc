package api

import (
	"cmp"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/httppolicy"
)

// Values of the label of Parts.Limits.
const (
	LimitIdentities = "identities" // different identities that an address uses in writes
	LimitRate       = "rate"       // of new pages, erasures, or messages of a client
)

// httpMetrics are the metrics of requests. Labels are route patterns, methods, statuses and
// reasons, never a page or a user, so their number is bounded.
type httpMetrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	panics   prometheus.Counter
	refusals *prometheus.CounterVec
}

// newHTTPMetrics makes the metrics, and registers them unless reg is nil.
func newHTTPMetrics(reg prometheus.Registerer) *httpMetrics {
	m := &httpMetrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_http_requests_total", Help: "HTTP requests, by route pattern, method and status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headcount_http_request_seconds", Help: "Time to answer, by route pattern. For a long " +
				"connection, only the time to open it.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}, []string{"route"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_panics_total", Help: "Requests that panicked. Each one is a defect.",
		}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_http_refusals_total",
			Help: "HTTP requests that were refused, by reason: api_key, signature, no_token, bad_token, origin, " +
				"site (the " +
				"key or the page is of another one), connections, address (its connections) and memory; for all " +
				"others a word for the status. The log has each at the level debug.",
		}, []string{"reason"}),
	}
	// So that all series exist from the start.
	for _, reason := range httppolicy.Reasons() {
		m.refusals.WithLabelValues(reason)
	}
	if reg != nil {
		reg.MustRegister(m.requests, m.seconds, m.panics, m.refusals)
	}
	return m
}

// openedKey is the key of a request's context under which it has the time of Opened.
const openedKey = "opened"

// Opened says that the request is a long connection from now on, though its handler goes on.
func Opened(c *gin.Context) { c.Set(openedKey, time.Now()) }

// observe counts a request under its route pattern.
func (m *httpMetrics) observe(c *gin.Context) {
	start := time.Now()
	c.Next()

	answered := time.Now()
	if opened := c.GetTime(openedKey); !opened.IsZero() {
		answered = opened
	}

	route := routeOf(c)
	m.requests.WithLabelValues(route, methodOf(c), strconv.Itoa(c.Writer.Status())).Inc()
	m.seconds.WithLabelValues(route).Observe(answered.Sub(start).Seconds())
}

// routeOf returns the pattern of the request's route.
func routeOf(c *gin.Context) string { return cmp.Or(c.FullPath(), "none") }

// methodOf returns the request's method, or "other", because methods that clients invent must not become labels.
func methodOf(c *gin.Context) string {
	switch method := c.Request.Method; method {
	case "GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS":
		return method
	}
	return "other"
}

// Labeled returns a counter for each value of a label. Each counter is exported from the start, at 0.
func Labeled(name, help, label string, values ...string) *prometheus.CounterVec {
	vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	for _, value := range values {
		vec.WithLabelValues(value)
	}

	return vec
}
