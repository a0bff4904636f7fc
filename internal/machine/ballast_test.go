package machine

import "testing"

func TestBallast(t *testing.T) {
	t.Cleanup(func() { ballast = nil })
	t.Setenv("GOGC", "100")
	if LoadBallast(); ballast != nil {
		t.Errorf("the ballast has %d bytes, though GOGC is set", len(ballast))
	}

	t.Setenv("GOGC", "")
	before := usedMemory()
	LoadBallast()

	if n := uint64(len(ballast)); n == 0 || n > maxBallast || n > Memory()/32 {
		t.Errorf("the ballast has %d bytes of %d", n, Memory())
	}

	if after := usedMemory(); after > before+before/2 {
		t.Errorf("the ballast counts as used: %d bytes before, then %d", before, after)
	}
}
