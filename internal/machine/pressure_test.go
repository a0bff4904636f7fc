package machine

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		used, looks := uint64(0), 0
		p := newPressure(1000, func() uint64 {
			looks++
			return used
		})

		for _, step := range []struct {
			used uint64
			high bool
		}{{749, false}, {750, true}, {749, true}, {700, true}, {699, false}, {749, false}, {2000, true}} {
			used = step.used
			time.Sleep(sampleEvery)

			for range 5 {
				if p.High() != step.high {
					t.Fatalf("with %d of 1000 bytes in use High is %v", used, !step.high)
				}
			}
		}

		if looks != 7 {
			t.Fatalf("the memory was read %d times", looks)
		}
	})
}

func TestUsedMemory(t *testing.T) {
	if n := usedMemory(); n == 0 || n > Memory() {
		t.Fatalf("the process uses %d bytes, which cannot be right", n)
	}
}
