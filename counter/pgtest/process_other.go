//go:build !linux

package pgtest

// live is the process's life, in a goroutine of its own.
func (p *process) live(started chan<- error) { p.wait(started) }

// children are not known here: they end by themselves when they notice that
// the server is gone.
func children(int) []int { return nil }
