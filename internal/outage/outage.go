// Package outage handles outages of a service that a process needs. Log logs the beginning of an outage with its cause
// and a remedy, logs it again each minute, and logs its end. Pause returns how long to wait before the next attempt.
package outage

import (
	"time"

	"github.com/rs/zerolog"
)

// every is the time between two lines about one outage.
const every = time.Minute

// Log logs the outages of one service. One goroutine at a time may use it.
type Log struct {
	Log  zerolog.Logger
	What string // name of the service, such as redis
	Mend string // the remedy

	since, logged time.Time // of the outage; since is zero when there is none
}

// Note records the outcome of an attempt to use the service; nil: the attempt succeeded.
func (l *Log) Note(err error) {
	now := time.Now()
	if err == nil {
		l.noteSuccess(now)
		return
	}

	if l.since.IsZero() {
		l.since = now
		l.logged = now
		l.Log.Warn().Err(err).Msg(l.What + " cannot be used; " + l.Mend)
		return
	}

	if now.Sub(l.logged) >= every {
		l.logged = now
		lasts := now.Sub(l.since).Round(time.Second)
		l.Log.Warn().Err(err).Stringer("for", lasts).Msg(l.What + " still cannot be used; " + l.Mend)
	}
}

func (l *Log) noteSuccess(now time.Time) {
	// Nearly all calls come here, and only the end of an outage is news.
	if l.since.IsZero() {
		return
	}

	lasts := now.Sub(l.since).Round(time.Second)
	l.since = time.Time{}
	l.Log.Info().Stringer("after", lasts).Msg(l.What + " works again")
}

// Level returns the level of a log line about a failure. away says that the cause is an outage, which is logged
// already.
func Level(away bool) zerolog.Level {
	if away {
		return zerolog.DebugLevel
	}
	return zerolog.WarnLevel
}
