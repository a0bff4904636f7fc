//go:build promises

package webhook

import (
	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/internal/promises"
)

// removed has the events that this process has removed from outboxes, by the id of the hook and the event: the newest
// 65,536. Only a store that has lost data could hand one out once more, and no test loses data under webhooks.
var removed, _ = lru.New[[2]string, struct{}](1 << 16) // fails only for a size below 1

// noteSending checks that events which are about to be sent were not settled before.
func (o *sender) noteSending(events []string) {
	for _, event := range events {
		if removed.Contains([2]string{o.hook.ID, event}) {
			promises.Broken("once: the receiver had settled an event that is sent again: %s", event)
		}
	}
}

// noteRemoved remembers events that the store has removed.
func (o *sender) noteRemoved(events []string) {
	for _, event := range events {
		removed.Add([2]string{o.hook.ID, event}, struct{}{})
	}
}
