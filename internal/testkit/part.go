package testkit

import "testing"

// Part runs a part of a test. What the part opens with the testing.TB that it gets is closed when the part ends, and
// not with the test.
func Part(t testing.TB, run func(testing.TB)) {
	p := &part{TB: t}
	defer p.end()

	run(p)
}

type part struct {
	testing.TB
	cleanups []func()
}

// Cleanup is called by the goroutine of the test alone.
func (p *part) Cleanup(f func()) { p.cleanups = append(p.cleanups, f) }

// end runs the cleanups, the last one first, also when one of them ends the test.
func (p *part) end() {
	for _, f := range p.cleanups {
		defer f()
	}
}
