package presence

import (
	"testing"
	"time"
)

func TestProcessesThatStartInOneMillisecondDiffer(t *testing.T) {
	start := time.UnixMilli(1_700_000_000_123)
	one, other := NewIncarnation(start), NewIncarnation(start)
	later := NewIncarnation(start.Add(time.Millisecond))
	if one == other || one >= later || other >= later {
		t.Errorf("incarnations %d and %d of one millisecond, %d of the next", one, other, later)
	}

	for _, incarnation := range []uint64{one, other} {
		if got := Started(incarnation); !got.Equal(start) {
			t.Errorf("Started(%d) = %s; want %s", incarnation, got, start)
		}
	}
}
