//go:build linux

package main

import (
	"errors"
	"strings"
	"testing"
)

// TestBareServersAreShown makes a page of invented figures, one without figures, and one where the modules are missing.
func TestBareServersAreShown(t *testing.T) {
	b := &bench{version: "headcount v1", figures: map[string][]float64{}}
	if page := string(b.page()); strings.Contains(strings.ToLower(page), "bare server") {
		t.Errorf("a page without figures of bare servers is\n%s", page)
	}

	b.noBare = errors.New("no network")
	if page := string(b.page()); !strings.Contains(page, "are missing: no network\n") {
		t.Errorf("a page without the modules is\n%s", page)
	}

	b.noBare = nil
	b.figures["beside-fanout headcount_cpu_s_per_million"] = []float64{6}
	b.figures["beside-fanout nbio_cpu_s_per_million"] = []float64{8}
	b.figures["beside-fanout nbio_cpu_s_per_million_times"] = []float64{0.75}
	page := string(b.page())
	for _, want := range []string{
		"**Beside nbio**", "| 8.0 | 8.0 | Headcount in the same runs: 6.0, 0.8 times |", "It has no identity",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q:\n%s", want, page)
		}
	}
}
