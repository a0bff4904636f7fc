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
	ahead, behind, right := top.nodes[0], top.nodes[1], top.nodes[2]
	ahead.setClock(wrong)
	behind.setClock(-wrong)
	top.dispatchers[0].setClock(wrong)
	top.gateways[1].setClock(-wrong)
	top.begin(t)
	restart := func(m *member) func(t *testing.T) time.Time {
		return func(t *testing.T) time.Time {
			if err := m.leave(20 * time.Second); err != nil {
				t.Error(err)
			}
			again(t, m)
			return time.Now()
		}
	}
	for name, m := range map[string]*member{
		"ahead": ahead, "behind": behind, "right": right,
	} {
		top.suffer(t, fault{name: "a node starts whose clock is " + name + ", among others 2 s off", since: "its readiness", damage: restart(m)})
	}
	top.suffer(t, fault{
		name: "the node with the clock 2 s ahead is killed and starts again", since: "its readiness",
		damage: func(t *testing.T) time.Time {
			ahead.kill()
			again(t, ahead)
			return time.Now()
		},
	})
	for _, g := range top.gateways {
		top.suffer(t, fault{name: g.name + " starts again, clocks 2 s off", since: "its readiness", damage: restart(g)})
	}
}
