package testkit

import "testing"

// Part runs a part of a test. Cleanups that the part registers with its testing.TB run when the part ends, and not when
// the test does.
func Part(t testing.TB, run func(testing.TB)) {
	p := &part{TB: t}
	defer p.end()

	run(p)
}

type part struct {
	testing.TB
	cleanups []func()
}

// Cleanup may be called only by the goroutine of the test.
func (p *part) Cleanup(f func()) { p.cleanups = append(p.cleanups, f) }

// end runs the cleanups, the last one first. It runs all of them even if one ends the test.
func (p *part) end() {
	for _, f := range p.cleanups {
		defer f()
	}
}
