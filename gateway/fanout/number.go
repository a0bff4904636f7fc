package fanout

import "time"

// number is a value of one subscriber alone, such as the sum of what its user has
// not read. It is delivered with the updates that are due, and as these at most
// once per interval, the newest. It is no topic, since a topic with one
// subscriber costs ten times the memory of this.
type number struct {
	now  int64
	told int64
	at   time.Duration // when the client was last told
}

// numberState is apart from number for the sake of Subscriber's size.
type numberState struct {
	known  bool
	again  bool // tell it also when it is what was told: the client asked, or a write was lost
	queued bool // in shard.numbers
}

// Told says that the client knows its number already. It is called before Enter.
func (s *Subscriber) Told(n int64) { s.number, s.numberState.known = number{now: n, told: n}, true }

// SendUnread has the client told its number, when it is news or again is set.
func (s *Subscriber) SendUnread(n int64, again bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if s.index < 0 {
		return // it has left
	}
	st := &s.numberState
	st.again = st.again || again || !st.known // the first is news, whatever it is
	s.number.now, st.known = n, true
	sh.queueNumber(s)
}

func (s *shard) queueNumber(sub *Subscriber) {
	v, st := &sub.number, &sub.numberState
	if st.queued || !st.again && v.now == v.told {
		return
	}
	st.queued = true
	s.numbers = append(s.numbers, sub)
	s.wakeUp()
}

// offerNumbers adds the numbers that are due to this pass, and returns when the
// next is, or 0. A client that has not taken its last write is left alone; its
// number is queued again when it has.
func (s *shard) offerNumbers(now time.Duration) (next time.Duration) {
	later := s.numbers[:0]
	s.numberText = s.numberText[:0]
	for _, sub := range s.numbers {
		v, st := &sub.number, &sub.numberState
		at := v.at + s.interval
		if sub.index >= 0 && !st.again && v.at != 0 && at > now {
			later = append(later, sub)
			if next == 0 || at < next {
				next = at
			}
			continue
		}
		st.queued = false
		if sub.index < 0 || sub.client.Busy() || !st.again && v.now == v.told {
			continue
		}
		v.told, st.again, v.at = v.now, false, now
		from := len(s.numberText)
		s.numberText = s.hub.numbers.AppendNumber(s.numberText, v.now)
		s.chain(sub, s.numberText[from:len(s.numberText):len(s.numberText)])
	}
	clear(s.numbers[len(later):])
	s.numbers = later
	return next
}
