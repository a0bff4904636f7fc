//go:build !linux

package main

import "headcount/presence"

// usage is unknown on this system. /metrics may have the figures.
func usage() presence.ProcessStats { return presence.ProcessStats{} }
