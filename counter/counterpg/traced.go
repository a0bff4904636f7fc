package counterpg

import (
	"context"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/internal/tracing"
)

// traced makes a span of each query below a request that is traced. It says nothing of the query.
type traced struct{}

// TraceQueryStart implements pgx.QueryTracer.
func (traced) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	ctx, _ = tracing.Start(ctx, "postgresql") // TraceQueryEnd ends it
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer. A span of ctx that is recorded is that of TraceQueryStart.
func (traced) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	span := trace.SpanFromContext(ctx)
	if data.Err != nil {
		span.SetStatus(codes.Error, "")
	}
	span.End()
}
