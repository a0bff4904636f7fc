package node

import (
	"container/list"
	"fmt"
	"time"

	"headcount/presence"
)

// maxHoldOrder bounds the changes of holds that one partition remembers. Beyond it, changes of further holds are
// refused until the oldest are forgotten, which takes presence.HoldTimeout at most.
const maxHoldOrder = 1 << 16

// holdOrder keeps the order in which gateways were asked for changes of holds. A change that a stalled link delivers
// late must not undo one that was made after it, and that its user was answered. No change is carried out later than
// presence.HoldTimeout after it was made, so the order is remembered for that long.
type holdOrder struct {
	newest  map[memberKey]*list.Element
	changes list.List // of newestChange, one for each hold; the one admitted longest ago is the first to be forgotten
}

// newestChange is the newest change of a hold.
type newestChange struct {
	hold  memberKey
	asked time.Time // when it was asked for
}

// admit records a change that was asked for at asked. It refuses one that was asked for before another change of the
// same hold.
func (o *holdOrder) admit(hold memberKey, asked, now time.Time) error {
	o.forget(now)

	if known := o.newest[hold]; known != nil {
		if asked.Before(known.Value.(newestChange).asked) {
			return presence.ErrOvertaken
		}

		known.Value = newestChange{hold, asked}
		o.changes.MoveToBack(known)
		return nil
	}

	// To forget the oldest would let a change through that was overtaken.
	if o.changes.Len() >= maxHoldOrder {
		return fmt.Errorf("%w: too many holds were changed a moment ago", presence.ErrUnavailable)
	}

	o.newest[hold] = o.changes.PushBack(newestChange{hold, asked})

	return nil
}

// forget drops changes that can no longer be followed by an older one. The comparison uses the gateways' clocks, so
// their differences lengthen or shorten the time a little.
func (o *holdOrder) forget(now time.Time) {
	for oldest := o.changes.Front(); oldest != nil; oldest = o.changes.Front() {
		change := oldest.Value.(newestChange)
		if now.Sub(change.asked) <= presence.HoldTimeout {
			return
		}

		o.changes.Remove(oldest)
		delete(o.newest, change.hold)
	}
}
