package redisconn

import (
	"slices"
	"testing"
)

// TestSlotOf uses the test vector of the Redis Cluster specification.
func TestSlotOf(t *testing.T) {
	if slot := slotOf([]byte("123456789")); slot != 0x31c3 {
		t.Errorf("the slot is %#x, want 0x31c3", slot)
	}
}

// TestEvenTagsAreSpreadEvenly: however many masters a Cluster has, the busiest one has as few tags as possible.
func TestEvenTagsAreSpreadEvenly(t *testing.T) {
	for _, n := range []int{1, 64, 271} {
		var slots []int
		for _, tag := range EvenTags("r", n) {
			slots = append(slots, slotOf([]byte(tag)))
		}

		for masters := 1; masters <= 1000; masters++ {
			least := (n + masters - 1) / masters // the least possible maximum
			if most := busiest(slots, masters); most != least {
				t.Errorf("%d tags: one of %d masters has %d, want %d", n, masters, most, least)
			}
		}
	}
}

// busiest returns the greatest number of slots that one of n masters has. Master m has the slots from m*Slots/n on.
func busiest(slots []int, n int) int {
	of := make([]int, n)
	for _, slot := range slots {
		master := ((slot+1)*n - 1) / Slots
		of[master]++
	}

	return slices.Max(of)
}

func TestNextTag(t *testing.T) {
	for from, want := range map[string]string{"r": "ra", "ra": "rb", "rz": "raa", "raz": "rba", "rzz": "raaa"} {
		if got := next([]byte(from), 1); string(got) != want {
			t.Errorf("after %q comes %q, want %q", from, got, want)
		}
	}
}
