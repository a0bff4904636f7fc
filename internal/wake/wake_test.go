package wake

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestSignal(t *testing.T) {
	c := make(chan struct{}, 1)
	Signal(c)
	Signal(c) // does not block
	<-c
	select {
	case <-c:
		t.Error("two signals before a receive were received as two")
	default:
	}
}

func TestReplace(t *testing.T) {
	c := make(chan int, 1)
	for i := range 3 {
		Replace(c, i)
	}
	if got := <-c; got != 2 || len(c) != 0 {
		t.Errorf("received %d, and %d more wait; want the newest value alone", got, len(c))
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended, end := context.WithTimeout(t.Context(), time.Second)
		defer end()
		signal := make(chan struct{}, 1)
		time.AfterFunc(3*time.Second, func() { Signal(signal) })
		for _, tc := range []struct {
			ctx   context.Context
			c     chan struct{}
			lasts time.Duration
			want  bool
		}{
			{ended, nil, time.Second, false},
			{t.Context(), signal, 2 * time.Second, true},
			{t.Context(), nil, time.Minute, true},
		} {
			start := time.Now()
			if got := Wait(tc.ctx, time.Minute, tc.c); got != tc.want || time.Since(start) != tc.lasts {
				t.Errorf("Wait = %v after %s, want %v after %s", got, time.Since(start), tc.want, tc.lasts)
			}
		}
	})
}
