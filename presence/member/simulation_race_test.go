//go:build race

package member

// The race detector makes a seed six times as long: these look for races, and
// those without it for everything else.
const simDefault = 40
