package share

import "headcount/counter"

// Total returns the value of a sum or a set, and whether it fits 64 bits.
func (s *Share) Total() (total int64, ok bool) { return s.Without("", 0).Value() }

// Without returns the total minus the part of one life. It may need more than 64 bits.
func (s *Share) Without(region string, life uint64) counter.Wide {
	var all counter.Wide
	for i := range s.Parts {
		p := &s.Parts[i]
		if p.Region == region && p.Life == life {
			continue
		}
		all = all.Plus(p.Value).Minus(p.Base)
	}

	return all
}

// OwnOf returns the value of the own part of a counter, given the counter's total and the size of its set in this
// region.
func (l *Local) OwnOf(total, size int64) int64 {
	if !l.Kind.Number() {
		return size // for a unique, size is 0: it has no value of its own
	}

	// The own part fits, because a change after which it would not fit is refused.
	own, _ := l.WithoutOthers(total).Value()

	return own
}

// WithoutOthers returns the own part of a total. It may need more than 64 bits.
func (l *Local) WithoutOthers(total int64) counter.Wide {
	// The own base is subtracted in the total, so it is added again.
	own := counter.WideOf(total).Sub(l.Without(l.Region, l.Life))
	for i := range l.Parts {
		p := &l.Parts[i]
		if p.Region == l.Region && p.Life == l.Life {
			own = own.Plus(p.Base)
		}
	}

	return own
}
