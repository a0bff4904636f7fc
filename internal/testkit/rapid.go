package testkit

import "testing"

// ForRapid returns t for rapid.Check in a bubble of synctest: it asks a *testing.T for its deadline, which panics
// there.
func ForRapid(t testing.TB) testing.TB { return noDeadline{t} }

type noDeadline struct{ testing.TB }
