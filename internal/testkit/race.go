//go:build race

package testkit

// Race reports whether the race detector is on. Computations take about ten times as long with it.
const Race = true
