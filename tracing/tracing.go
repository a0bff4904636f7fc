// Package tracing begins spans below a request that is traced, and costs nothing below one that is
// not. Names of spans and attributes are fixed words: never a page, a user, a token, a key or an
// address.
package tracing

import (
	"context"
	"encoding/hex"

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

// ParentSize is how many bytes a Parent has in a datagram.
const ParentSize = 16 + 8

// Parent names a recorded span to another process, whose spans then are below it. nil names none,
// and so costs nothing. It does not change once it is made.
type Parent struct {
	trace trace.TraceID
	span  trace.SpanID
}

// ParentOf names the span, if it is recorded.
func ParentOf(s trace.Span) *Parent {
	if !s.IsRecording() {
		return nil
	}
	return &Parent{s.SpanContext().TraceID(), s.SpanContext().SpanID()}
}

// Within is ctx below the span.
func (p *Parent) Within(ctx context.Context) context.Context {
	if p == nil {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: p.trace, SpanID: p.span, TraceFlags: trace.FlagsSampled, Remote: true,
	}))
}

// Append appends the ParentSize bytes of p.
func (p *Parent) Append(b []byte) []byte { return append(append(b, p.trace[:]...), p.span[:]...) }

// ReadParent is the Parent that Append wrote, or nil when b is of another length or names none.
func ReadParent(b []byte) *Parent {
	if len(b) != ParentSize {
		return nil
	}
	p := &Parent{trace.TraceID(b[:16]), trace.SpanID(b[16:])}
	if !p.trace.IsValid() || !p.span.IsValid() {
		return nil
	}
	return p
}

// Header is the HTTP header that names a span, in the form of W3C Trace Context.
const Header = "Traceparent"

// String is the header's value.
func (p *Parent) String() string {
	return "00-" + p.trace.String() + "-" + p.span.String() + "-01"
}

// ParseParent is the Parent of a header's value, or nil when it has another form than String's.
func ParseParent(s string) *Parent {
	const size = len("00-") + 32 + len("-") + 16 + len("-01")
	if len(s) != size || s[:3] != "00-" || s[35] != '-' || s[52:] != "-01" {
		return nil
	}
	b, err := hex.DecodeString(s[3:35] + s[36:52])
	if err != nil {
		return nil
	}
	return ReadParent(b)
}
