package testkit

import (
	"runtime"
	"slices"
	"testing"
)

func TestWhatAPartOpensIsClosedWithIt(t *testing.T) {
	var order []string
	note := func(what string) func() { return func() { order = append(order, what) } }

	done := make(chan struct{})
	go func() { // the part ends with its goroutine, like a failed test
		defer close(done)
		Part(t, func(p testing.TB) {
			p.Cleanup(note("opened first"))
			p.Cleanup(note("opened second"))
			note("the part")()
			runtime.Goexit()
		})
	}()
	<-done

	if !slices.Equal(order, []string{"the part", "opened second", "opened first"}) {
		t.Errorf("in this order: %q", order)
	}
}
