package api

import (
	"net/http"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// traced starts a span for a sampled request. The id of its trace is the request's id. Trace headers of clients are
// ignored, or a client could have all of its requests traced.
func (a *API) traced(c *gin.Context) {
	ctx, span := a.cfg.Tracer.Start(c.Request.Context(), "HTTP", trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	if !span.IsRecording() {
		c.Next()
		return
	}
	c.Request = c.Request.WithContext(ctx)
	c.Header(httppolicy.RequestIDHeader, span.SpanContext().TraceID().String())
	c.Next()

	// After the call, which is when the status is known.
	route := routeOf(c)
	method := methodOf(c)
	status := c.Writer.Status()
	span.SetName(method + " " + route)
	span.SetAttributes(
		attribute.String("http.request.method", method),
		attribute.String("http.route", route),
		attribute.Int("http.response.status_code", status),
	)
	if status >= http.StatusInternalServerError {
		span.SetStatus(codes.Error, "")
	}
}

// noteRefusal counts a refused request, and logs it with the id in its problem details.
func (a *API) noteRefusal(c *gin.Context) {
	c.Next()

	h := c.Writer.Header()
	reason, detail := httppolicy.Refusal(h)
	if reason == "" {
		return
	}

	a.metrics.refusals.WithLabelValues(reason).Inc()
	if reason == httppolicy.ReasonOrigin {
		// Seldom, because every visitor of a page that is not allowed causes it.
		a.foreign.Do(func() { a.warnOfOrigin(c.Request) })
	}
	if line := a.parts.Log.Debug(); line.Enabled() {
		line.Str("request_id", httppolicy.RequestID(h)).Str("method", methodOf(c)).Str("route", routeOf(c)).
			Int("status", c.Writer.Status()).Str("reason", reason).Str("detail", httppolicy.Unquoted(detail)).
			Msg("a request was refused")
	}
}

// warnOfOrigin logs that an origin was refused, because the cause is more often a wrong setting than an attack.
func (a *API) warnOfOrigin(r *http.Request) {
	origin := presence.Excerpt(r.Header.Get("Origin"))
	host := presence.Excerpt(r.Host)
	a.parts.Log.Warn().Str("origin", origin).Str("host", host).
		Msg("the request of a page was refused; is its origin missing in --allow-origins, or does a proxy replace " +
			"the Host header (in nginx: proxy_set_header Host $http_host)? This is logged at most once a minute")
}
