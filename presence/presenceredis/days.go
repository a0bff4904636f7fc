package presenceredis

import (
	"context"
	"fmt"

	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/scripts"
)

const (
	dayHead      = 44 // bytes of a page's days before those that are over, see remember.lua
	secondsOfDay = 24 * 60 * 60
)

var _ minutes.DayStore = (*Store)(nil)

// Days implements minutes.DayStore. Arrivals are up to a minute old.
func (s *Store) Days(ctx context.Context, page string, from int64) ([]minutes.Day, error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	bucket := presence.Bucket(page, s.cfg.Buckets)
	run := &scriptRun{Script: scripts.Days, Keys: []string{
		s.at().stateKey(bucket), s.at().pagePrefix(bucket) + page, s.at().daysKey(bucket, page),
	}}
	if err := s.conn.Run(ctx, []*scriptRun{run}); err != nil {
		return nil, fmt.Errorf("presenceredis: days of a page: %w", err)
	}

	reply := run.Reply.([]any)
	days, err := parseDays([]byte(reply[4].(string)))
	if err != nil {
		return nil, fmt.Errorf("presenceredis: days of a page: %w: %w", ErrForeign, err)
	}

	n := numbers(reply[:4])
	// The minute of the last change is folded when it has ended. Until then only the page's own string has it.
	if updated := int64(n[0]); updated > 0 {
		days.change(updated, int64(n[1]), int64(n[2]), int64(n[3]))
	} else if last := len(days.list) - 1; last >= 0 {
		// A page that is forgotten had no users. The process that should have reported that may have been killed.
		days.list[last].Last = 0
	}

	return minutes.Since(days.list, from), nil
}

// pageDays are the days of a page as remember.lua keeps them; the last is the one that it has begun.
type pageDays struct {
	list       []minutes.Day
	base, area int64 // of the last one: areas of the page's former lives, and of this one
}

func parseDays(b []byte) (days pageDays, err error) {
	if len(b) == 0 {
		return days, nil
	}
	if len(b) < dayHead {
		return days, fmt.Errorf("%d bytes", len(b))
	}

	days.list, err = minutes.ParsePast(b[dayHead:])
	if err != nil {
		return days, err
	}

	next := func(size int) (n int64) {
		for _, c := range b[:size] {
			n = n<<8 | int64(c)
		}
		b = b[size:]
		return n
	}
	d := minutes.Day{At: next(3)}
	d.Until = next(4) * 60_000
	d.Last = next(5)
	d.Max = next(5)
	days.base = next(7)
	days.area = next(7)
	d.Joins = next(5)
	d.Visitors = next(5)
	d.Presence = days.base + days.area
	days.list = append(days.list, d)

	return days, nil
}

// change adds the last change of the page, at updated (in seconds), which remember.lua does not know yet.
func (days *pageDays) change(updated, most, users, area int64) {
	at := updated / secondsOfDay
	// The area counts to the end of that second, see present in page.lua.
	until := (updated + 1) * 1000

	var d *minutes.Day
	if n := len(days.list); n > 0 {
		d = &days.list[n-1]
	}
	if d == nil || d.At < at {
		days.list = append(days.list, minutes.Day{At: at, Max: most, Presence: area, Until: until, Last: users})
		return
	}
	// Of the minute in which the last user left remember.lua may know that, and not who came later in it.
	if d.At > at || (updated/60+1)*60_000 < d.Until {
		return
	}

	base := days.base
	if 2*area < days.area {
		base += days.area // the page was forgotten, and began anew
	} else {
		area = max(area, days.area)
	}
	d.Max = max(d.Max, most)
	d.Presence = base + area
	d.Until = until
	d.Last = users
}
