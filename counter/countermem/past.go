package countermem

import (
	"container/heap"
	"time"

	"headcount/counter"
)

// past is the history of a counter in one bucket.
type past struct {
	step, kept time.Duration
	gains      []counter.Gain // oldest first; empty when the counter was deleted
	due        time.Time      // when to look for expired gains
	awaits     bool           // it is in Store.pasts
}

// past returns the history of a bucket, or nil.
func (r *rest) past(step time.Duration) *past {
	for _, p := range r.history {
		if p.step == step {
			return p
		}
	}
	return nil
}

// pasts implements heap.Interface.
type pasts []*past

func (h pasts) Len() int           { return len(h) }
func (h pasts) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h pasts) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *pasts) Push(p any)        { *h = append(*h, p.(*past)) }
func (h *pasts) Pop() any {
	last := len(*h) - 1
	p := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return p
}

// await schedules p for the time when its oldest gain has expired, and a hundredth of the retention later, so that
// several expire together. The caller holds mu.
func (s *Store) await(p *past, now time.Time) {
	if p.awaits {
		return
	}
	p.due, p.awaits = counter.LookAgain(p.gains[0].Number, p.step, p.kept, now), true
	heap.Push(&s.pasts, p)
}

// clear deletes the expired gains of at most so many histories. The caller holds mu.
func (s *Store) clear(now time.Time, most int) {
	for ; most > 0 && len(s.pasts) > 0 && !s.pasts[0].due.After(now); most-- {
		p := heap.Pop(&s.pasts).(*past)
		p.awaits = false
		n := 0
		for n < len(p.gains) && counter.Over(p.gains[n].Number, p.step, p.kept, now) {
			n++
		}
		p.gains = append([]counter.Gain(nil), p.gains[n:]...)
		if len(p.gains) > 0 {
			s.await(p, now)
		}
	}
}
