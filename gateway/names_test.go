package gateway

import (
	"encoding/json"
	"strings"
	"testing"

	"headcount/gateway/openapi"
)

// TestNamesAreUnique: code generators make a type or a function of each name in the documents, and may change the case
// of its first letter. So names must differ in more than that.
func TestNamesAreUnique(t *testing.T) { inMemoryWith(t, everything, namesAreUnique) }

func namesAreUnique(t *testing.T, s *served) {
	var calls struct {
		Paths      map[string]map[string]json.RawMessage
		Tags       []struct{ Name string }
		Components map[string]map[string]any
	}
	read(t, openapi.OpenAPI("", s.g.table()), &calls)

	known := map[string]bool{}
	for _, tag := range calls.Tags {
		known[tag.Name] = true
	}

	names := map[string]string{}
	once := func(name, what string) {
		t.Helper()
		lower := strings.ToLower(name)
		if before := names[lower]; before != "" || name == "" {
			t.Errorf("%s and %s have the same name %q, or none", what, before, name)
		}
		names[lower] = what
	}
	// In a generated package types and functions share one namespace.
	for kind, components := range calls.Components {
		if kind == "responses" || kind == "securitySchemes" {
			continue // generators make no types of these
		}
		for name := range components {
			once(name, kind)
		}
	}

	for path, operations := range calls.Paths {
		for method, text := range operations {
			if method == "parameters" {
				continue
			}

			var operation struct {
				OperationID string
				Tags        []string
			}
			read(t, text, &operation)
			once(operation.OperationID, method+" "+path)
			if len(operation.Tags) != 1 || !known[operation.Tags[0]] {
				t.Errorf("%s %s has the tags %v, want exactly one, which the document lists",
					method, path, operation.Tags)
			}
		}
	}

	var frames struct {
		Info       struct{ License struct{ Name string } }
		Servers    map[string]struct{ Host, Pathname string }
		Components struct {
			Messages map[string]struct{ Name string }
		}
	}
	read(t, openapi.AsyncAPI("/live"), &frames)

	for name, message := range frames.Components.Messages {
		if message.Name != name {
			t.Errorf("the message %s has the name %s, want the same", name, message.Name)
		}
	}

	if len(frames.Servers) != 2 || frames.Servers["sockets"].Pathname != "/live" || frames.Info.License.Name != "MIT" {
		t.Errorf("asyncapi.json has %+v, want two servers, /live and the license MIT", frames)
	}
}

func read(t *testing.T, document []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(document, into); err != nil {
		t.Fatal(err)
	}
}
