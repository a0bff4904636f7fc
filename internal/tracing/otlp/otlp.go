// Package otlp sends spans to a collector over OTLP/HTTP, as JSON. OpenTelemetry's own exporter does the
// same with protocol buffers, but adds gRPC to the program, whose registrations take memory in every
// process, traced or not.
package otlp

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"

	"headcount/internal/setting"
)

const (
	// maxWaiting is how many spans wait for the collector; further ones are dropped.
	maxWaiting = 2048
	batch      = 512             // spans of one request
	batchWait  = time.Second     // how long spans wait for a batch to fill
	timeout    = 5 * time.Second // for one answer of the collector
)

// Config tunes a tracer. All of it is required.
type Config struct {
	URL     string // of the collector; the default path is /v1/traces
	Every   int    // one of this many requests is traced
	Version string // of the program
	Log     zerolog.Logger
}

// New returns a tracer of the scope, whose spans go to the collector, and a function that sends the spans that wait,
// for at most timeout, and ends the tracer. Neither New nor the end of a span waits for the collector.
func New(cfg Config, scope string) (trace.Tracer, func() error) {
	target := cfg.URL
	// The specification permits a collector's base URL, and the full URL of its traces.
	if u, err := url.Parse(cfg.URL); err == nil && strings.Trim(u.Path, "/") == "" {
		target = u.JoinPath("v1", "traces").String()
	}

	from := resource.NewSchemaless(attribute.String("service.name", "headcount"),
		attribute.String("service.version", cfg.Version))
	sink := &exporter{
		url:    target,
		log:    cfg.Log,
		client: &http.Client{Timeout: timeout},
		logged: rate.Sometimes{Interval: time.Minute},
	}

	provider := sdk.NewTracerProvider(
		sdk.WithResource(from),
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(1/float64(max(cfg.Every, 1))))),
		sdk.WithBatcher(sink, sdk.WithMaxQueueSize(maxWaiting), sdk.WithMaxExportBatchSize(batch),
			sdk.WithBatchTimeout(batchWait)),
	)

	return provider.Tracer(scope), func() error {
		// A collector that hangs must not keep the process from ending.
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return provider.Shutdown(ctx)
	}
}

// exporter is an sdk.SpanExporter. The SDK calls it from one goroutine.
type exporter struct {
	url    string
	log    zerolog.Logger
	client *http.Client
	logged rate.Sometimes // the failures
}

// ExportSpans implements sdk.SpanExporter. Spans that the collector does not accept are dropped, with a
// log line, because they are not worth memory.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	if err := e.send(ctx, spans); err != nil {
		e.logged.Do(func() {
			e.log.Warn().Err(err).Int("spans", len(spans)).
				Msg("the collector of --otlp did not accept traces; they are lost. " +
					"This is logged at most once a minute")
		})
	}
	// An error would only go to the SDK's own log, on stderr.
	return nil
}

// Shutdown implements sdk.SpanExporter.
func (e *exporter) Shutdown(context.Context) error { return nil }

func (e *exporter) send(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	if len(spans) == 0 {
		return nil
	}

	body, err := json.Marshal(requestOf(spans))
	if err != nil {
		return err
	}

	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")

	resp, err := e.client.Do(req)
	if err != nil {
		return setting.Cause(err)
	}
	defer resp.Body.Close()

	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("it answered %s", resp.Status)
	}
	return nil
}

// OTLP's ExportTraceServiceRequest as JSON, with the fields that these spans have.
type (
	request struct {
		ResourceSpans []resourceSpans `json:"resourceSpans"`
	}
	resourceSpans struct {
		Resource   attributed   `json:"resource"`
		ScopeSpans []scopeSpans `json:"scopeSpans"`
	}
	attributed struct {
		Attributes []keyValue `json:"attributes"`
	}
	scopeSpans struct {
		Scope struct {
			Name string `json:"name"`
		} `json:"scope"`
		Spans []span `json:"spans"`
	}
	span struct {
		TraceID    string     `json:"traceId"`
		SpanID     string     `json:"spanId"`
		ParentID   string     `json:"parentSpanId,omitempty"`
		Name       string     `json:"name"`
		Kind       int        `json:"kind"`
		Start      string     `json:"startTimeUnixNano"`
		End        string     `json:"endTimeUnixNano"`
		Attributes []keyValue `json:"attributes,omitempty"`
		Status     *status    `json:"status,omitempty"`
	}
	status struct {
		Code    int    `json:"code"`
		Message string `json:"message,omitempty"`
	}
	keyValue struct {
		Key   string `json:"key"`
		Value any    `json:"value"`
	}
)

func requestOf(spans []sdk.ReadOnlySpan) request {
	// All spans are of one tracer, and so of one scope and one resource.
	scope := scopeSpans{}
	scope.Scope.Name = spans[0].InstrumentationScope().Name

	for _, s := range spans {
		one := span{
			TraceID: s.SpanContext().TraceID().String(), SpanID: s.SpanContext().SpanID().String(),
			Name: s.Name(), Kind: int(s.SpanKind()),
			Start: nanoseconds(s.StartTime()), End: nanoseconds(s.EndTime()), Attributes: attributesOf(s.Attributes()),
		}
		if s.Parent().HasSpanID() {
			one.ParentID = s.Parent().SpanID().String()
		}

		// OTLP's code 2 is an error. Without a status the span is "unset".
		if s.Status().Code == codes.Error {
			one.Status = &status{2, s.Status().Description}
		}

		scope.Spans = append(scope.Spans, one)
	}

	return request{[]resourceSpans{{attributed{attributesOf(spans[0].Resource().Attributes())}, []scopeSpans{scope}}}}
}

func nanoseconds(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }

func attributesOf(set []attribute.KeyValue) (all []keyValue) {
	for _, kv := range set {
		value := map[string]any{"stringValue": kv.Value.String()}
		// OTLP writes 64-bit numbers as text, since JSON's numbers are not exact beyond 53 bits.
		if kv.Value.Type() == attribute.INT64 {
			value = map[string]any{"intValue": strconv.FormatInt(kv.Value.AsInt64(), 10)}
		}

		all = append(all, keyValue{string(kv.Key), value})
	}

	return all
}
