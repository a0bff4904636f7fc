package machine

import "testing"

func TestMemoryIsPlausible(t *testing.T) {
	if got := Memory(); got < 64<<20 || got > 1<<50 {
		t.Errorf("the limit of memory is %d bytes, which cannot be right", got)
	}
}

func TestOpenFilesAreEnoughForATest(t *testing.T) {
	if limit, ok := OpenFiles(); ok && limit < 16 || !ok && limit != 0 {
		t.Errorf("this process may open %d files (known: %t)", limit, ok)
	}
}
