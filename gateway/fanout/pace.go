package fanout

import (
	"math"
	"time"
)

const (
	paceInterval = 250 * time.Millisecond // between two measurements of the delivery rate
	paceMemory   = 5 * time.Second        // smoothing time of the rate: large pages come in bursts
	maxInterval  = 10 * time.Second       // no subscriber waits longer for the newest count
)

// pace keeps a shard's deliveries within a budget. While they fit, every page has the minimum interval. Otherwise each
// page may use at most an equal share of the budget: the intervals of the largest pages grow in proportion to their
// subscribers, and small pages keep the minimum. The share is found by feedback: stretch grows while the rate is above
// the budget, and shrinks when it is below.
type pace struct {
	budget  float64       // deliveries a second
	least   time.Duration // minimum interval, used while the budget suffices
	stretch float64       // a page's interval is at least stretch × subscribers / budget
	load    float64       // rate of deliveries in budgets, smoothed over paceMemory
	spent   int           // deliveries since …
	since   time.Duration
}

// interval returns the minimum time between two counts of a page with that many subscribers to one of them.
func (p *pace) interval(subscribers int) time.Duration {
	fair := time.Duration(p.stretch * float64(subscribers) / p.budget * float64(time.Second))

	// A least interval above maxInterval is a setting, which holds in any case.
	return min(max(p.least, fair), max(p.least, maxInterval))
}

// spend counts n deliveries at now. It adjusts the stretch to the load as an integral controller does: large pages come
// in bursts, so only the mean says whether the budget suffices.
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
		p.stretch = 0 // the budget suffices again
	}

	p.stretch = min(p.stretch, 1e6) // maxInterval takes effect long before
}
