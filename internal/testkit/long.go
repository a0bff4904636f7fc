package testkit

import "testing"

// Long skips a test that takes too long for make test.
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("long: make test-all")
	}
}
