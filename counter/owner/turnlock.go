package owner

// turnLock is a lock whose waiters may give up. The goroutine whose value is in the channel holds the lock.
type turnLock chan struct{}

func newTurnLock() turnLock { return make(turnLock, 1) }

// tryLock takes the lock if it is free, and reports whether it did.
func (l turnLock) tryLock() bool {
	select {
	case l <- struct{}{}:
		return true
	default:
		return false
	}
}

// lock waits for the lock. It returns false if one of the two channels is closed first.
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
