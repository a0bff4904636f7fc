package node

import (
	"math/bits"
	"time"
)

const (
	// wheelTick is the wheel's precision: a deadline is found never early and at most
	// this late.
	wheelTick  = 100 * time.Millisecond
	wheelSlots = 256 // 25.6 s ahead; sessions with a later deadline are examined once a revolution
)

// wheel holds a partition's sessions by deadline: a hashed timing wheel (Varghese and
// Lauck, 1987) with one level. A heartbeat changes only the deadline in the session, so it
// costs no timer and no wheel operation; when the old deadline passes, the session is
// filed under the new one. The partition's actor owns the wheel.
type wheel struct {
	pos      int64 // ticks up to this one are processed
	slots    [wheelSlots]*session
	occupied [wheelSlots / 64]uint64 // one bit per slot that has a session
}

// tickOf returns the first tick at which a deadline has passed.
func tickOf(deadline time.Duration) int64 { return int64((deadline + wheelTick - 1) / wheelTick) }

// idle moves an empty wheel to the present time, so that due has no past ticks to visit.
func (w *wheel) idle(now time.Duration) {
	if w.occupied == [len(w.occupied)]uint64{} {
		w.pos = int64(now / wheelTick)
	}
}

// put files s so that due visits it when the deadline has passed. It first removes s from
// its former slot.
func (w *wheel) put(s *session, deadline time.Duration) {
	w.drop(s)

	// Not in the slot of the present tick, which due may be visiting; not beyond the last slot, which would alias.
	t := min(max(tickOf(deadline), w.pos+1), w.pos+wheelSlots-1)
	i := t % wheelSlots

	s.slot = int16(i)
	s.slotNext = w.slots[i]
	s.slotPrev = nil
	if s.slotNext != nil {
		s.slotNext.slotPrev = s
	}

	w.slots[i] = s
	w.occupied[i/64] |= 1 << (i % 64)
}

// drop removes s from the wheel, if it is in the wheel.
func (w *wheel) drop(s *session) {
	if s.slot < 0 {
		return
	}

	if s.slotPrev != nil {
		s.slotPrev.slotNext = s.slotNext
	} else {
		w.slots[s.slot] = s.slotNext
		if s.slotNext == nil {
			w.occupied[s.slot/64] &^= 1 << (s.slot % 64)
		}
	}

	if s.slotNext != nil {
		s.slotNext.slotPrev = s.slotPrev
	}

	s.slotNext = nil
	s.slotPrev = nil
	s.slot = -1
}

// next returns the time of the first tick that has a session.
func (w *wheel) next() (at time.Duration, ok bool) {
	start := (w.pos + 1) % wheelSlots
	for n := int64(0); n < wheelSlots; {
		i := (start + n) % wheelSlots
		word := w.occupied[i/64] >> (i % 64)
		if word != 0 {
			n += int64(bits.TrailingZeros64(word))
			return time.Duration(w.pos+1+n) * wheelTick, true
		}
		n += 64 - i%64
	}

	return 0, false
}

// due removes every session from the wheel whose filed time has passed, and calls look
// with it. look puts a session back that is still needed.
func (w *wheel) due(now time.Duration, look func(*session)) {
	for last := int64(now / wheelTick); w.pos < last; {
		at, ok := w.next()
		t := int64(at / wheelTick)
		if !ok || t > last {
			w.pos = last
			return
		}

		// Before the visits, so that put files into later slots.
		w.pos = t
		for i := t % wheelSlots; w.slots[i] != nil; {
			s := w.slots[i]
			w.drop(s)
			look(s) // may put s back, at pos+1 or later and hence never into this slot
		}
	}
}
