package tracing_test

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"headcount/tracing"
)

func TestParents(t *testing.T) {
	const header = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	p := tracing.ParseParent(header)
	if p == nil || p.String() != header {
		t.Fatalf("%s is read as %v", header, p)
	}
	if again := tracing.ReadParent(p.Append(nil)); again == nil || *again != *p {
		t.Errorf("the bytes of %v are read as %v", p, again)
	}
	if sc := trace.SpanContextFromContext(p.Within(t.Context())); !sc.IsRemote() || !sc.IsSampled() || sc.TraceID().String() != header[3:35] || sc.SpanID().String() != header[36:52] {
		t.Errorf("what is below %v is below %+v", p, sc)
	}
	if tracing.ParentOf(trace.SpanFromContext(context.Background())) != nil {
		t.Error("a span that nobody records has a name")
	}
	for _, wrong := range []string{
		"", "00", header + "0", "01" + header[2:], header[:53] + "00", header[:35] + "_" + header[36:], "00-" + header[4:36] + "g" + header[36:],
		"00-00000000000000000000000000000000-0123456789abcdef-01", "00-0123456789abcdef0123456789abcdef-0000000000000000-01",
	} {
		if p := tracing.ParseParent(wrong); p != nil {
			t.Errorf("%q is read as %v", wrong, p)
		}
	}
	if p := tracing.ReadParent(make([]byte, tracing.ParentSize-1)); p != nil {
		t.Errorf("too few bytes are read as %v", p)
	}
}
