package node

import (
	"fmt"
	"time"

	"headcount/presence"
)

// maxHoldOrder bounds the calls about holds that one partition remembers. Beyond it, calls about further holds are
// refused until the oldest are forgotten, which takes presence.HoldTimeout at most.
const maxHoldOrder = 1 << 16

// holdOrder keeps the order in which gateways made their calls about holds. A call that a stalled link delivers late
// must not undo one that was made after it, and that its user was answered. No call is carried out later than
// presence.HoldTimeout after it was made, so the order is remembered for that long.
type holdOrder struct {
	asked map[memberKey]time.Time // when the newest call about each hold was made
	swept time.Time
}

// admit records a call that was made at asked. It refuses a call that was made before another one about the same hold.
func (o *holdOrder) admit(hold memberKey, asked, now time.Time) error {
	newest, known := o.asked[hold]
	if asked.Before(newest) {
		return presence.ErrOvertaken
	}

	o.sweep(now)
	if !known && len(o.asked) >= maxHoldOrder {
		return fmt.Errorf("%w: too many holds were changed a moment ago", presence.ErrUnavailable)
	}
	o.asked[hold] = asked

	return nil
}

// sweep forgets the calls that no older one can follow any more.
func (o *holdOrder) sweep(now time.Time) {
	if now.Sub(o.swept) < presence.HoldTimeout && len(o.asked) < maxHoldOrder {
		return
	}

	o.swept = now
	for hold, asked := range o.asked {
		if now.Sub(asked) > presence.HoldTimeout {
			delete(o.asked, hold)
		}
	}
}
