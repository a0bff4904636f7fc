package node

import (
	"container/list"
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
	newest map[memberKey]*list.Element
	calls  list.List // of heldCall, one for each hold; the one admitted longest ago is the first to be forgotten
}

// heldCall is the newest call about a hold.
type heldCall struct {
	hold  memberKey
	asked time.Time // when it was made
}

// admit records a call that was made at asked. It refuses a call that was made before another one about the same hold.
func (o *holdOrder) admit(hold memberKey, asked, now time.Time) error {
	o.forget(now)

	if known := o.newest[hold]; known != nil {
		if asked.Before(known.Value.(heldCall).asked) {
			return presence.ErrOvertaken
		}

		known.Value = heldCall{hold, asked}
		o.calls.MoveToBack(known)
		return nil
	}

	if o.calls.Len() >= maxHoldOrder {
		return fmt.Errorf("%w: too many holds were changed a moment ago", presence.ErrUnavailable)
	}

	o.newest[hold] = o.calls.PushBack(heldCall{hold, asked})

	return nil
}

// forget drops calls that can no longer be followed by an older one. The clocks of gateways differ slightly, so calls
// are kept for that much longer.
func (o *holdOrder) forget(now time.Time) {
	for oldest := o.calls.Front(); oldest != nil; oldest = o.calls.Front() {
		call := oldest.Value.(heldCall)
		if now.Sub(call.asked) <= presence.HoldTimeout {
			return
		}

		o.calls.Remove(oldest)
		delete(o.newest, call.hold)
	}
}
