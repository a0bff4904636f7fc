package machine

import "testing"

func TestUsage(t *testing.T) {
	cpu, memory := Usage()
	if cpu <= 0 || memory < 1<<20 || memory > 1<<40 {
		t.Errorf("CPU time %v s, %d bytes of memory", cpu, memory)
	}
	if n := goMemory(); n < 1<<20 || n > 1<<40 {
		t.Errorf("Go has %d bytes of memory", n)
	}
}
