package servertest

import (
	"context"
	"errors"
	"testing"
)

// A signal also reaches what the process has started.
func TestKillEndsChildren(t *testing.T) {
	p := sleeper(t)
	var pids []int
	if err := Await(t.Context(), p, func(context.Context) error {
		if pids = children(p.PID()); len(pids) == 0 {
			return errors.New("it has no child yet")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if Memory(p.PID()) == 0 {
		t.Error("a process without memory")
	}
	p.Kill()
	if err := Await(t.Context(), nil, func(context.Context) error {
		if Memory(pids[0]) > 0 {
			return errors.New("the child is still there")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
