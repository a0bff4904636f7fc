//go:build !marks

// Package marks does nothing in a program that is built without the tag marks; marks.go documents it.
package marks

import (
	"io"
	"time"
)

// Mark is empty without the tag marks.
type Mark struct{}

// Sometimes returns an empty mark.
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
