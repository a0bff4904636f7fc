//go:build !promises

package fanout

// rests are what promises.go knows of topics, in the programs that tests start.
type rests struct{}

func (s *shard) checkNewestLocked() { _ = s.rests }
