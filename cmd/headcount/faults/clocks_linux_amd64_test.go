package faults

import (
	"os/exec"
	"testing"
	"time"

	"headcount/presence/redistest"
)

// setClock has the process run with a wall clock that is wrong by offset.
func (m *member) setClock(offset time.Duration) {
	m.begin = func(cmd *exec.Cmd) error { return m.process.StartAt(cmd, offset) }
}

// TestClocksThatAreWrong: processes whose clocks are 2 s ahead or behind, so 4 s apart, start
// while users are there, and others start beside them. No user who stays is missing from a
// count.
func TestClocksThatAreWrong(t *testing.T) {
	t.Parallel()
	const wrong = 2 * time.Second
	top := layout(redistest.Start(t).URL(), nil)
	ahead, behind := top.nodes[0], top.nodes[1]
	ahead.setClock(wrong)
	behind.setClock(-wrong)
	top.dispatchers[0].setClock(wrong)
	top.gateways[1].setClock(-wrong)
	top.begin(t)
	top.suffer(t, fault{
		name: "processes start again beside others whose clocks are 2 s ahead and behind", since: "the last is ready",
		damage: func(t *testing.T) time.Time {
			for _, m := range []*member{ahead, top.gateways[0]} {
				if err := m.leave(20 * time.Second); err != nil {
					t.Error(err)
				}
				again(t, m)
			}
			behind.kill()
			again(t, behind)
			return time.Now()
		},
	})
}
