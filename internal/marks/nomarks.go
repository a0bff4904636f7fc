//go:build !marks

// Package marks has nothing without the tag marks.
package marks

import (
	"io"
	"time"
)

// Mark is nothing without the tag marks.
type Mark struct{}

// Sometimes returns nothing.
func Sometimes(string) Mark { return Mark{} }

// Reached does nothing.
func (Mark) Reached() {}

// Must does nothing.
func Must(bool, string) {}

// Fault does nothing.
func Fault(string) {}

// Simulated does nothing.
func Simulated(time.Duration) {}

// Report writes nothing.
func Report(io.Writer) {}
