//go:build !linux

package redistest

func (p *process) live(started chan<- error) { p.wait(started) }
