package main

import "testing"

func TestUsage(t *testing.T) {
	u := usage()
	if u.CPU <= 0 || u.Memory < 1<<20 || u.Memory > 1<<40 {
		t.Errorf("CPU time %v s, %d bytes of memory", u.CPU, u.Memory)
	}
	if n := goMemory(); n < 1<<20 || n > 1<<40 {
		t.Errorf("Go has %d bytes of memory", n)
	}
}
