package fanout

import (
	"math"
	"time"
)

const (
	paceInterval = 250 * time.Millisecond // between two looks at the rate of deliveries
	paceMemory   = 5 * time.Second        // over which it is smoothed: large pages come in bursts
	maxInterval  = 10 * time.Second       // no subscriber waits longer for the newest count
)

// pace keeps a shard's deliveries within a budget. While they fit, every page
// has the least interval. When they do not, a page may have at most an equal
// share of the budget: so the intervals of the largest pages grow, in
// proportion to their subscribers, and small pages stay as quick as they were.
// The share is found by feedback: stretch grows while the rate is over the
// budget and shrinks when there is room again.
type pace struct {
	budget  float64       // deliveries a second
	least   time.Duration // interval when there is room
	stretch float64       // a page's interval is at least stretch × subscribers / budget
	load    float64       // rate of deliveries in budgets, smoothed over paceMemory
	spent   int           // deliveries since …
	since   time.Duration
}

// interval is the least time between two counts of a page with that many
// subscribers to one of them.
func (p *pace) interval(subscribers int) time.Duration {
	fair := time.Duration(p.stretch * float64(subscribers) / p.budget * float64(time.Second))

	return min(max(p.least, fair), max(p.least, maxInterval))
}

// spend notes n deliveries at now. The stretch follows the load as an integral controller does: large pages
// come in bursts, so only the mean says whether there is room.
func (p *pace) spend(n int, now time.Duration) {
	p.spent += n
	took := now - p.since
	if took < paceInterval {
		return
	}

	// An exponential average: what is older than paceMemory hardly counts.
	weight := took.Seconds() / paceMemory.Seconds()
	p.load = p.load*math.Exp(-weight) + float64(p.spent)/p.budget/paceMemory.Seconds()
	p.spent = 0
	p.since = now

	if p.stretch == 0 && p.load <= 1 {
		return
	}

	// Both bounds keep one burst, or one late look, from stretching all intervals at a time.
	p.stretch = max(p.stretch, 1) * math.Exp(min(weight, 1)*(min(p.load, 4)-1))
	if p.stretch <= 1 && p.load < 0.5 {
		p.stretch = 0 // there is room again
	}

	p.stretch = min(p.stretch, 1e6) // maxInterval holds long before
}
