// Package outage says what a process does while something it needs is away. Log tells operators: once, with the cause and
// what to do, again each minute, and when it is over. Pause says when to try again.
package outage

import (
	"time"

	"github.com/rs/zerolog"
)

// every is the time between two lines about one outage.
const every = time.Minute

// Log is what is said of one thing. One goroutine uses it.
type Log struct {
	Log  zerolog.Logger
	What string // what is away, such as redis
	Mend string // what to do about it

	since, told time.Time // of the outage; since is zero when there is none
}

// Note takes what became of an attempt to use it; nil: it works.
func (l *Log) Note(err error) {
	now := time.Now()
	lasts := now.Sub(l.since).Round(time.Second)
	switch {
	case err == nil && l.since.IsZero():
	case err == nil:
		l.since = time.Time{}
		l.Log.Info().Stringer("after", lasts).Msg(l.What + " works again")
	case l.since.IsZero():
		l.since, l.told = now, now
		l.Log.Warn().Err(err).Msg(l.What + " cannot be used; " + l.Mend)
	case now.Sub(l.told) >= every:
		l.told = now
		l.Log.Warn().Err(err).Stringer("for", lasts).Msg(l.What + " still cannot be used; " + l.Mend)
	}
}

// Level is that of a line about a failure. When that comes of what is away, the lines about the outage say enough.
func Level(away bool) zerolog.Level {
	if away {
		return zerolog.DebugLevel
	}
	return zerolog.WarnLevel
}
