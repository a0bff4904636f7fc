package otlp

import (
	"net/http"
	"strings"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// The URL of a collector may contain a key, which must not be logged.
func TestAFailureDoesNotSayTheURL(t *testing.T) {
	e := &exporter{url: "nothing://collector/v1/traces?key=secret", client: &http.Client{}}
	spans := []sdk.ReadOnlySpan{tracetest.SpanStub{Name: "call"}.Snapshot()}

	err := e.send(t.Context(), spans)
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("send = %v", err)
	}
}
