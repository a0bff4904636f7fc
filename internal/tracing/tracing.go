// Package tracing begins spans below a request that is traced, and costs nothing below one that is
// not. Names of spans and attributes are fixed words: never a page, a user, a token, a key or an
// address.
package tracing

import (
	"context"

	"go.opentelemetry.io/otel/trace"
)

// Scope names who makes the spans.
const Scope = "headcount"

// none is a span that is not recorded.
var none = trace.SpanFromContext(context.Background())

// Start begins a span below that of ctx, if that one is recorded. The caller ends it.
func Start(ctx context.Context, name string) (context.Context, trace.Span) {
	above := trace.SpanFromContext(ctx)
	if !above.IsRecording() {
		return ctx, none
	}
	return above.TracerProvider().Tracer(Scope).Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
}
