//go:build race

package testkit

// Race reports whether the race detector is on. What computes takes about ten times as long then.
const Race = true
