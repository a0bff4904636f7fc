//go:build !promises

package fanout

// rests has a use only in the programs that tests start, which are built with promises.go instead of this file.
type rests struct{}

func (s *shard) checkNewestLocked() { _ = s.rests }
