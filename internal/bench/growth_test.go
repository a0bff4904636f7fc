//go:build linux

package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGrowthIsShown draws invented figures of all growths. The last one was measured at a smaller size than was asked.
func TestGrowthIsShown(t *testing.T) {
	b := &bench{sizes: []int{1_000, 5_000, 10_000, 19_000}, version: "headcount v1", figures: map[string][]float64{}}
	for _, p := range plots {
		for i, r := range p.lines {
			scenario, _, _ := strings.Cut(r.figure, " ")
			b.figures[scenario+" size"] = []float64{1_000, 5_000, 10_000, 16_000}
			b.figures[r.figure] = []float64{r.unit, 2 * r.unit, 3 * r.unit, float64(4+i) * r.unit}
		}
	}

	text := b.growth()
	if !strings.Contains(text, "| 19,000 |") || !strings.Contains(text, "| 1.0 | 2.0 | 3.0 | 4.0 at 16,000 |") {
		t.Errorf("the table is %s", text)
	}

	folder := t.TempDir()
	if err := b.draw(folder); err != nil {
		t.Fatal(err)
	}

	for _, p := range plots {
		svg, err := os.ReadFile(filepath.Join(folder, p.file+".svg"))
		if err != nil {
			t.Fatal(err)
		}
		if len(svg) > 10_000 {
			t.Errorf("%s has %d bytes", p.file, len(svg))
		}

		for dec := xml.NewDecoder(strings.NewReader(string(svg))); ; {
			if _, err := dec.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", p.file, err)
			}
		}

		for _, want := range []string{p.figure, p.over, p.lines[0].what, "headcount v1"} {
			if !strings.Contains(string(svg), want) {
				t.Errorf("%s does not show %q", p.file, want)
			}
		}
	}
}
