package owner

// turnLock is a lock that a caller may stop waiting for. Who puts a value into it has it.
type turnLock chan struct{}

func newTurnLock() turnLock { return make(turnLock, 1) }

// tryLock takes the lock if it is free.
func (l turnLock) tryLock() bool {
	select {
	case l <- struct{}{}:
		return true
	default:
		return false
	}
}

// lock takes the lock, and reports whether it did so before one of two channels was closed.
func (l turnLock) lock(stop, other <-chan struct{}) bool {
	select {
	case l <- struct{}{}:
		return true
	case <-stop:
		return false
	case <-other:
		return false
	}
}

func (l turnLock) unlock() { <-l }
