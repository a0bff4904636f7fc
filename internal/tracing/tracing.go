// Package tracing starts spans below the span of a traced request. It costs nothing in a request that
// is not traced. Names of spans and attributes are fixed words: never a page, a user, a token, a key
// or an address.
package tracing

import (
	"context"

	"go.opentelemetry.io/otel/trace"
)

// Scope is the name of the instrumentation scope of all spans.
const Scope = "headcount"

// none is a span that is not recorded.
var none = trace.SpanFromContext(context.Background())

// Start starts a span below the span of ctx, if the latter is recorded. The caller must end it.
func Start(ctx context.Context, name string) (context.Context, trace.Span) {
	above := trace.SpanFromContext(ctx)
	if !above.IsRecording() {
		return ctx, none
	}

	return above.TracerProvider().Tracer(Scope).Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
}
