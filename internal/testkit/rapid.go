package testkit

import "testing"

// ForRapid returns t for rapid.Check in a bubble of synctest. rapid asks a *testing.T for its deadline, which panics in
// a bubble.
func ForRapid(t testing.TB) testing.TB { return noDeadline{t} }

type noDeadline struct{ testing.TB }
