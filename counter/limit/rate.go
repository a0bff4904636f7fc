package limit

import "time"

// Rate is a limit of one each Every, and after a pause of up to Burst at once: a token
// bucket, by the generic cell rate algorithm. It is for limits in one process, since all that
// a caller keeps of it is one time: when all of the limit is back. Times are of a clock that
// begins at 0 or later; who has taken nothing yet keeps 0, or any time that is over.
type Rate struct {
	Every time.Duration
	Burst int
}

// PerSecond is a Rate of at most n a second.
func PerSecond(n, burst int) Rate {
	return Rate{Every: (time.Second + time.Duration(n) - 1) / time.Duration(n), Burst: burst}
}

// Window is how long it takes until all of the limit is back.
func (r Rate) Window() time.Duration { return time.Duration(r.Burst) * r.Every }

// Take takes n, at most Burst, from a limit of which all is back at the time back. It will
// then be back at after, which the caller keeps, unless wait says that the n have to wait that
// long: what is refused costs nothing. Who lets them pass late instead keeps after, too.
func (r Rate) Take(back, now time.Duration, n int) (after, wait time.Duration) {
	after = max(back, now) + time.Duration(n)*r.Every
	return after, max(0, after-now-r.Window())
}
