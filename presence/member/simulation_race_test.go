//go:build race

package member

// With the race detector a seed takes six times as long. These seeds look for races; the
// runs without it look for everything else.
const simDefault = 40
